"""The tables of a quantized build, and the choices of the command line beside those of its file."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.cli.quantization_tables import plan_table, size_table, with_flags
from dflash_trt.core.quantization import QuantizationConfig, QuantizationSpec
from dflash_trt.quantize.plan import QuantizationPlan, make_plan


def rows_of(table: Any) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_layers_that_are_alike_share_a_row_and_others_are_named(target, drafter) -> None:
    pair = open_pair(target, drafter)
    stored = QuantizationSpec(linears={"target.layers.0.down": "fp8"})

    def plan(draft: Any, **choices: Any) -> QuantizationPlan:
        return make_plan(QuantizationConfig(**choices), pair.target, draft, stored)

    overrides = {"target.layers.1.o": "nvfp4", "target.layers.3.o": "nvfp4"}
    made = plan(pair.draft, target="fp8", drafter="none", kv_cache="fp8", draft_kv_cache="none", overrides=overrides)
    rows = rows_of(plan_table(made, "float16"))
    for row in (
        ("target.layers.*.qkv", "4", "64", "fp8", "this build"),
        ("target.layers.{0,2}.o", "2", "64", "fp8", "this build"),
        ("target.layers.{1,3}.o", "2", "64", "nvfp4", "this build"),
        ("target.layers.0.down", "1", "96", "fp8", "the checkpoint"),
        ("target.layers.{1,2,3}.down", "3", "96", "fp8", "this build"),
        ("draft.fc", "1", "128", "float16", ""),
        ("target K/V pages", "", "", "fp8", ""),
        ("draft K/V pages", "", "", "float16", ""),
    ):
        assert row in rows
    assert sum(int(row[1] or 0) for row in rows) == len(made.linears)
    alone = rows_of(plan_table(plan(None), "float16"))
    assert alone[-1] == ("target K/V pages", "", "", "float16", "")


def test_a_name_that_begins_like_others_does_not_stand_for_them() -> None:
    def linear(name: str, weight_format: str | None) -> Any:
        return SimpleNamespace(name=name, format=weight_format, is_stored=False, spec=SimpleNamespace(shape=(2, 3)))

    linears = [linear(f"target.layers.{i}.{part}", "fp8") for part in ("o", "out") for i in (0, 1)]
    plan: Any = SimpleNamespace(linears=linears, has_fp8_target_kv=False, draft=None)
    assert [row[:3] for row in rows_of(plan_table(plan, "float16"))[:2]] == [
        ("target.layers.*.o", "2", "3"),
        ("target.layers.*.out", "2", "3"),
    ]


def test_sizes_are_compared_part_by_part_and_together() -> None:
    parts = [
        {"component": "target", "plain_bytes": 4000, "planned_bytes": 1000},
        {"component": "draft_lm_head", "plain_bytes": 0, "planned_bytes": 500},
    ]
    assert rows_of(size_table(parts, "float32")) == [
        ("target", "4.0 kB", "1.0 kB", "0.250"),
        ("draft_lm_head", "0 bytes", "500 bytes", "added"),
        ("total", "4.0 kB", "1.5 kB", "0.375"),
    ]


@pytest.mark.parametrize(
    ("section", "flags", "merged"),
    [
        ({"lm_head": "fp8"}, {}, {"lm_head": "fp8"}),
        (None, {"quantization": "fp8"}, {"target": "fp8"}),
        ("fp8", {"kv_cache": "fp8"}, {"target": "fp8", "kv_cache": "fp8"}),
        ("fp8", {"quantization": "int4", "drafter_quantization": "none"}, {"target": "int4", "drafter": "none"}),
        ({"target": "fp8", "lm_head": "fp8"}, {"quantization": "int4"}, {"target": "int4", "lm_head": "fp8"}),
        ("int4", {"head_quantization": "int8"}, {"target": "int4", "lm_head": "int8"}),
        ([1], {"quantization": "int4"}, [1]),  # refused with the other values of the file
    ],
)
def test_flags_replace_the_choices_of_the_file_one_by_one(section: Any, flags: dict[str, str], merged: Any) -> None:
    assert with_flags(section, flags) == merged
