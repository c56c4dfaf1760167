"""The programs of examples/ run, in processes of their own; that of Triton in tests/triton_server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.engine_dir.building import build
from tests.factories import edit_json, make_target, make_zlab_drafter
from tests.serving.tokenizers import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair with a chat template."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target")
    edit_json(target / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    make_zlab_drafter(root / "drafter", target_dir=target)
    return build(root, root / "engine", drafter="drafter", page_size=4).path


def printed(name: str, *words: str | Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_offline_example_prints_a_text_for_each_prompt(engine: Path) -> None:
    text = printed("offline.py", engine)
    assert text.count(" tokens per step, ") == 3
    assert [text.index(prompt) for prompt in ("import os\n", "def main():\n", "class Node:\n")] == sorted(
        text.index(prompt) for prompt in ("import os\n", "def main():\n", "class Node:\n")
    )


def test_the_asyncio_example_leaves_one_stream_and_reads_the_others(engine: Path) -> None:
    texts = printed("async_streams.py", engine).removesuffix("\n").split("\n---\n")
    assert [text.partition("\n")[0] for text in texts] == ["import sys", "def main():", "class Node:"]
    assert len(texts[0]) > 2 * len("import sys\n")


def test_the_second_turn_of_the_conversation_finds_the_first(engine: Path) -> None:
    last = printed("chat.py", engine).splitlines()[-1]
    assert int(last.split()[0]) > 0 and last.endswith("of the second turn were there already")


def test_every_example_is_run() -> None:
    places = (Path(__file__).parent.glob("test_*.py"), [ROOT / "tests" / "triton_server" / "test_examples.py"])
    tests = "".join(path.read_text() for paths in places for path in paths)
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.name not in tests] == []
