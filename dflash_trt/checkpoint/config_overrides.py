"""Keys of a drafter's config.json that the user replaces for one build: its files stay as they were published."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.config_reader import Fields, shown
from dflash_trt.core.errors import problem
from dflash_trt.core.json_object import printable

_SECTIONS = ("dflash_config", "transformer_layer_config")


def with_overrides(
    fields: Fields, overrides: Mapping[str, Any], *, label: str, notes: list[str], problems: list[str]
) -> dict[str, Any]:
    """`fields` with these values; null stands for no key, and each one that changed something makes a note.

    A key is replaced where it stands: at the top level, or in one of the formats' sections. One that is nowhere yet is
    added at the top level, or in the section that it names ("dflash_config.is_causal").
    """
    changed = dict(fields)
    for name, value in overrides.items():
        section, key = _place(changed, name)
        inside = changed if section is None else changed.get(section, {})
        if not isinstance(inside, dict):
            found, hint = shown(inside), "Correct the file, or name a key of another section."
            problems.append(problem(f"{label} key '{section}'", expected="a JSON object", found=found, hint=hint))
            continue
        before = shown(inside[key]) if key in inside else "nothing"
        inside = {**inside, key: value}
        changed = inside if section is None else changed | {section: inside}
        notes.append(
            f"{label} key '{printable(name)}' is {shown(value)} instead of {before}, as drafter_overrides says"
        )
    return changed


def _place(fields: Fields, name: str) -> tuple[str | None, str]:
    """The section, None for the top level, and the key in it."""
    section, dot, key = name.partition(".")
    if dot and section in _SECTIONS:
        return section, key
    if name not in fields:
        for section in _SECTIONS:
            if isinstance(fields.get(section), dict) and name in fields[section]:
                return section, name
    return None, name
