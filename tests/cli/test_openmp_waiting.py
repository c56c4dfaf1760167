"""OpenMP's threads sleep between two regions, however the engine was opened, unless the user has chosen otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.core.process import let_threads_sleep

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
OPENING = """
import os, sys, threading
if "torch first" in sys.argv:
    import torch
from dflash_trt.serving.local_engine import checked_config, open_local_engine
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
engine = EngineDir.open(sys.argv[1])
open_local_engine(engine, checked_config(engine, RuntimeConfig(num_threads=int(sys.argv[2])))).close()
print(os.environ.get("OMP_WAIT_POLICY"), "dflash-idle-team" in {thread.name for thread in threading.enumerate()})
"""


def opened(engine: Path, num_threads: int, *words: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-c", OPENING, str(engine), str(num_threads), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=clean | environment)
    return ran.stdout.strip()


def test_threads_sleep_where_pytorch_is_not_yet_imported(engine_dir: Path) -> None:
    assert opened(engine_dir, 2) == "PASSIVE False"


def test_an_idle_team_shortens_the_waits_where_pytorch_is_imported_already(engine_dir: Path) -> None:
    assert opened(engine_dir, 2, "torch first") == "None True"


def test_one_thread_waits_for_nobody(engine_dir: Path) -> None:
    assert opened(engine_dir, 1, "torch first") == "None False"


@pytest.mark.parametrize("words", [(), ("torch first",)])
def test_what_the_user_chose_stays(engine_dir: Path, words: tuple[str, ...]) -> None:
    assert opened(engine_dir, 2, *words, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE False"


@pytest.mark.parametrize("name", SETTINGS)
def test_any_setting_of_an_openmp_runtime_is_a_choice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    for other in SETTINGS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    let_threads_sleep()
    assert dict(os.environ) == before
