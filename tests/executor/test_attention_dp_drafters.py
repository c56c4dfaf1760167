"""Ranks with requests of their own whose drafters make one draft a pass, or have experts."""

from pathlib import Path
from typing import Any

import pytest

from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.executor.test_attention_dp import assert_two_ranks_draft_as_one
from tests.factories import make_target
from tests.mtp_files import make_mtp_target


@pytest.mark.parametrize("make_drafter", [save_eagle3_head, save_dspark_drafter])
def test_every_request_has_the_drafts_of_one_rank(tmp_path: Path, make_drafter: Any) -> None:
    target = make_target(tmp_path / "target", family="qwen3_moe")
    make_drafter(tmp_path / "drafter", target_dir=target)
    assert_two_ranks_draft_as_one(tmp_path)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe_text"])
def test_so_it_has_of_a_head_with_experts(tmp_path: Path, family: Any) -> None:
    make_mtp_target(tmp_path / "target", family=family)
    assert_two_ranks_draft_as_one(tmp_path, drafter="mtp", max_draft_len=3)
