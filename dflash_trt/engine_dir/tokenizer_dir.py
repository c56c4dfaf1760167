"""The tokenizer of an engine: loading, and the checks before a build. Imports transformers only when called."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dflash_trt.core.errors import problem
from dflash_trt.core.json_object import read_json_object
from dflash_trt.engine_dir.template_renderer import TemplateError, TemplateRenderer

T = TypeVar("T")

TOKENIZER_NAME = "tokenizer.json"
_CONFIG_NAME = "tokenizer_config.json"
_TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json")  # else the template stands in tokenizer_config.json

_TEXT = "Hello"
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


def tokenizer_problems(files: Sequence[Path], *, vocab_size: int) -> list[str]:
    """Problems that would keep an engine with these tokenizer files from serving text.

    A text is encoded and decoded, and the chat template, if there is one, renders a message.
    """
    if not files:
        return []
    hint = "Download the tokenizer again, or remove its files to build an engine of token ids."
    problems = []
    for path in files:
        expected = "a JSON object" if path.suffix == ".json" else "UTF-8 text"
        try:
            if path.suffix == ".json":
                read_json_object(path)
            elif path.suffix == ".jinja":
                path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problems.append(problem(path.name, expected=expected, found=str(error), hint=hint))
    if problems:
        return problems
    with TemporaryDirectory(prefix="dflash-trt-tokenizer-") as name:
        for path in files:  # those files and no others: a config.json beside them would choose another class
            (Path(name) / path.name).symlink_to(path.resolve())
        return [
            problem(file, expected=expected, found=found, hint=hint)
            for file, expected, found in _prove(Path(name), vocab_size)
        ]


def _prove(directory: Path, vocab_size: int) -> list[tuple[str, str, str]]:
    """Run the stages; return the first failure as (file, expected, found)."""
    blamed, expected = TOKENIZER_NAME, "a fast tokenizer that transformers can load"
    try:
        if (directory / TOKENIZER_NAME).is_file():
            _bounded(lambda: _load_alone(directory / TOKENIZER_NAME))
            blamed = _CONFIG_NAME if (directory / _CONFIG_NAME).is_file() else blamed
        tokenizer = _bounded(lambda: load_tokenizer(directory))
        blamed, expected = TOKENIZER_NAME, "a tokenizer that encodes and decodes a text"
        _bounded(lambda: _prove_text(tokenizer, vocab_size))
        if tokenizer.chat_template:
            names = (name for name in _TEMPLATE_NAMES if (directory / name).is_file())
            blamed, expected = next(names, _CONFIG_NAME), "a chat template that renders a message"
            _prove_template(tokenizer, vocab_size)
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


def _prove_text(tokenizer: Any, vocab_size: int) -> None:
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    token, token_id = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if token_id >= vocab_size:
        raise _TokenizerError(f"token ids below the target's vocab_size {vocab_size}", f"{token!r} with id {token_id}")
    token_ids = _checked(tokenizer.encode(_TEXT), vocab_size)
    decoded = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if decoded.strip() != _TEXT:
        raise _TokenizerError(f"{_TEXT!r} after encoding and decoding it", f"{decoded!r:.80}")


def _prove_template(tokenizer: Any, vocab_size: int) -> None:
    """Render a conversation with a system message, or one without: some templates need one."""
    renderer = TemplateRenderer()
    first_error: TemplateError | None = None
    for messages in _CONVERSATIONS:
        try:
            text = renderer.render(tokenizer.get_chat_template(), messages, tokenizer.special_tokens_map)
        except TemplateError as error:
            first_error = first_error or error
            continue
        if _TEXT not in text:
            raise _TokenizerError("a chat template that renders what a message says", f"{text!r:.80}")
        _checked(tokenizer.encode(text, add_special_tokens=False), vocab_size)
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
