"""Machine files: measurements of `dflash-trt bench machine`, as JSON whose keys carry their units."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from dflash_trt.core.errors import ConfigError, raise_all
from dflash_trt.core.frozen import Frozen, checked
from dflash_trt.core.json_object import read_json_object
from dflash_trt.plan.gpus import Gpu
from dflash_trt.plan.step_costs import StepCosts

MACHINE_FILE_VERSION: Final = 1

_Positive = Annotated[float, Field(gt=0.0)]
_Rates = Annotated[dict[int, _Positive], Field(min_length=1)]


class MachineFile(Frozen):
    """One machine that computes a rank. `how` describes the measurement: versions, threads and clock.

    `copy_bytes_per_s` counts bytes read and written; by working set it holds for steps that read as many bytes.
    `peak_flops_per_s` is by the bits of an operand. `costs` None means that only floors were measured.
    """

    machine_file_version: Literal[1] = MACHINE_FILE_VERSION
    name: Annotated[str, Field(min_length=1, max_length=200)]
    how: str
    memory_bytes: Annotated[int, Field(ge=1)]
    compute_capability: tuple[int, int] | None = None
    num_multiprocessors: Annotated[int, Field(ge=1)] = 192
    copy_bytes_per_s: _Positive
    copy_bytes_per_s_by_working_set_bytes: _Rates
    peak_flops_per_s_by_operand_bits: _Rates
    plain_weight_bits: Literal[16, 32] | None = None
    link_bytes_per_s: _Positive | None = None
    costs: StepCosts | None = None

    @property
    def gpu(self) -> Gpu:
        """As planning takes it."""
        return Gpu(
            name=self.name,
            memory_bytes=self.memory_bytes,
            capability=self.compute_capability,
            num_multiprocessors=self.num_multiprocessors,
            bytes_per_s=self.copy_bytes_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            peak_flops=self.peak_flops_per_s_by_operand_bits,
            read_bytes_per_s=self.copy_bytes_per_s_by_working_set_bytes,
            plain_weight_bits=self.plain_weight_bits,
        )

    def text(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def read_machine_file(path: Path) -> MachineFile:
    """Raises ConfigError: no such file, or not one that this version writes."""
    try:
        fields: dict[str, Any] = read_json_object(path)
    except (OSError, ValueError) as error:
        expected = "a machine file of `dflash-trt bench machine`"
        raise ConfigError.about(str(path), expected=expected, found=str(error)) from error
    problems: list[str] = []
    found = checked(MachineFile, fields, label=str(path), problems=problems)
    raise_all(ConfigError, "machine file", problems)
    assert found is not None
    return found
