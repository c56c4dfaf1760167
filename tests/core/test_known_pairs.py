from pathlib import PurePath

import pytest

from dflash_trt.core.known_pairs import (
    known_pairs,
    listed_pairs,
    pair_of_drafter,
    pair_of_drafter_directory,
    pairs_of_target,
)


def test_the_table_names_every_drafter_once_and_its_source() -> None:
    pairs = known_pairs()
    assert len({pair.drafter.lower() for pair in pairs}) == len(pairs) >= 25
    for pair in pairs:
        assert all(name.count("/") == 1 for name in (*pair.targets, pair.drafter))
        assert pair.source
        assert bool(pair.reason) == bool(pair.chat_template_options)


def test_the_pairs_that_can_be_built_come_first() -> None:
    needs = [pair.needs for pair in known_pairs()]
    assert needs[:42] == [None] * 42
    assert None not in needs[42:]
    assert "Qwen/Qwen3-8B with z-lab/Qwen3-8B-DFlash-b16" in listed_pairs()
    assert "RedHatAI/Qwen3-8B" not in listed_pairs(), "only defaults are listed"


def test_names_are_found_whatever_their_case() -> None:
    pair, other, *more = pairs_of_target("qwen/qwen3-8B-fp8")
    assert pair == pair_of_drafter("z-lab/qwen3-8b-DFLASH-b16")
    assert pair.chat_template_options == {"enable_thinking": False}
    assert pair.is_default and not any(found.is_default for found in (other, *more))
    assert [found.drafter for found in more] == [
        f"RedHatAI/Qwen3-8B-speculator.{kind}" for kind in ("dflash", "eagle3")
    ]
    assert other == pair_of_drafter("deepseek-ai/DSPARK_qwen3_8b_block7")
    assert pairs_of_target("Qwen/Qwen3") == ()


def test_a_target_has_one_default_drafter_among_those_that_this_version_reads() -> None:
    for target in {pair.target for pair in known_pairs()}:
        assert sum(pair.is_default for pair in pairs_of_target(target)) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/models/Qwen3-8B-DFlash-b16",
        "/models/z-lab/Qwen3-8B-DFlash-b16",
        "/models--other--x/hub/models--z-lab--Qwen3-8B-DFlash-b16/snapshots/0",
        "/cache/hub/models--z-lab--Qwen3-8B-DFlash-b16/snapshots/0a2da2366b9bf74a014fc9b648dfc2615dacbfb7",
    ],
)
def test_a_local_copy_is_known_by_a_name_on_its_path(path: str) -> None:
    pair = pair_of_drafter_directory(PurePath(path))
    assert pair is not None
    assert pair.drafter == "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize(
    "path", ["/models/drafter", "/Qwen3-8B-DFlash-b16/other", "", "/cache/models--z-lab--x/snapshots/a"]
)
def test_other_directories_are_not_known(path: str) -> None:
    assert pair_of_drafter_directory(PurePath(path)) is None
