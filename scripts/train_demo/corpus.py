"""The demo corpus: Python's own standard library source, as tokens.

Knows which files are read, which are held out, and how the tokenizer is trained. It refuses to know about models.
"""

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK, IM_START, IM_END)

_MAX_FILE_BYTES = 200_000  # larger files are generated tables
_TABLES = ("encodings", "pydoc_data", "site-packages", "lib2to3", "__pycache__")
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Source files split by a hash of their path, so that the split does not move when files come or go."""

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]


def standard_library() -> Corpus:
    """The running interpreter's `Lib/`, its tests included, generated tables left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if _is_prose(path, root)]
    held_out = tuple(path for path in files if _is_held_out(path.relative_to(root)))
    return Corpus(train=tuple(path for path in files if path not in set(held_out)), held_out=held_out)


def train_tokenizer(files: tuple[Path, ...], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_source(path) for path in files), trainer)
    return tokenizer


def token_rows(
    tokenizer: Tokenizer, files: tuple[Path, ...], *, seq_len: int, seed: int
) -> NDArray[np.int64]:  # [num_rows, seq_len]
    """All files in a random order, joined by end-of-text and cut into rows; rows in a random order too."""
    order = random.Random(seed)
    shuffled = list(files)
    order.shuffle(shuffled)
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([read_source(path) for path in shuffled]):
        stream.extend(encoding.ids)
        stream.append(end)
    num_rows = len(stream) // seq_len
    rows = np.array(stream[: num_rows * seq_len], dtype=np.int64).reshape(num_rows, seq_len)
    return rows[np.random.default_rng(seed).permutation(num_rows)]


def read_source(path: Path) -> str:
    """The text of a source file; a few test files are deliberately not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace")


def _is_prose(path: Path, root: Path) -> bool:
    relative = path.relative_to(root)
    return not any(part in _TABLES for part in relative.parts) and 0 < path.stat().st_size <= _MAX_FILE_BYTES


def _is_held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return digest[0] % _HELD_OUT_ONE_IN == 0
