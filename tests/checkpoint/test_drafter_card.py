"""What a model card says in Python is taken; prose, other languages and contradictions are not."""

from pathlib import Path

import pytest

from dflash_trt.checkpoint.drafter_card import card_options

RENDERED = "ids = tokenizer.apply_chat_template(messages, return_tensors='pt', add_generation_prompt=True{})"
REQUESTED = 'client.create(model="m", extra_body={{"chat_template_kwargs": {{{}}}}})'


def card(tmp_path: Path, *blocks: str, language: str = "python") -> dict[str, object]:
    text = "# A drafter\n\nPass `enable_thinking=False`.\n\n"
    text += "".join(f"```{language}\n{block}\n```\n\n" for block in blocks)
    (tmp_path / "README.md").write_text(text)
    return card_options(tmp_path)


def test_options_are_those_of_the_examples(tmp_path: Path) -> None:
    assert card(tmp_path, RENDERED.format(", enable_thinking=False, tools=TOOLS")) == {"enable_thinking": False}
    assert card(tmp_path, REQUESTED.format('"enable_thinking": False, "effort": "low"')) == {
        "enable_thinking": False,
        "effort": "low",
    }


@pytest.mark.parametrize(
    "blocks",
    [
        (),
        (RENDERED.format(""),),
        (RENDERED.format(", enable_thinking=False"), RENDERED.format(", enable_thinking=True")),
        (RENDERED.format(", enable_thinking=False"), REQUESTED.format('"enable_thinking": True')),
        (RENDERED.format(", enable_thinking=thinks"),),
        ("not python: enable_thinking=False)",),
        ("(" * 10_000,),
        ("\0",),
    ],
)
def test_what_is_not_said_plainly_is_not_taken(tmp_path: Path, blocks: tuple[str, ...]) -> None:
    assert card(tmp_path, *blocks) == {}


def test_other_languages_and_absent_cards_say_nothing(tmp_path: Path) -> None:
    assert card_options(tmp_path) == {}
    assert card(tmp_path, RENDERED.format(", enable_thinking=False"), language="bash") == {}
