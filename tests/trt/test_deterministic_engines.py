"""The law of `tests/parity/test_deterministic.py`, over interpreted TensorRT engines built with `deterministic`."""

from collections.abc import Iterator

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")

import tensorrt_rtx

from dflash_trt.engine_dir import EngineDir
from plugins.aot.linear_variants import linears_of, max_norm_columns
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


def test_the_plugin_library_has_every_linear_layer_and_norm_of_the_network(engine: EngineDir) -> None:  # noqa: F811
    flags = ("form", "has_row_scale", "has_input_scale", "has_bias")
    known = {
        (linear.in_size, linear.out_size, of.form, of.has_row_scale, of.num_input_scales, of.has_bias)
        for linear in linears_of(engine.manifest.pretrained_config)
        for of in (linear.weight,)
    }
    nodes = define_engine(tensorrt_rtx, engine, split_length=SPLIT_LENGTH).nodes
    linears = {
        (node.given[0].shape[1], node.given[1].shape[0], *(int(node.fields[name]) for name in flags))
        for node in nodes
        if node.name == "Linear"
    }
    assert linears and linears <= known
    most = max(node.given[0].shape[1] for node in nodes if node.name == "RmsNorm")
    assert most <= max_norm_columns(engine.manifest.target)
    assert not {node.name for node in nodes} & {"AttendPages", "GatedDelta", "AttendLatents"}
