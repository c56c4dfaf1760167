"""The demo's EAGLE-3 head drafts for the demo target, as far as its page says."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import dflash_trt.demo
from tests.engines import decode, make_executor

PROMPTS = (
    "def merge(left, right):\n    result = []\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    'class Reader:\n    """Read rows."""\n\n    def __init__(self, path):\n',
)
NUM_NEW = 64


@pytest.mark.parametrize("k", [3, 7])
def test_the_demo_head_gives_the_target_s_text_in_fewer_steps(k: int) -> None:
    [root] = dflash_trt.demo.__path__
    tokenizer = Tokenizer.from_file(f"{root}/target/tokenizer.json")
    executor = make_executor(Path(root) / "target", Path(root) / "eagle3")
    num_emitted = num_steps = 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        plain, drafted = (decode(executor, ids, NUM_NEW, num_draft_tokens=each) for each in (0, k))
        assert drafted.tokens[:NUM_NEW] == plain.tokens[:NUM_NEW]
        num_emitted += sum(drafted.num_accepted) + len(drafted.num_accepted)
        num_steps += len(drafted.num_accepted)
    assert num_emitted / num_steps > 1.6, "acceptance length, bonus included"
