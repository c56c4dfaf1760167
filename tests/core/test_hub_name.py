"""Names on the hub and paths are told apart, and a command is made of either."""

from pathlib import Path

import pytest

from dflash_trt.core.known_pairs import HubName, build_command


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("z-lab/a.b_c-1@refs/pr/1", "z-lab/a.b_c-1", "refs/pr/1"),
        ("a/b@v1.0", "a/b", "v1.0"),
    ],
)
def test_a_name_has_an_owner_a_repository_and_perhaps_a_revision(
    text: str, repository: str, revision: str | None
) -> None:
    found = HubName.parse(text)
    assert found == HubName(repository=repository, revision=revision) and str(found) == text


@pytest.mark.parametrize(
    "text", ["", "target", "./a/b", "/a/b", "a/b/c", "a/b@", "-a/b", "a/b.", "a/ b", "ä/b", "a/b@é"]
)
def test_other_texts_are_paths(text: str) -> None:
    assert HubName.parse(text) is None


def test_a_command_names_its_output_after_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert build_command("Qwen/Qwen3-8B@v1") == "dflash-trt build --target Qwen/Qwen3-8B@v1 -o qwen3-8b"
    assert build_command("my models/Big") == "dflash-trt build --target 'my models/Big' -o big-engine"
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    assert build_command("Qwen/Qwen3-8B") == "dflash-trt build --target Qwen/Qwen3-8B -o qwen3-8b-engine"
