"""The interface of a drafter format, and all formats."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from dflash_trt.checkpoint import drafters

LABEL = "drafter config.json"

DraftFields = dict[str, Any]  # fields of a DraftSpec
ReadDraft = Callable[[Mapping[str, Any], Collection[str], list[str], list[str]], DraftFields]


@dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """A file format of drafters. `recognizes` looks at config.json.

    `read(fields, tensor_names, problems, notes)` gives the fields of a DraftSpec, not to be used if `problems` has
    grown. `ignorable_tensors` are stored but not needed. A file that `asks_for_target_layers` gets the target's number
    as `num_target_layers`, if it lacks that.
    """

    name: str
    recognizes: Callable[[Mapping[str, Any]], bool]
    read: ReadDraft
    ignorable_tensors: tuple[str, ...] = ()
    asks_for_target_layers: Callable[[Mapping[str, Any]], bool] = lambda fields: False


@cache
def draft_formats() -> Mapping[str, DraftFormat]:
    """Drafter formats by name."""
    modules: list[Any] = [
        import_module(f"{drafters.__name__}.{module.name}") for module in iter_modules(drafters.__path__)
    ]
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}
