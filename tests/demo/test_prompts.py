"""The prompts that benchmarks take by default."""

import json
import sys

import pytest

from dflash_trt.demo import PROMPTS
from scripts.train_demo.prompts import held_out_prompts


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the demo pair was trained on the library of Python 3.11")
def test_they_are_of_files_that_the_demo_pair_was_not_trained_on() -> None:
    packaged = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    assert packaged == held_out_prompts(16)


def test_their_licence_is_beside_them() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in PROMPTS.with_suffix(".LICENSE").read_text()
