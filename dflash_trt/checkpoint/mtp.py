"""MTP heads in a target's own checkpoint: their configs as DraftSpecs, and the names of their tensors."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED
from dflash_trt.checkpoint.drafters.chain import DEFAULT_CHAIN
from dflash_trt.checkpoint.families.base import MtpTensors, all_families
from dflash_trt.core.errors import problem
from dflash_trt.core.frozen import checked
from dflash_trt.core.model.decoder import LayerSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gqa import Gqa

MTP_FORMAT = "mtp"  # `DraftSpec.source_format`

_LABEL = "target config.json"


def is_mtp(target: Path, drafter: Path | None) -> bool:
    """True if the drafter is to be read from the target's own checkpoint. Both directories exist."""
    return drafter is not None and drafter.samefile(target)


def mtp_tensors(spec: TargetSpec, model: str) -> MtpTensors | None:
    """Names of the head in a checkpoint of this target; `model` is the prefix of its tensors' names."""
    names = all_families()[spec.family].mtp
    return None if names is None else names.of_layer(f"{model}layers.{spec.num_layers}")


def parse_mtp(
    directory: Path,
    target: TargetSpec,
    head: MtpTensors | None,
    tensor_names: Collection[str],
    problems: list[str],
    *,
    overrides: Mapping[str, Any],
) -> DraftSpec | None:
    """Read the spec of the target's own head; None if `problems` has grown.

    `tensor_names` are the names in the checkpoint, or empty if they are not known.
    """
    if overrides:
        hint = "The config of an MTP head is the target's: leave drafter_overrides out."
        problems.append(problem("drafter_overrides", expected="none", found=", ".join(overrides), hint=hint))
        return None
    layer = _layer(target)
    if head is None or layer is None:
        known = ", ".join(name for name, family in all_families().items() if family.mtp is not None)
        hint = "Use another drafter, or --drafter none."
        problems.append(problem("drafter mtp", expected=f"a target of {known}", found=target.family, hint=hint))
        return None
    num_problems = len(problems)
    _check_config(directory, head, problems)
    if tensor_names and f"{head.fc}.weight" not in tensor_names:
        hint = "Use a checkpoint that was saved with its MTP head, or another drafter."
        expected = f"a tensor '{head.fc}.weight'"
        problems.append(problem("drafter mtp", expected=expected, found="none in the target's checkpoint", hint=hint))
    if len(problems) > num_problems:
        return None
    fields = {
        "algorithm": "mtp",
        "mtp": {"has_offset_norms": target.has_offset_norms},
        "source_format": MTP_FORMAT,
        "layers": (layer,),
        "target_layer_ids": (target.num_layers - 1,),
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "draft_block_size": DEFAULT_CHAIN + 1,
        **{name: getattr(target, name) for name in ("hidden_size", "rms_norm_eps", "max_position_embeddings")},
    }
    return checked(DraftSpec, fields, label=_LABEL, problems=problems)


def _layer(target: TargetSpec) -> LayerSpec | None:
    """The head's layer is like the target's last one with full attention; the first token has no row in it."""
    layer = next((layer for layer in reversed(target.layers) if isinstance(layer.mixer, Gqa)), None)
    if layer is None:
        return None
    assert isinstance(layer.mixer, Gqa)
    mask = layer.mixer.mask.model_copy(update={"first_key": 1})
    return layer.model_copy(update={"mixer": layer.mixer.model_copy(update={"mask": mask})})


def _check_config(directory: Path, head: MtpTensors, problems: list[str]) -> None:
    """Refuse heads of several layers, and heads with an embedding of their own."""
    fields = read_json_object(directory / "config.json", label=_LABEL, problems=[]) or {}
    inner = fields.get("text_config")
    reader = ConfigReader(inner if isinstance(inner, dict) else fields, label=_LABEL, problems=problems)
    reader.require(head.count_key, 1, hint="Only heads of one layer are implemented: use another drafter.")
    reader.require("mtp_use_dedicated_embeddings", False, hint=NOT_IMPLEMENTED)
