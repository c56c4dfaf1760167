"""Token ids that target and drafter must agree on: tokenizers' and the reduced draft vocabulary.

Reads the two small integer tensors of a reduced vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_trt.checkpoint.config_reader import read_json_object
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors
from dflash_trt.core.errors import problem
from dflash_trt.core.model.draft import DraftSpec

_TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
_ANY_OF = (_TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt")  # without one of them there is no tokenizer


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """Files of the tokenizer in a directory; empty if it has none."""
    if not any((directory / name).is_file() for name in _ANY_OF):
        return ()
    return tuple(directory / name for name in TOKENIZER_FILES if (directory / name).is_file())


def check_tokenizers(target: Path, drafter: Path, problems: list[str]) -> None:
    """Check that a drafter's tokenizer, if it has one, is the target's: the same id for every token."""
    if not (drafter / _TOKENIZER).is_file():
        return
    if not (target / _TOKENIZER).is_file():
        hint = "Copy the target's own tokenizer.json there."
        expected = f"a {_TOKENIZER}, to compare with the drafter's"
        problems.append(problem("target tokenizer", expected=expected, found="none", hint=hint))
        return
    ours = _read_vocabulary(target / _TOKENIZER, "target tokenizer.json", problems)
    theirs = _read_vocabulary(drafter / _TOKENIZER, "drafter tokenizer.json", problems)
    if ours is None or theirs is None or ours == theirs:
        return
    token = min(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token, 0)), token),
    )
    expected = f"the target's {len(ours)} tokens ({token!r} is {ours.get(token, 'absent')})"
    found = f"{len(theirs)} tokens ({token!r} is {theirs.get(token, 'absent')})"
    hint = "Use the drafter trained for this target."
    problems.append(problem("drafter tokenizer", expected=expected, found=found, hint=hint))


def read_draft_to_target(stored: StoredTensor) -> torch.Tensor:  # int64 [draft_vocab_size]
    """Read Speculators' offsets as absolute target ids: target id = draft id + d2t[draft id]."""
    offsets = _read(stored).to(torch.int64)
    return torch.arange(offsets.shape[0], dtype=torch.int64) + offsets


def check_draft_vocabulary(draft: DraftSpec, stored: StoredTensors, problems: list[str]) -> None:
    """Check that draft tokens map to distinct target tokens, the ones that `t2d`, if present, marks.

    Names, shapes and dtypes must have been checked.
    """
    if draft.draft_vocab_size is None or "d2t" not in stored.tensors:
        return
    ids = read_draft_to_target(stored.tensors["d2t"])
    hint = "Download the drafter again; d2t holds offsets, target id = draft id + d2t[draft id]."
    outside = int(((ids < 0) | (ids >= draft.target_vocab_size)).sum())
    if outside:
        expected, found = f"target ids in 0..{draft.target_vocab_size - 1}", f"{outside} outside"
        problems.append(problem("drafter tensor 'd2t'", expected=expected, found=found, hint=hint))
        return
    num_unique = len(set(ids.tolist()))
    if num_unique != ids.numel():
        expected, found = f"{ids.numel()} different target ids", f"{num_unique}"
        problems.append(problem("drafter tensor 'd2t'", expected=expected, found=found, hint=hint))
    target_to_draft = stored.tensors.get("t2d")
    if target_to_draft is None or target_to_draft.shape != (draft.target_vocab_size,):
        return
    marked = _read(target_to_draft).to(torch.bool).nonzero().flatten()
    if not torch.equal(marked, ids.sort().values):
        expected, found = "the target ids that t2d marks", "others"
        problems.append(problem("drafter tensor 'd2t'", expected=expected, found=found, hint=hint))


def _read(stored: StoredTensor) -> torch.Tensor:
    with safe_open(stored.path, framework="pt", device="cpu") as file:
        tensor = file.get_tensor(stored.name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _read_vocabulary(path: Path, label: str, problems: list[str]) -> dict[str, int] | None:
    """token -> id, added tokens included."""
    fields = read_json_object(path, label=label, problems=problems)
    if fields is None:
        return None
    model = fields.get("model")
    pieces = model.get("vocab") if isinstance(model, Mapping) else None
    added = fields.get("added_tokens") or []
    try:
        return _base_tokens(pieces) | {token["content"]: int(token["id"]) for token in added}
    except (AttributeError, TypeError, KeyError, IndexError, ValueError):
        hint = "Download the file again."
        problems.append(problem(label, expected="a model.vocab and added_tokens", found="another form", hint=hint))
        return None


def _base_tokens(pieces: Any) -> dict[str, int]:
    """A dictionary (BPE, WordPiece, WordLevel), or a list of [piece, score] (Unigram)."""
    if isinstance(pieces, list):
        return {str(piece[0]): i for i, piece in enumerate(pieces)}
    return {str(token): int(i) for token, i in pieces.items()}
