"""A real tritonserver with a tiny engine, and the same engine offline to compare with."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from scripts.triton_server.launcher import ServerProcess
from tests.factories import edit_json, make_target, make_zlab_drafter
from tests.serving.tokenizers import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
INSTALLATION = ROOT / ".triton_server"
ENVIRONMENT = INSTALLATION / "environment"
MAX_SEQ_LEN = 2048
_CANNOT_INSTALL = 3  # exit code of scripts/install_triton_server


@pytest.fixture(scope="session")
def installation() -> Path:
    if not (INSTALLATION / "installed").exists():
        command = [ROOT / "scripts" / "install_triton_server"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
        if ran.returncode == _CANNOT_INSTALL:
            pytest.skip(ran.stderr.strip())
        assert ran.returncode == 0, ran.stderr
    return INSTALLATION


@pytest.fixture(scope="session")
def tritonclient(installation: Path) -> Any:
    """The client's modules: grpc, grpc.aio, http. They live in the environment of the server."""
    site_packages = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    sys.path.append(str(site_packages))  # after .venv's own, whose numpy stays
    try:
        import tritonclient.grpc
        import tritonclient.grpc.aio
        import tritonclient.http
    finally:
        sys.path.remove(str(site_packages))
    return SimpleNamespace(grpc=tritonclient.grpc, aio=tritonclient.grpc.aio, http=tritonclient.http)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random pair, K = 3, with a chat template; float32, so that texts do not depend on the batch.

    The second one runs a single request at a time.
    """
    path = tmp_path_factory.mktemp("triton")
    target = make_target(path / "target", max_position_embeddings=MAX_SEQ_LEN)
    edit_json(target / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    drafter = make_zlab_drafter(path / "drafter", target_dir=target)
    edit_json(drafter / "config.json", max_position_embeddings=MAX_SEQ_LEN)
    for name, max_batch_size in (("engine", 16), ("single", 1)):
        words = ["build", "--target", target, "--drafter", drafter, "-o", path / name, "--dtype", "float32"]
        words += ["--max-seq-len", MAX_SEQ_LEN, "--max-batch-size", max_batch_size, "--page-size", 8]
        result = CliRunner().invoke(cli, list(map(str, words)))
        assert result.exit_code == 0, result.output
    return path / "engine", path / "single"


@pytest.fixture(scope="session")
def engine_dir(engines: tuple[Path, Path]) -> Path:
    return engines[0]


@pytest.fixture(scope="session")
def offline(engine_dir: Path) -> Iterator[Any]:
    """The same engine in this process."""
    from dflash_trt import LLM

    with LLM(engine_dir, num_threads=1, draft_length=3, kv_cache_bytes=1 << 27) as llm:  # tests count drafts
        yield llm


@pytest.fixture(scope="session")
def repository(engines: tuple[Path, Path], installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dflash` as deployed; `narrow` runs one request and queues one; `chat` has a batch dimension and a template."""
    path = tmp_path_factory.mktemp("repository")
    engine, single = engines
    common = ["--environment", ENVIRONMENT, "--num-threads", 1, "--kv-cache-bytes", 1 << 27, "--draft-length", 3]
    deploy(engine, path, "dflash", *common)
    deploy(single, path, "narrow", *common, "--max-queue-len", 1)
    deploy(engine, path, "chat", *common, "--chat", "--system", "Be brief.", "--batch-dimension")
    return path


def deploy(engine_dir: Path, repository: Path, name: str, *options: object) -> str:
    """What the command prints."""
    words = ["deploy", "triton", engine_dir, "-o", repository, "--model-name", name, *options]
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="session")
def server(repository: Path, installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves `dflash`; the others are loaded by the tests that need them.

    After clients that left early this Triton sometimes keeps the model and waits for its exit timeout. That is its own
    doing as long as it has not asked the model to close.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    process = ServerProcess(
        repository, installation, log, options=["--model-control-mode=explicit", "--load-model=dflash"]
    )
    with process:
        yield process
        code, said = process.stop(), log.read_text(errors="replace")
        keeps_model = "Exit timeout expired" in said and "dflash_0_0 closes" not in said
        assert code == 0 or keeps_model, said[-4000:]
    assert not process.members()
    assert not process.shared_memory()
