"""Launch rules as the plugin library gets them: the C++ of each, computed, against the Python function."""

import itertools
import re
import shutil
import subprocess
from dataclasses import fields

import pytest
import torch

from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.errors import BuildError
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.kernels.launch_rules import ANY_ROWS, MIN_DIRECT_ROWS, min_direct_rows
from dflash_trt.kernels.programs.sampling import RULE_TENSORS
from dflash_trt.kernels.rule_tensors import RuleTensors
from plugins.aot.programs import programs_source
from plugins.aot.rules import RULES, rule_expression, rules_header

SIZES = {
    "tile": (16, 128),
    "kv_heads": (1, 3, 8),
    "heads_per_kv": (1, 5, 128),
    "head_dim": (64, 80),
    "num_slots": (1, 264),
    "max_keys": (1, 2048, 2049, 131072),
    "num_multiprocessors": (1, 132),
    "window": (0, 1, 4096),
    "chunk": (0, 1, 8192),
    "lag": (1, 4095),
    "num_rows": (1, 63, 64, 65, 4096),
    "num_requests": (1, 4, 256),
    "num_verify_rows": (1, 16, 64),
    "rows_per_tile": (1, 128),
    "min_rows": (1, 64),
    "num_entries": (1, 512, 513, 9000),
    "num_experts": (1, 32, 128),
    "tokens": (16, 64),
    "groups": (1, 3, 200),
    "page_size": (8, 16, 64),
    "is_float32": (0, 1),
    "widens_weights": (0, 1),
    "is_causal": (0, 1),
    "is_window_anchored": (0, 1),
    "form": range(7),
    "num_columns": (32, 160, 4096),
    "element_bytes": (2, 4),
}


def cases(rule):
    names = [name for name in rule.__annotations__ if name != "return"]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(SIZES[name] for name in names))]


def test_prompts_are_attended_directly_in_steps_that_must_have_one_with_rows_enough() -> None:
    for num_requests, verify in itertools.product(SIZES["num_requests"], SIZES["num_verify_rows"]):
        verified = num_requests * verify
        for num_rows in {1, 63, 64, 65, verified - 1, verified, verified + 1, 2 * verified}:
            least = min_direct_rows(num_rows=num_rows, num_requests=num_requests, num_verify_rows=verify)
            if num_rows <= verified or num_rows < MIN_DIRECT_ROWS:
                assert least == ANY_ROWS, "no launch for prompts"
            else:
                assert least == max(MIN_DIRECT_ROWS, verify + 1), "no verify block is taken for a prompt"


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_rule_computes_the_same_in_cpp(tmp_path) -> None:
    checks = [(rule, case, rule(**case)) for rule in RULES for case in cases(rule)]
    assert len(checks) > 50
    lines = [
        f"static_assert(launch_rules::{rule.__name__}({', '.join(map(str, case.values()))}) == {value});"
        for rule, case, value in checks
    ]
    header = rules_header()
    source = tmp_path / "rules.cpp"
    source.write_text(header.replace("#pragma once\n", "") + "namespace dflash_trt {\n" + "\n".join(lines) + "\n}\n")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(source)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
    source.write_text(source.read_text().replace(lines[0], lines[0].replace(" == ", " == 1 + ")))
    assert "static assertion failed" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_sampling_inputs_of_the_library_are_the_table() -> None:
    names = [row.name for row in STEP_SAMPLING_FIELDS]
    (declared,) = re.findall(r"kSampleAndAcceptInputRules\w+\[\] = (.*);", programs_source())
    found = re.findall(r'\{"(\w+)", TensorType', declared)
    assert found[found.index(names[0]) :][: len(names)] == names


def test_rules_in_memory_are_as_the_program_reads_them() -> None:
    tensors = RuleTensors.allocate(5, 70, torch.device("cpu"))
    sizes = {"slots": 5, "max_positions": 70}
    assert [item.name for item in fields(RuleTensors)] == [rule.name for rule in RULE_TENSORS]
    for rule in RULE_TENSORS:
        tensor = getattr(tensors, rule.name)
        assert dtype_name(tensor.dtype) == rule.dtype
        assert tuple(tensor.shape) == tuple(sizes.get(axis) or int(axis) for axis in rule.shape)


def to_the_power(*, tile: int) -> int:
    return tile**2


def of_a_stranger(*, tile: int) -> int:
    return tile * len(SIZES)


def in_two_steps(*, tile: int) -> int:
    double = tile * 2
    if double > 4:
        return 4
    return double


@pytest.mark.parametrize("rule", [to_the_power, of_a_stranger, in_two_steps])
def test_a_rule_that_cpp_might_compute_otherwise_is_refused(rule) -> None:
    with pytest.raises(BuildError, match=f"launch rule {rule.__name__}"):
        rule_expression(rule)
