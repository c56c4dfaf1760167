"""`run` on a terminal, a real one: a process behind a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.factories import edit_json, make_target, make_zlab_drafter
from tests.serving.tokenizers import CHAT_TEMPLATE

# The terminal becomes the one that controls the process, which turns Ctrl-C into a signal.
DFLASH_TRT = [
    sys.executable,
    "-c",
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from dflash_trt.cli.main import main; main()",
]
WAIT_S = 120.0
SHORT = ["--max-new-tokens", "12", "--ignore-eos"]
LONG = ["--max-new-tokens", "500", "--ignore-eos", "--no-drafter"]


class Terminal:
    """A command whose stdin, stdout and stderr are a terminal."""

    def __init__(self, *words: str | Path, **environment: str) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "100"} | environment
        self._process = subprocess.Popen(
            [*DFLASH_TRT, *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""
        self._start = 0  # of what `until` has not returned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def until(self, text: str) -> str:
        """Read up to `text`; what came since the last call."""
        deadline = time.monotonic() + WAIT_S
        while (end := self.seen.find(text, self._start)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if not self._read():
                raise AssertionError(f"ended without {text!r}: {self.seen!r}")
        part = self.seen[self._start : end + len(text)]
        self._start = end + len(text)
        return part

    def read_more(self, num_characters: int) -> None:
        """Read until so many have come since the last call of `until`."""
        deadline = time.monotonic() + WAIT_S
        while len(self.seen) < self._start + num_characters:
            assert time.monotonic() < deadline and self._read(), self.seen

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """The exit code; `seen` is complete then."""
        deadline = time.monotonic() + WAIT_S
        while self._read():
            assert time.monotonic() < deadline, self.seen
        return self._process.wait(WAIT_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 1.0)
        if not ready:
            return self._process.poll() is None
        try:
            content = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.seen += content.decode(errors="replace").replace("\r\n", "\n")
        return bool(content)


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from click.testing import CliRunner

    from dflash_trt.cli.main import cli

    path = tmp_path_factory.mktemp("chat")
    target = make_target(path / "target", max_position_embeddings=4096)
    make_zlab_drafter(path / "drafter", target_dir=target)
    edit_json(target / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    words = ["build", "--target", target, "--drafter", path / "drafter", "-o", path / "engine", "--dtype", "float32"]
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return path / "engine"


@pytest.fixture
def converse(chat_engine: Path) -> Iterator[Callable[..., Terminal]]:
    """Start a conversation, and wait until the user may type."""
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        terminal = Terminal("run", chat_engine, "--chat", "--num-threads", "1", *words)
        opened.append(terminal)
        terminal.until("\n> ")
        return terminal

    yield start
    for terminal in opened:
        terminal.__exit__()


def num_prompt_tokens(seen: str) -> int:
    (found,) = re.findall(r"(\d+) prompt and \d+ output tokens", seen)
    return int(found)


def test_a_conversation_goes_on_until_the_end_of_the_input(converse: Callable[..., Terminal]) -> None:
    terminal = converse(*SHORT)
    assert re.search(r"reading weights: 0\.0 of \d\.\d MB", terminal.seen)
    assert re.search(r"reading weights: 0\.[1-9] of", terminal.seen)
    assert re.search(r"^ready in \d+\.\d s$", terminal.seen, re.MULTILINE)
    assert "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer" in terminal.seen
    for text in ("hello there, " * 6, "and again"):
        terminal.type(f"{text}\n")
        terminal.until("\n")
        assert len(terminal.until("\n> ")) > len("\n> "), "an answer"
    terminal.type("\x04")
    assert terminal.ended() == 0
    assert "2 requests: " in terminal.seen
    assert "acceptance length: " in terminal.seen
    cached, total = map(int, re.findall(r"from the prefix cache: (\d+) of (\d+)", terminal.seen)[0])
    assert 0 < cached < total == num_prompt_tokens(terminal.seen), "the second turn found the first"


def test_reset_forgets_and_exit_ends(converse: Callable[..., Terminal]) -> None:
    """The same message twice: as many prompt tokens for each, if the first is forgotten."""
    counts = []
    for between in ("/reset\n", ""):
        terminal = converse(*SHORT)
        for text in ("hello\n", between, "hello\n", "/exit\n"):
            if text:
                terminal.type(text)
                terminal.until(text)
                if text != "/exit\n":
                    terminal.until("> ")
        assert terminal.ended() == 0
        counts.append(num_prompt_tokens(terminal.seen))
    with_reset, without = counts
    assert with_reset % 2 == 0 and without > with_reset


def test_a_misspelt_command_is_not_sent_to_the_model(converse: Callable[..., Terminal]) -> None:
    terminal = converse(*SHORT)
    for text in ("/help\n", "/rset\n"):
        terminal.type(text)
        terminal.until("Ctrl-C stops an answer")
        terminal.until("> ")
    terminal.type("/exit\n")
    assert terminal.ended() == 0
    assert "output tokens" not in terminal.seen, "no answer"


def test_ctrl_c_stops_the_answer_and_not_the_program(converse: Callable[..., Terminal]) -> None:
    terminal = converse(*LONG)
    terminal.type("hello\n")
    terminal.until("hello\n")
    time.sleep(0.2)  # tokens come
    terminal.type("\x03")
    terminal.until("\n> ")
    time.sleep(0.5)  # readline misses a signal between its prompt and its wait
    terminal.type("\x03")  # there is no answer to stop now
    terminal.until("Ctrl-C stops an answer\n")
    terminal.type("/exit\n")
    assert terminal.ended() == 0
    (num_output,) = re.findall(r"prompt and (\d+) output tokens", terminal.seen)
    assert 0 < int(num_output) < 400
    assert "Traceback" not in terminal.seen


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(converse: Callable[..., Terminal]) -> None:
    terminal = converse("--max-new-tokens", "2")
    terminal.type("/reset\n")
    terminal.until("> ")
    for _ in range(2):  # a line of a terminal has at most 4095 bytes
        terminal.type("a" * 3000 + "\n")
        terminal.until("\n> ")
    assert "error: " in terminal.seen and "Or type /reset." in terminal.seen
    terminal.type("/exit\n")
    assert terminal.ended() == 0


def test_a_conversation_without_a_chat_template_is_refused_before_the_load(engine_dir: Path) -> None:
    with Terminal("run", engine_dir, "--chat") as terminal:
        assert terminal.ended() == 3
    assert "chat prompt: expected a tokenizer with a chat template, found none" in terminal.seen
    assert "build the engine from a checkpoint with a chat template" in terminal.seen
    assert "reading weights" not in terminal.seen


@pytest.mark.parametrize("option", ["--json", "--output-file=x", "--trace-file=x", "--no-stream"])
def test_a_conversation_has_no_files_of_results(engine_dir: Path, tmp_path: Path, option: str) -> None:
    with Terminal("run", engine_dir, "--chat", option) as terminal:
        assert terminal.ended() == 2
    assert f"{option.partition('=')[0]} needs --prompt, --input-file or piped text." in terminal.seen


@pytest.mark.parametrize(("words", "streams"), [([], True), (["--no-stream"], False), (["--stream"], True)])
def test_the_text_of_one_prompt_comes_as_it_is_made(chat_engine: Path, words: list[str], streams: bool) -> None:
    """Ctrl-C ends the run in the middle of it."""
    with Terminal("run", chat_engine, "--prompt", "hello", "--num-threads", "1", *LONG, *words) as terminal:
        terminal.until("ready in ")
        terminal.until("\n")
        if streams:
            terminal.read_more(20)
        else:
            time.sleep(0.3)
        terminal.type("\x03")
        printed = terminal.until("error: interrupted")
        assert terminal.ended() == 128 + signal.SIGINT
    assert (len(printed) > len("^C\nerror: interrupted\n") + 10) == streams, printed


@pytest.mark.parametrize(
    ("environment", "has_colors"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=str,
)
def test_drafts_are_colored_on_a_terminal_that_has_colors(
    chat_engine: Path, environment: dict[str, str], has_colors: bool
) -> None:
    words = ["--prompt", "hello", "--show-drafts", "--num-threads", "1", "--draft-length", "3", *SHORT]
    with Terminal("run", chat_engine, *words, **environment) as terminal:
        assert terminal.ended() == 0
    struck_through, bold = "\x1b[31m\x1b[9m", "\x1b[1m"
    assert [struck_through in terminal.seen, bold in terminal.seen] == [has_colors] * 2
    assert ("[-" in terminal.seen) != has_colors


def test_a_conversation_shows_drafts(converse: Callable[..., Terminal]) -> None:
    terminal = converse("--show-drafts", "--draft-length", "3", *SHORT)
    terminal.type("hello\n")
    terminal.until("hello\n")
    assert "[-" in terminal.until("\n> ")
    terminal.type("/exit\n")
    assert terminal.ended() == 0
