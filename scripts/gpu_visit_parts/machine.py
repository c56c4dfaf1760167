"""The machine and its peak rates, the rooflines of every measurement."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata

import torch
import triton

from gpu_visit_parts.results import Tables
from gpu_visit_parts.setting import SETTING, Case
from gpu_visit_parts.timing import machine_roofs


def cases() -> Iterator[Case]:
    yield Case(name="machine", run=_machine)


def _machine() -> Tables:
    row = {"torch": torch.__version__, "triton": triton.__version__, "numpy": metadata.version("numpy")}
    if SETTING.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}
        row |= {"multiprocessors": properties.multi_processor_count}
    return {"machine": [row | asdict(machine_roofs())]}
