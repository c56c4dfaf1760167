"""Bytes of text that one token can stand for, from a tokenizer's own description (tokenizer.json).

It bounds a prompt before it is tokenized: a text of more than num_tokens * max_bytes_per_token bytes has more tokens
than num_tokens. That holds only if no part of the text can vanish, so whatever is not known to keep it is doubted.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_trt.serving.detokenizer import byte_alphabet

# Bytes of text for one byte of what the normalizer makes of it, at most. A character of 4 bytes may become one of 1
# (U+1D400 is "A" in NFKC), and no composition does worse.
_MAX_UNICODE_SHRINKAGE = 4.0
_UNICODE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
_GROWING_NORMALIZERS = {"Prepend", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts", "FixedLength"}
_MAX_CHARACTER_BYTES = 4


def max_bytes_per_token(tokenizer: Mapping[str, Any], normalize: Callable[[str], str]) -> int | None:
    """Upper bound of text bytes per token; None means no bound, for example if white space is dropped.

    `normalize` is the tokenizer's normalizer: added tokens may be looked for in normalized text.
    """
    shrinkage = 1.0
    normalizers = list(_steps(tokenizer.get("normalizer"), "normalizers"))
    for normalizer in normalizers:
        factor = _shrinkage(normalizer)
        if factor is None:
            return None
        shrinkage *= factor
    pre_tokenizers = list(_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    if not all(_keeps_text(step) for step in pre_tokenizers):
        return None
    added = tokenizer.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):  # they swallow the white space around them
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    longest = _longest_piece(tokenizer["model"], is_byte_level=is_byte_level)
    if longest is None:
        return None
    contents = [token["content"] for token in added]
    contents += [normalize(token["content"]) for token in added if token["normalized"]]
    return int(max([longest, *(len(text.encode()) for text in contents)]) * shrinkage)


def longest_token_bytes(tokenizer: Mapping[str, Any]) -> int:
    """Length of the longest vocabulary entry as written, added tokens included."""
    added = (token["content"] for token in tokenizer.get("added_tokens") or [])
    return max((len(piece.encode()) for piece in (*_vocabulary(tokenizer["model"]), *added)), default=1)


def _steps(component: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """The component itself, or the parts of a sequence."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for step in component[key]:
            yield from _steps(step, key)
    else:
        yield component


def _shrinkage(normalizer: Mapping[str, Any]) -> float | None:
    kind = normalizer["type"]
    if kind in _GROWING_NORMALIZERS:
        return 1.0
    if kind in _UNICODE_NORMALIZERS:
        return _MAX_UNICODE_SHRINKAGE
    if kind == "Replace" and "String" in normalizer["pattern"] and normalizer["content"]:
        replaced, content = normalizer["pattern"]["String"], normalizer["content"]
        return max(1.0, len(replaced.encode()) / len(content.encode()))
    return None


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _longest_piece(model: Mapping[str, Any], *, is_byte_level: bool) -> int | None:
    """Bytes of normalized text; None where a run of unknown characters becomes one token, or none."""
    vocabulary = set(_vocabulary(model))
    kind = model.get("type")
    if kind == "BPE" and is_byte_level and vocabulary.issuperset(byte_alphabet()):
        return max(map(len, vocabulary))  # a character of a piece is a byte
    has_bytes = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    has_unknown = kind == "BPE" and model.get("unk_token") in vocabulary and not model.get("fuse_unk")
    if kind not in ("BPE", "Unigram") or not (has_bytes or has_unknown):
        return None
    return max(_MAX_CHARACTER_BYTES, *(len(piece.encode()) for piece in vocabulary))


def _vocabulary(model: Mapping[str, Any]) -> Iterator[str]:
    vocabulary = model.get("vocab") or {}
    return iter(vocabulary) if isinstance(vocabulary, Mapping) else (piece for piece, _ in vocabulary)
