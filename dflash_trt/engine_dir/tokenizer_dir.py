"""The tokenizer of an engine at build: transformers' result for a checkpoint, stored for `tokenizers`.

Classes of transformers change tokenizer.json (special tokens of tokenizer_config.json, regular expressions, BOS and
EOS). The stored file has it all, and is proven to give the same token ids. Imports transformers when called.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dflash_trt.core.errors import problem
from dflash_trt.core.json_object import read_json_object
from dflash_trt.engine_dir.stored_tokenizer import (
    CONFIG_NAME,
    SPECIAL_TOKENS_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    StoredTokenizer,
)
from dflash_trt.engine_dir.template_renderer import TemplateError, TemplateRenderer

T = TypeVar("T")

_TEXT = "Hello"
# Texts of which the stored tokenizer must make the same tokens: white space, numbers, scripts, bytes, special tokens.
_PROBES = (_TEXT, "  two  spaces\t\r\nand 12345 it's", "naïve Übermut — 你好 🙂\0")
_CONVERSATIONS = (
    [{"role": "user", "content": _TEXT}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _TEXT}],
)
_MAX_STAGE_S = 60.0  # the largest vocabularies load in a few seconds


class _TokenizerError(Exception):
    """A problem of a file: (expected, found)."""


def load_tokenizer(directory: Path) -> Any:
    """Load the fast tokenizer of a directory; nothing is downloaded, and no code of its files runs.

    Raises:
        Exception: whatever transformers and its parsers raise.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (directory / TOKENIZER_NAME).is_file():
        raise FileNotFoundError(f"no {TOKENIZER_NAME} in {directory}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError):  # no tokenizer class is named: the file alone says how to tokenize
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    if not tokenizer.is_fast:
        raise TypeError(f"{type(tokenizer).__name__} is not a fast tokenizer")
    return tokenizer


def resolve_tokenizer(files: Sequence[Path], *, vocab_size: int, problems: list[str]) -> dict[str, bytes]:
    """Contents of an engine's tokenizer directory by file name; empty without `files`, or with a problem.

    A text is encoded and decoded, and the chat template, if there is one, renders a message: `problems` are those that
    would keep an engine from serving text.
    """
    if not files:
        return {}
    hint = "Download the tokenizer again, or remove its files to build an engine of token ids."
    found = [
        problem(path.name, expected=expected, found=str(error), hint=hint)
        for path in files
        for expected, error in _unreadable(path)
    ]
    if not found:
        with TemporaryDirectory(prefix="dflash-trt-tokenizer-") as name:
            source, stored = Path(name) / "source", Path(name) / "stored"
            source.mkdir()
            for path in files:  # only these files: a config.json next to them would choose another class
                (source / path.name).symlink_to(path.resolve())
            failures = _prove(source, stored, vocab_size)
            if not failures:
                return {path.name: path.read_bytes() for path in sorted(stored.iterdir())}
        found = [problem(file, expected=expected, found=text, hint=hint) for file, expected, text in failures]
    problems += found
    return {}


def _unreadable(path: Path) -> Iterator[tuple[str, Exception]]:
    """(expected, error) of a file that is no JSON object or no text."""
    try:
        if path.suffix == ".json":
            read_json_object(path)
        elif path.suffix == ".jinja":
            path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        yield ("a JSON object" if path.suffix == ".json" else "UTF-8 text"), error


def _prove(source: Path, stored: Path, vocab_size: int) -> list[tuple[str, str, str]]:
    """Run the stages, which write `stored`; return the first failure as (file, expected, found)."""
    blamed, expected = TOKENIZER_NAME, "a fast tokenizer that transformers can load"
    try:
        if (source / TOKENIZER_NAME).is_file():
            _bounded(lambda: _load_alone(source / TOKENIZER_NAME))
            blamed = CONFIG_NAME if (source / CONFIG_NAME).is_file() else blamed
        tokenizer = _bounded(lambda: load_tokenizer(source))
        template_name = TEMPLATE_NAME if (source / TEMPLATE_NAME).is_file() else CONFIG_NAME
        blamed, expected = TOKENIZER_NAME, "a tokenizer that the tokenizers library can store"
        _bounded(lambda: _store(tokenizer, source, stored))
        blamed, expected = template_name, "a chat template, or templates by name"
        ours = _bounded(lambda: StoredTokenizer.open(stored))
        blamed, expected = TOKENIZER_NAME, "a tokenizer that encodes and decodes a text"
        _bounded(lambda: _prove_text(ours, vocab_size))
        expected = "a tokenizer that gives the same tokens without transformers"
        _bounded(lambda: _prove_same(ours, tokenizer))
        if ours.chat_templates:
            blamed, expected = template_name, "a chat template that renders a message"
            _prove_template(ours, vocab_size)
    except _TokenizerError as error:
        return [(blamed, *error.args)]
    except BaseException as error:  # a panic of tokenizers is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        found = " ".join(f"{type(error).__name__}: {error}".split())
        return [(blamed, expected, found)]
    return []


def _load_alone(path: Path) -> None:
    """Load tokenizer.json without the other files, to know that an error is its own."""
    from transformers import PreTrainedTokenizerFast

    open_file: Any = PreTrainedTokenizerFast
    open_file(tokenizer_file=str(path))


def _store(tokenizer: Any, source: Path, stored: Path) -> None:
    """Write the files of an engine: transformers' tokenizer and special tokens, the others as they are."""
    stored.mkdir()
    for path in source.iterdir():
        (stored / path.name).write_bytes(path.read_bytes())
    tokenizer.encode("")  # sets truncation, padding and the like, as transformers does with every call
    tokenizer.backend_tokenizer.save(str(stored / TOKENIZER_NAME), pretty=False)
    special_tokens = json.dumps(tokenizer.special_tokens_map, indent=2, ensure_ascii=False)
    (stored / SPECIAL_TOKENS_NAME).write_text(special_tokens + "\n", encoding="utf-8")


def _prove_text(tokenizer: StoredTokenizer, vocab_size: int) -> None:
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=False)
    token, token_id = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if token_id >= vocab_size:
        raise _TokenizerError(f"token ids below the target's vocab_size {vocab_size}", f"{token!r} with id {token_id}")
    token_ids = _checked(tokenizer.backend.encode(_TEXT).ids, vocab_size)
    decoded = tokenizer.backend.decode(token_ids)
    if decoded.strip() != _TEXT:
        raise _TokenizerError(f"{_TEXT!r} after encoding and decoding it", f"{decoded!r:.80}")


def _prove_same(ours: StoredTokenizer, theirs: Any) -> None:
    """Compare with transformers."""
    special_tokens = " ".join(token for token in ours.special_tokens.values() if isinstance(token, str))
    for text in (*_PROBES, special_tokens):
        expected, found = theirs.encode(text), ours.backend.encode(text).ids
        if found != expected:
            raise _TokenizerError(f"the tokens of transformers for {text!r}, {expected}", str(found))
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        expected, found = theirs.decode(expected, **options), ours.backend.decode(found)
        if found != expected:
            raise _TokenizerError(f"the text of transformers for those tokens, {expected!r}", repr(found))


def _prove_template(tokenizer: StoredTokenizer, vocab_size: int) -> None:
    """Render a conversation with a system message, or one without: some templates need one."""
    renderer = TemplateRenderer()
    template = tokenizer.chat_template(has_tools=False)
    first_error: TemplateError | None = None
    for messages in _CONVERSATIONS:
        try:
            text = renderer.render(template, messages, tokenizer.special_tokens)
        except TemplateError as error:
            first_error = first_error or error
            continue
        if _TEXT not in text:
            raise _TokenizerError("a chat template that renders what a message says", f"{text!r:.80}")
        _checked(tokenizer.backend.encode(text, add_special_tokens=False).ids, vocab_size)
        return
    assert first_error is not None
    raise _TokenizerError("a chat template that renders a message", first_error.found)


def _checked(token_ids: list[int], vocab_size: int) -> list[int]:
    if not token_ids:
        raise _TokenizerError(f"tokens for {_TEXT!r}", "none")
    if max(token_ids) >= vocab_size:
        raise _TokenizerError(f"token ids below the target's vocab_size {vocab_size}", str(max(token_ids)))
    return token_ids


def _bounded(function: Callable[[], T]) -> T:
    """Call a function with a timeout, in a daemon thread."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tokenizer check").start()
    if not wait([outcome], _MAX_STAGE_S).done:
        raise TimeoutError(f"nothing within {_MAX_STAGE_S:.0f} s")
    return outcome.result()
