"""The recipes of a mixer and of a drafting algorithm, done in copies of the tree: their own tests run steps there."""

from pathlib import Path

from tests.contributing.copies import applied, run_tests
from tests.contributing.page import recipe

MIXER, DRAFTER = recipe("A mixer kind"), recipe("A drafting algorithm")


def test_a_mixer_is_two_files_a_line_of_the_list_and_a_test() -> None:
    assert MIXER.changed_files == ["dflash_trt/core/model/decoder.py"]
    assert list(MIXER.files) == [
        "dflash_trt/core/model/mfa.py",
        "dflash_trt/network/mixers/mfa.py",
        "tests/network/test_mfa.py",
    ]


def test_a_target_of_the_new_mixer_computes_its_definition(tmp_path: Path) -> None:
    assert "3 passed" in run_tests(applied(MIXER, tmp_path), MIXER)


def test_a_drafting_algorithm_is_two_files_its_name_and_a_test() -> None:
    assert DRAFTER.changed_files == ["dflash_trt/core/model/draft.py"]
    assert list(DRAFTER.files) == [
        "dflash_trt/network/drafters/looped_dflash.py",
        "dflash_trt/checkpoint/drafters/looped_dflash.py",
        "tests/parity/test_looped_dflash.py",
    ]


def test_the_new_algorithm_drafts_what_its_definition_does(tmp_path: Path) -> None:
    assert "1 passed" in run_tests(applied(DRAFTER, tmp_path), DRAFTER)
