"""Stubs of plugin nodes: their programs' types and shapes, in a network that TensorRT-RTX builds."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.network import define_step_network
from dflash_trt.backends.tensorrt.node_stubs import add_stub
from dflash_trt.core.errors import BuildError
from dflash_trt.kernels.programs import ATTEND_PAGES
from dflash_trt.kernels.programs.program import Program
from tests.eagle3_files import save_eagle3_head
from tests.factories import make_target
from tests.trt.networks import MAX_SEQ_LEN, host_tensors, open_spec
from tests.trt.recorder import output_types
from tests.trt.test_step_tokens import make_pair

FIELDS = dict.fromkeys((field.name for field in ATTEND_PAGES.fields), 1.0)


def dflash(root: Path) -> tuple[Path, Path | None]:
    return make_pair(root)


def without_drafts(root: Path) -> tuple[Path, Path | None]:
    return make_pair(root, has_drafter=False)


def eagle3(root: Path) -> tuple[Path, Path | None]:
    target = make_target(root / "target", num_hidden_layers=2, vocab_size=12, tokenizer=False)
    return target, save_eagle3_head(root / "drafter", target_dir=target, aux_hidden_state_layer_ids=(2, 1))


def target_of(family: str) -> Callable[[Path], tuple[Path, Path | None]]:
    return lambda root: (make_target(root / "target", family=family, tokenizer=False), None)


PAIRS = {"dflash": dflash, "no drafter": without_drafts, "eagle3": eagle3}
PAIRS |= {family: target_of(family) for family in ("qwen3_next", "deepseek_v3")}


@pytest.mark.parametrize("name", PAIRS)
def test_stubs_have_the_outputs_of_their_nodes(trt: ModuleType, tmp_path: Path, name: str) -> None:
    seen = set()

    def compared(layers: Layers, program: Program, node: str, inputs: Any, fields: Any) -> list[ITensor]:
        outputs = add_stub(layers, program, node, inputs, fields)
        assert [(x.dtype, tuple(x.shape)) for x in outputs] == output_types(trt, program.name, inputs, fields), node
        seen.add(program.name)
        return outputs

    spec, tensors = open_spec(*PAIRS[name](tmp_path), dtype="bfloat16")
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    layers = Layers(trt, builder.create_network(0), logger)
    tables = host_rope_tables(spec, max_seq_len=MAX_SEQ_LEN)
    define_step_network(layers, spec, host_tensors(tensors), rope_tables=tables, add_node=compared)
    assert "SampleAndAccept" in seen and len(seen) >= 2


def inputs_of_attention(layers: Layers) -> dict[str, ITensor]:
    types = {"q": ("float32", (-1, 4, 16)), "k": ("float32", (-1, 2, 16)), "v": ("float32", (-1, 2, 16))}
    types |= {"state_pools": ("int64", (3,)), "page_table": ("int32", (-1, -1)), "sinks": ("float32", (4,))}
    types |= dict.fromkeys(("positions", "token_offsets", "context_lens"), ("int32", (-1,)))
    return {name: layers.add_input(name, dtype, shape, [""] * len(shape)) for name, (dtype, shape) in types.items()}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "k",
            ("float32", (-1, 2, 8)),
            r"input v: expected F \[T, kv_heads, D\]|input k: expected F \[T, kv_heads, D\]",
        ),
        ("v", ("float16", (-1, 2, 16)), r"input v: expected F .*found HALF \[-1, 2, 16\]"),
        ("sinks", ("float32", (3,)), r"input sinks: expected float32 \[heads\], found FLOAT \[3\]"),
        ("positions", ("int64", (-1,)), r"input positions: expected int32 \[T\], found INT64 \[-1\]"),
        ("page_table", ("int32", (-1,)), r"input page_table: expected int32 \[R, P\], found INT32 \[-1\]"),
    ],
)
def test_an_input_that_the_node_does_not_take_is_refused_by_name(
    trt: ModuleType, name: str, wrong: tuple[str, tuple[int, ...]], message: str
) -> None:
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    layers = Layers(trt, builder.create_network(0), logger)
    given = inputs_of_attention(layers)
    assert len(add_stub(layers, ATTEND_PAGES, "honest", [given[key] for key in ATTEND_PAGES.input_names], FIELDS)) == 1
    given[name] = layers.add_input("wrong", *wrong, [""] * len(wrong[1]))
    with pytest.raises(BuildError, match=message):
        add_stub(layers, ATTEND_PAGES, "changed", [given[key] for key in ATTEND_PAGES.input_names], FIELDS)
