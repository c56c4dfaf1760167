"""The list of files that a decode step runs through, made in a process of its own, which is traced."""

import re
import subprocess
import sys
from pathlib import Path

from scripts.code_size import ROOT
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter


def test_the_files_of_a_step_have_its_network_and_its_scheduler_but_not_what_opened_the_engine(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    build(tmp_path, tmp_path / "engine", target=str(target), drafter=str(drafter), max_seq_len=96)
    words = [sys.executable, "-m", "scripts.step_files", str(tmp_path / "engine")]
    ran = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    *lines, last = ran.stdout.splitlines()
    found = {line.split()[-1] for line in lines}
    assert {"network/step.py", "network/drafters/dflash.py", "scheduler/planner.py", "serving/stream.py"} <= found
    assert not {"serving/opening.py", "executor/opening.py", "network/drafters/eagle3.py"} & found
    assert re.fullmatch(rf"{len(lines)} files of \d+ lines, \d+ functions", last)
