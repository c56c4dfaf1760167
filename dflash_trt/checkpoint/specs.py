"""A target and its drafter from their config.json files, without tensors or tokenizers.

`pair` proves the same from the tensors. What only tensors can tell is assumed from the configs, with a note.
"""

from collections.abc import Iterator
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.checkpoint.config_reader import read_json_object
from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.checkpoint.mtp import is_mtp, mtp_tensors, parse_mtp
from dflash_trt.checkpoint.mxfp4_config import has_mxfp4
from dflash_trt.checkpoint.names import draft_names, model_prefix, mtp_names, target_names
from dflash_trt.checkpoint.producers.base import Scheme, read_scheme
from dflash_trt.checkpoint.quantized_weights import OFTEN_UNQUANTIZED, format_notes
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.core.errors import ConfigError, ErrorCollector, problem, raise_all
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.weight_spec import WeightTable, is_linear

_ENGINE_KEY = "pretrained_config"  # of an engine's config.json, TensorRT-LLM's as well


@dataclass(frozen=True, kw_only=True)
class PairSpecs:
    """A target and its drafter, if any. `quantization` is the checkpoints', `notes` are about ambiguities."""

    target: TargetSpec
    draft: DraftSpec | None
    quantization: QuantizationSpec
    notes: tuple[str, ...]


AnyPair = TypeVar("AnyPair", bound=PairSpecs)


def with_draft_window(pair: AnyPair, window: int | None) -> AnyPair:
    """The pair with a drafter that sees at most `window` tokens of context; unchanged for None.

    Raises:
        ConfigError: there is no drafter.
    """
    if window is None:
        return pair
    if pair.draft is None:
        raise ConfigError.about("draft_window", expected="a drafter", found="none", hint="Leave draft_window out.")
    note = f"the drafter sees the last {window} tokens of the context, as draft_window says"
    return replace(pair, draft=pair.draft.with_window(window), notes=(*pair.notes, note))


def read_specs(
    target: Path, drafter: Path | None, *, drafter_overrides: AbcMapping[str, Any] | None = None
) -> PairSpecs:
    """Read the specs of a pair. K/V scales are 1; Speculators drafters have no embedding and no full head.

    Raises:
        ConfigError: a config is wrong, or the two do not fit.
    """
    problems: list[str] = []
    notes: list[str] = ["only config.json files were read: names and shapes of tensors are not checked"]
    directories = {"target": target} | ({} if drafter is None else {"drafter": drafter})
    refuse_missing(directories)
    drafts_itself = is_mtp(target, drafter)
    if drafts_itself:
        directories.pop("drafter")
    target_spec = parse_target(target, problems, notes=notes, drafts_itself=drafts_itself)
    stored = {label: read_scheme(directory, label=label, problems=problems) for label, directory in directories.items()}
    draft_spec, overrides = None, drafter_overrides or {}
    own_names: ForeignTable | None = None
    if drafts_itself and target_spec is not None:
        head = mtp_tensors(target_spec, model_prefix(()))
        draft_spec = parse_mtp(target, target_spec, head, (), problems, overrides=overrides)
        own_names = mtp_names(draft_spec, target_spec, head) if draft_spec is not None and head is not None else None
    elif drafter is not None and not drafts_itself:
        num_layers = None if target_spec is None else target_spec.num_layers
        draft_spec = parse_draft(drafter, (), problems, notes=notes, overrides=overrides, num_target_layers=num_layers)
    if target_spec is not None and draft_spec is not None:
        problems += compatibility_problems(target_spec, draft_spec)
        notes += compatibility_notes(target_spec, draft_spec)
    raise_all(ConfigError, pair_heading(target, drafter), problems)
    assert target_spec is not None
    names = target_names(target_spec)
    linears = dict(_formats(target_spec.weights(), names, stored["target"]))
    if has_mxfp4(target):
        linears |= {name: "mxfp4" for name, foreign in names.items() if foreign.layout and foreign.layout.is_mxfp4}
    notes += format_notes(linears.values(), "target")
    if draft_spec is not None:
        names = draft_names(draft_spec, ()) if own_names is None else own_names
        scheme = stored["target" if drafts_itself else "drafter"]
        of_drafter = dict(_formats(draft_spec.weights(), names, scheme))
        notes += format_notes(of_drafter.values(), "drafter")
        linears |= of_drafter
    has_fp8_kv = stored["target"] is not None and stored["target"].has_fp8_kv
    quantization = QuantizationSpec(
        linears=linears, target_kv=(LayerKvScales(),) * target_spec.num_layers if has_fp8_kv else None
    )
    return PairSpecs(target=target_spec, draft=draft_spec, quantization=quantization, notes=tuple(notes))


def refuse_missing(directories: AbcMapping[str, Path]) -> None:
    """Raises ConfigError: a checkpoint, by its label, is not a directory, or holds an engine."""
    errors = ErrorCollector()
    for label, path in directories.items():
        errors.run(partial(_check_directory, label, path))
    errors.raise_all("checkpoints")


def _check_directory(label: str, path: Path) -> None:
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing at that path"
        hint = "Pass the directory that holds config.json and the safetensors files."
        raise ConfigError.about(f"{label} {path}", expected="a checkpoint directory", found=found, hint=hint)
    if _ENGINE_KEY in (read_json_object(path / "config.json", label=label, problems=[]) or {}):
        hint = "Pass the checkpoint from which it was built."
        raise ConfigError.about(f"{label} {path}", expected="a checkpoint directory", found="an engine", hint=hint)


def pair_heading(target: Path, drafter: Path | None) -> str:
    """The subject of an error about a pair."""
    return f"target {target}" if drafter is None else f"target {target} with drafter {drafter}"


def _formats(table: WeightTable, names: ForeignTable, scheme: Scheme | None) -> Iterator[tuple[str, str]]:
    """The format of each linear layer whose parts all have the same.

    Tensors would say which heads and routers are quantized; without them none is, as in every checkpoint that is known.
    """
    if scheme is None:
        return
    for canonical, spec in table.items():
        if not is_linear(spec, canonical) or canonical.endswith(OFTEN_UNQUANTIZED):
            continue
        claimed = [scheme.format_of(name.removesuffix(".weight")) for name in names[canonical].parts]
        formats = {None if stored is None else stored.format for stored in claimed}
        known = formats.pop() if len(formats) == 1 else None
        if known is not None:
            yield canonical, known


_OTHER_DRAFTER = "Use the drafter trained for this target."


def compatibility_problems(target: TargetSpec, draft: DraftSpec) -> list[str]:
    """All mismatches between two specs; empty when they fit."""
    pairs = [
        ("target_hidden_size", target.hidden_size, draft.target_hidden_size),
        ("vocab_size", target.vocab_size, draft.target_vocab_size),
    ]
    if draft.num_target_layers is not None:
        pairs.append(("num_target_layers", target.num_layers, draft.num_target_layers))
    shared = _shared_parts(draft)
    if shared:
        pairs.append((f"hidden_size (it shares the target's {shared})", target.hidden_size, draft.hidden_size))
    problems = [
        problem(f"drafter {name}", expected=f"{ours} (the target's)", found=str(theirs), hint=_OTHER_DRAFTER)
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    return [*problems, *_tap_problems(target, draft)]


def compatibility_notes(target: TargetSpec, draft: DraftSpec) -> list[str]:
    """Notes about ambiguities: a tap on the last layer has two readings, except in an MTP head.

    vLLM and SGLang serve drafters on the layer's output, on which Speculators also trains; transformers' hidden_states,
    which z-lab's reference code reads, have it after the final norm.
    """
    if draft.mtp is not None or target.num_layers - 1 not in draft.target_layer_ids:
        return []
    return [
        f"the drafter's tap on the target's last layer, {target.num_layers - 1}, is read before the final norm, as "
        f"Speculators trains and vLLM and SGLang serve it; transformers' hidden_states[{target.num_layers}] is normed"
    ]


def _shared_parts(draft: DraftSpec) -> str:
    parts = [] if draft.has_own_embedding else ["embedding"]
    if draft.draft_vocab_size is None:
        parts.append("lm_head")
    return " and ".join(parts)


def _tap_problems(target: TargetSpec, draft: DraftSpec) -> list[str]:
    outside = [layer_id for layer_id in draft.target_layer_ids if layer_id >= target.num_layers]
    if not outside:
        return []
    expected = f"layers 0..{target.num_layers - 1}"
    return [problem("drafter target_layer_ids", expected=expected, found=str(outside), hint=_OTHER_DRAFTER)]
