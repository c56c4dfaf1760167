"""The picture of a text by the origin of its tokens."""

from pathlib import Path
from xml.etree import ElementTree

from scripts.draw_drafts import LEGEND, PROMPT, lines_of, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
PICTURE = Path(__file__).resolve().parents[2] / "docs/figures/drafts.svg"


def pieces(text: str) -> list[tuple[str, str]]:
    spans = ElementTree.fromstring(text).iter(f"{NAMESPACE}tspan")
    return [(span.text or "", span.get("class") or "") for span in spans]


def test_lines_break_where_the_text_does_and_markup_is_escaped() -> None:
    drawn = [("a\n", "prompt"), ("<b>\n\n  c", "accepted"), ("d\u23ce", "rejected"), ("&e", "target")]
    lines = list(lines_of(drawn))
    assert lines == [
        [("a", "prompt")],
        [("", "prompt"), ("<b>", "accepted")],
        [("", "accepted")],
        [("  c", "accepted"), ("d\u23ce", "rejected"), ("&e", "target")],
    ]
    text = svg(lines, "a & b")
    assert pieces(text) == [piece for line in lines for piece in line if piece[0]]
    root = ElementTree.fromstring(text)
    assert [child.text for child in root.iter(f"{NAMESPACE}title")] == ["a & b"]
    assert root.get("viewBox") == f"0 0 {round(7 * 8.43) + 32} {4 * 20 + 32}"


def test_the_picture_is_as_the_script_draws_it() -> None:
    """Its lines, drawn again; a run that makes them anew would depend on the machine's rounding."""
    text = PICTURE.read_text()
    root = ElementTree.fromstring(text)
    lines = [[(span.text or "", span.get("class") or "") for span in line] for line in root.iter(f"{NAMESPACE}text")]
    (title,) = (child.text or "" for child in root.iter(f"{NAMESPACE}title"))
    assert svg(lines, title) == text
    length = float(
        title.removeprefix("Text by the origin of its tokens: ").removesuffix(" tokens per step of the target")
    )
    assert 1 < length <= 8


def test_the_picture_is_of_a_text_with_drafts_of_both_kinds_and_asks_for_nothing_outside() -> None:
    text = PICTURE.read_text()
    drawn, legend = pieces(text)[: -len(LEGEND)], pieces(text)[-len(LEGEND) :]
    assert legend == list(LEGEND)
    assert {style for _, style in drawn} == {"prompt", "accepted", "rejected", "target"}
    prompt = "".join(text for text, style in drawn if style == "prompt")
    assert prompt == PROMPT.replace("\n", "")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text
