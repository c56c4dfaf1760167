"""Options of `dflash-trt run`, checked before anything heavy is loaded, and its rows."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from dflash_trt.cli import prompt_source
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.cli.prompts import Defaults, InputRow, rows_of_texts
from dflash_trt.core.chat_template_options import options_from_words
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import KV_BUDGET, NODES, PREFIX_TIERS, RuntimeConfig

_NOT_OF_TEXTS = (
    "engine_dir",
    "prompts",
    *prompt_source.NAMES,
    "output_file",
    "resume",
    "trace_file",
    "overwrite",
    "stream",
    "show_drafts",
    "as_json",
)
_PROMPTS = "--prompt, --input-file or piped text"
_TEXTS = "texts on stdout: no --json, no --output-file and no --input-file"
_ROWS = "--json, --output-file or --input-file"
_CONVERSATIONS = "--chat, or an --input-file with messages"
_RUNTIME_NOT_OF_TEXTS = {*KV_BUDGET, *PREFIX_TIERS, *NODES, "max_queue_len", "seed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The command line of `run`; `sampling` has its sampling options, `runtime` its engine options."""

    engine_dir: Path
    prompts: tuple[str, ...]
    input_file: Path | None
    columns: tuple[str, ...]
    split: str | None
    categories: tuple[str, ...]
    num_prompts: int | None
    output_file: Path | None
    resume: bool
    trace_file: Path | None
    overwrite: bool
    chat: bool
    system: str | None
    chat_template_options: tuple[str, ...]
    stream: bool | None
    show_drafts: bool
    as_json: bool
    sampling: SamplingParams
    runtime: RuntimeConfig

    @property
    def prints_text(self) -> bool:
        """True if stdout gets text; otherwise it gets JSON, or nothing."""
        return not self.as_json and self.output_file is None and self.input_file is None

    @property
    def is_conversation(self) -> bool:
        """True if the user types the prompts at a terminal, one after the other."""
        has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        return self.chat and not self.prompts and self.input_file is None and has_terminal

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template; raises RequestError."""
        return options_from_words(self.chat_template_options, flag="--chat-template-option")

    def streams(self, num_rows: int) -> bool:
        """True if text is printed as it comes; by default if there is one prompt and a terminal."""
        if self.stream is not None:
            return self.stream
        return num_rows == 1 and self.sampling.n == 1 and self.prints_text and sys.stdout.isatty()

    @property
    def keeps_rows(self) -> bool:
        """True if rows are kept next to the output file as they finish: it is a regular file, or will be one."""
        return self.output_file is not None and _is_regular(self.output_file)

    def text_settings(self) -> dict[str, Any]:
        """Settings that texts depend on, which `--resume` compares; without rows and the engine's contents."""
        settings = asdict(self)
        settings |= settings.pop("sampling") | self.runtime.model_dump(exclude=_RUNTIME_NOT_OF_TEXTS)
        for name in (*_NOT_OF_TEXTS, "runtime"):
            del settings[name]
        # As JSON has it, so that it equals what is read again.
        fields: dict[str, Any] = json.loads(json.dumps(settings | {"trace": self.trace_file is not None}))
        return fields

    def check(self) -> None:
        """Raises ConfigError: options that exclude or need each other, all of them in one error."""
        is_of_texts = self.input_file is None and not self.chat
        exclusive = (
            ("--prompt", bool(self.prompts), "--input-file", self.input_file is not None),
            ("--stream", self.stream is True, "--json", self.as_json),
            ("--show-drafts", self.show_drafts, "--no-drafter", not self.runtime.use_drafter),
            ("--stream", self.stream is True, "--input-file", self.input_file is not None),
            ("--stream", self.stream is True, "--output-file", self.output_file is not None),
        )
        needs = (
            ("--stream", self.stream is True and self.sampling.n > 1, f"one sample (got --n {self.sampling.n})"),
            ("--stream", self.stream is True and len(self.prompts) > 1, f"one --prompt (got {len(self.prompts)})"),
            ("--show-drafts", self.show_drafts and not self.prints_text, _TEXTS),
            ("--resume", self.resume and not self.keeps_rows, "--output-file with a regular file"),
            *((option, self.input_file is None and has_it, "--input-file") for option, has_it in _of_rows(self)),
            ("--system", is_of_texts and self.system is not None, _CONVERSATIONS),
            ("--chat-template-option", is_of_texts and bool(self.chat_template_options), _CONVERSATIONS),
            ("--logprobs", self.sampling.logprobs and self.prints_text, _ROWS),
            ("--prompt-logprobs", self.sampling.prompt_logprobs is not None and self.prints_text, _ROWS),
            *((option, self.is_conversation and has_it, _PROMPTS) for option, has_it in _of_prompts(self)),
        )
        problems = [f"{a} and {b} are mutually exclusive." for a, has_a, b, has_b in exclusive if has_a and has_b]
        problems += [f"{option} needs {needed}." for option, is_wrong, needed in needs if is_wrong]
        problems += self._file_problems()
        try:
            _ = self.template_kwargs
        except ConfigError as error:
            problems.append(str(error))
        raise_all(ConfigError, "options", problems)

    def _file_problems(self) -> Iterator[str]:
        """A run may replace no file that it was not told to, and never one that it reads or writes itself."""
        results = {"--output-file": self.output_file, "--trace-file": self.trace_file}
        files = {name: path for name, path in results.items() if path is not None and _is_regular(path)}
        for name, path in files.items():
            if path.exists() and not (self.overwrite or self.resume):
                yield problem(name, expected="a new file", found=str(path), hint="Pass --overwrite to replace it.")
        if self.input_file is not None:
            files = {"--input-file": self.input_file} | files
        for (name, path), (other, other_path) in combinations(files.items(), 2):
            if os.path.realpath(path) == os.path.realpath(other_path):
                yield f"{name} and {other} name the same file."

    def read_rows(self) -> list[InputRow]:
        """All rows of the run.

        Raises:
            ConfigError: there is nothing to read, or it cannot be read.
        """
        defaults = Defaults(
            sampling=self.sampling,
            wraps_in_chat=self.chat,
            system=self.system,
            chat_template_kwargs=self.template_kwargs,
        )
        if self.input_file is not None:
            return PromptSource.of_options({name: getattr(self, name) for name in prompt_source.NAMES}).rows(defaults)
        if self.prompts:
            return rows_of_texts(self.prompts, defaults)
        if sys.stdin.isatty():
            hint = (
                "Pass --prompt TEXT or --input-file FILE.jsonl, pipe the prompt in, or have a conversation with --chat."
            )
            raise ConfigError.about("prompts", expected="at least one", found="none", hint=hint)
        # Undecodable bytes become lone surrogates, which are refused as in any other prompt.
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
        return rows_of_texts([text.removesuffix("\n")], defaults)


def _of_prompts(options: RunOptions) -> Iterator[tuple[str, bool]]:
    """Options that need a run with known prompts, and whether each is given."""
    yield "--json", options.as_json
    yield "--output-file", options.output_file is not None
    yield "--trace-file", options.trace_file is not None
    yield "--no-stream", options.stream is False
    yield "--n", options.sampling.n > 1


def _of_rows(options: RunOptions) -> Iterator[tuple[str, bool]]:
    """Options that choose rows of a file, and whether each is given."""
    yield "--column", bool(options.columns)
    yield "--split", options.split is not None
    yield "--category", bool(options.categories)
    yield "--num-prompts", options.num_prompts is not None


def _is_regular(path: Path) -> bool:
    """True for a file, and for what will be one."""
    resolved = Path(os.path.realpath(path))
    return resolved.is_file() or not resolved.exists()
