"""One tiny pair and one tiny engine for all CLI tests, and the CLI itself, run in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from tests.factories import make_target, make_zlab_drafter


@dataclass(frozen=True)
class CliResult:
    exit_code: int
    stdout: str
    stderr: str


Invoke = Callable[..., CliResult]


@pytest.fixture
def invoke() -> Invoke:
    """Run `dflash-trt` with these words; anything but a clean exit is an error of the test."""

    def run(*words: str | Path, stdin: str | bytes | None = None) -> CliResult:
        result = CliRunner().invoke(cli, [str(word) for word in words], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return CliResult(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("checkpoints") / "target")


@pytest.fixture(scope="session")
def drafter(target: Path) -> Path:
    return make_zlab_drafter(target.with_name("drafter"), target_dir=target)


@pytest.fixture(scope="session")
def engine_dir(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, max_seq_len 96, K = 3."""
    output = tmp_path_factory.mktemp("engines") / "engine"
    words = ["build", "--target", target, "--drafter", drafter, "-o", output, "--dtype", "float32"]
    result = CliRunner().invoke(cli, [*map(str, words), "--max-seq-len", "96"])
    assert result.exit_code == 0, result.output
    return output
