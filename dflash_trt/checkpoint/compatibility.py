"""Compatibility of a drafter and a target: catches mismatches that otherwise only lower acceptance."""

from dflash_trt.core.errors import problem
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec

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
