"""Machine files: what was measured comes back, and nothing else is taken for one."""

import json
from pathlib import Path

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.machine_file import MachineFile, read_machine_file
from dflash_trt.plan.step_costs import assumed_costs

MACHINE = MachineFile(
    name="a CPU",
    how="by hand",
    memory_bytes=1 << 34,
    copy_bytes_per_s=1e10,
    copy_bytes_per_s_by_working_set_bytes={1 << 20: 4e10, 1 << 28: 1e10},
    peak_flops_per_s_by_operand_bits={32: 2e11},
    plain_weight_bits=16,
    costs=assumed_costs(gpu_of("h200")),
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.text())
    found = read_machine_file(path)
    assert found == MACHINE
    assert found.gpu.bytes_per_s == 1e10 and found.gpu.flops_of(16) == 2e11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"copy_bytes_per_s": 0}, "copy_bytes_per_s: expected greater than 0, found 0"),
        ({"copy_gb_per_s": 3}, "copy_gb_per_s"),
        ({"machine_file_version": 2}, "machine_file_version: expected 1, found 2"),
        ({"peak_flops_per_s_by_operand_bits": {}}, "peak_flops_per_s_by_operand_bits"),
    ],
)
def test_what_this_version_does_not_write_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(json.loads(MACHINE.text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_machine_file(path)


def test_a_missing_file_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a machine file of `dflash-trt bench machine`"):
        read_machine_file(tmp_path / "none.json")
