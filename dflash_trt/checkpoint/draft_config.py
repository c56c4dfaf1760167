"""A drafter's config.json -> DraftSpec; `drafters/` has the formats."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config_reader import read_json_object, shown, with_overrides
from dflash_trt.checkpoint.drafters.base import LABEL, draft_formats
from dflash_trt.checkpoint.drafters.deepspec import ARCHITECTURES as DSPARK_ARCHITECTURES
from dflash_trt.checkpoint.drafters.eagle3 import ARCHITECTURES as EAGLE3_ARCHITECTURES
from dflash_trt.checkpoint.drafters.speculators import SPECULATORS_KEY
from dflash_trt.checkpoint.drafters.zlab import ARCHITECTURE
from dflash_trt.checkpoint.families.base import family_of
from dflash_trt.core.errors import problem
from dflash_trt.core.frozen import checked
from dflash_trt.core.model.draft import DraftSpec


def parse_draft(
    directory: Path,
    tensor_names: Collection[str],
    problems: list[str],
    *,
    notes: list[str],
    overrides: Mapping[str, Any] | None = None,
    num_target_layers: int | None = None,
) -> DraftSpec | None:
    """Read the spec of the drafter in `directory`; None if `problems` has grown.

    `tensor_names` are the names in its checkpoint: Speculators' config does not say if the drafter has its own
    embedding. `notes` get the resolved ambiguities and the `overrides`. `num_target_layers` is the given target's
    number of layers.
    """
    num_problems = len(problems)
    _refuse_extra_files(directory, problems)
    fields = read_json_object(directory / "config.json", label=LABEL, problems=problems)
    if fields is None:
        return None
    fields = with_overrides(fields, overrides or {}, label=LABEL, notes=notes, problems=problems)
    found_format = next((known for known in draft_formats().values() if known.recognizes(fields)), None)
    if found_format is None:
        names = (ARCHITECTURE, DSPARK_ARCHITECTURES[0], EAGLE3_ARCHITECTURES[0])
        expected = f"{', '.join(names)}, or a key '{SPECULATORS_KEY}'"
        hint = "Use a DFlash, DSpark or EAGLE-3 drafter; other methods are not implemented."
        architectures = fields.get("architectures")
        if isinstance(architectures, list) and architectures and family_of(architectures[0], None) is not None:
            hint = "This is a model to serve: pass it as the target, and its drafter as the drafter."
        subject, found = f"{LABEL} key 'architectures'", shown(architectures)
        problems.append(problem(subject, expected=expected, found=found, hint=hint))
        return None
    if num_target_layers is not None and found_format.asks_for_target_layers(fields):
        fields = {"num_target_layers": num_target_layers} | fields
    spec_fields = found_format.read(fields, tensor_names, problems, notes)
    if len(problems) > num_problems:
        return None
    return checked(DraftSpec, spec_fields, label=LABEL, problems=problems)


def _refuse_extra_files(directory: Path, problems: list[str]) -> None:
    name = "mask_embedding.pt"
    hint = "A mask embedding stored with the drafter is not implemented: use a drafter without it."
    if (directory / name).exists():
        problems.append(problem(f"drafter file '{name}'", expected="no such file", found="one", hint=hint))
