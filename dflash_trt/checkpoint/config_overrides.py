"""Overrides of a drafter's config.json for one build, without changing its files."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import Fields, shown
from dflash_trt.core.errors import problem
from dflash_trt.core.json_object import printable

_SECTIONS = ("dflash_config", "transformer_layer_config")


def with_overrides(
    fields: Fields, overrides: Mapping[str, Any], *, label: str, notes: list[str], problems: list[str]
) -> dict[str, Any]:
    """Return `fields` with these values, and add a note for each. A null counts as an absent key.

    A key is replaced where it is: at the top level, or in one of the formats' sections. A new key is added at the top
    level, or in the section that it names ("dflash_config.is_causal").
    """
    changed = dict(fields)
    for name, value in overrides.items():
        section, key = _place(changed, name)
        inside = changed if section is None else changed.get(section, {})
        if not isinstance(inside, dict):
            problems.append(problem(f"{label} key '{section}'", expected="a JSON object", found=shown(inside)))
            continue
        before = shown(inside[key]) if key in inside else "nothing"
        inside = {**inside, key: value}
        changed = inside if section is None else changed | {section: inside}
        notes.append(
            f"{label} key '{printable(name)}' is {shown(value)} instead of {before}, as drafter_overrides says"
        )
    return changed


def _place(fields: Fields, name: str) -> tuple[str | None, str]:
    """The key's section, None for the top level, and its name there."""
    section, dot, key = name.partition(".")
    if dot and section in _SECTIONS:
        return section, key
    if name not in fields:
        for section in _SECTIONS:
            if isinstance(fields.get(section), dict) and name in fields[section]:
                return section, name
    return None, name
