"""The law of `tests/parity/test_deterministic.py`, over interpreted TensorRT engines built with `deterministic`."""

from collections.abc import Iterator

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")

import tensorrt_rtx

from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from plugins.aot.linear_variants import LinearKernels, linears_of, max_norm_columns
from tests.parity.test_deterministic import (
    BLOCK_SIZE,
    PROMPTS,
    alone,
    answers,
    engine,  # noqa: F401  (a fixture)
    opened,
    test_batch_mates_drafts_chunks_prefix_hits_and_chaining_change_no_bit,  # noqa: F401
)
from tests.trt.engines import SPLIT_LENGTH, interpreted_engines
from tests.trt.networks import define_engine


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with interpreted_engines():
        yield


def test_an_engine_that_was_built_without_it_depends_on_the_batch(engine: EngineDir) -> None:  # noqa: F811
    """The negative control."""
    executor = opened(engine, deterministic=False)
    together = answers(executor, range(len(PROMPTS)), {1: BLOCK_SIZE - 1}, chunk=7)
    assert together != alone(executor)


@pytest.mark.parametrize("engine", ["int8"], indirect=True)
def test_integers_give_the_tokens_and_bits_of_backend_torch(engine: EngineDir) -> None:  # noqa: F811
    """Alone and in a batch; only layers of integers have sums that no order changes."""
    config = RuntimeConfig(device="cpu", deterministic=True, kv_cache_bytes=1 << 22)
    expected = alone(TorchExecutor.open(engine, config))
    executor = opened(engine, deterministic=True)
    assert isinstance(executor, TensorRTExecutor)
    assert alone(executor) == expected
    assert answers(executor, range(len(PROMPTS)), {1: BLOCK_SIZE - 1}, chunk=7) == expected


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_plugin_library_has_every_linear_layer_and_norm_of_the_network(
    engine: EngineDir,  # noqa: F811
    is_deterministic: bool,
) -> None:
    """Of an engine that is not deterministic, layers of integers alone."""
    flags = ("form", "has_row_scale", "has_input_scale", "has_bias")
    known = set()
    config = engine.manifest.pretrained_config
    for linear in linears_of(config, is_deterministic=is_deterministic):
        if isinstance(linear, LinearKernels):
            of = linear.weight
            kind = (of.form, of.has_row_scale, of.num_input_scales, of.has_bias)
        else:
            kind = (linear.has_bias,)
        known.add((linear.in_size, linear.out_size, *kind))
    nodes = define_engine(tensorrt_rtx, engine, split_length=SPLIT_LENGTH if is_deterministic else 0).nodes
    linears = {
        (node.given[0].shape[1], node.given[1].shape[0], *(int(x) for name, x in node.fields.items() if name in flags))
        for node in nodes
        if node.name in ("Linear", "Int8Linear")
    }
    assert linears <= known
    has_int8 = config.quantization is not None and "int8" in config.quantization.linears.values()
    assert ("Int8Linear" in {node.name for node in nodes}) == has_int8
    assert bool(linears) == bool(known) == (is_deterministic or has_int8)
    if is_deterministic:
        most = max(node.given[0].shape[1] for node in nodes if node.name == "RmsNorm")
        assert most <= max_norm_columns(config.target)
        assert not {node.name for node in nodes} & {"AttendPages", "GatedDelta", "AttendLatents"}
