"""The load test itself, for twenty seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.servers.dynamo.serving import free_ports


@pytest.mark.slow
def test_under_load_and_a_kill_texts_stay_equal_and_nothing_is_held(demo: Path) -> None:
    words = ["--clients", "48", "--seconds", "20", "--prompts", "24", "--max-tokens", "32", "--kill"]
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.load_openai", str(demo), *words, "--port", str(free_ports(3))],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "all texts equal, nothing held" in ran.stdout
    assert "kill -9" in ran.stdout
