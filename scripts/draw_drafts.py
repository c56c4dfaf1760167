"""A picture of block diffusion drafting at work: a text by the origin of its tokens, of a run made for it.

python -m scripts.draw_drafts build/demo docs/figures/drafts.svg
"""

import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.serving.marked_texts import marked_texts

PROMPT = """class Parser:
    \"\"\"Parse a file.\"\"\"

    def __init__(self, file):
        self.file = file

    def __call__(self, """
NUM_TOKENS = 81
LEGEND = (
    *(("accepted drafts", "accepted"), ("   ", "prompt"), ("rejected drafts", "rejected"), ("   ", "prompt")),
    *(("the target's own tokens", "target"), ("   prompt", "prompt")),
)

_FONT_SIZE, _LINE_HEIGHT, _MARGIN = 14, 20, 16  # pixels
_ADVANCE = 8.43  # of a letter
_STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
.page { fill: #ffffff; } .prompt { fill: #6e7781; } .target { fill: #1f2328; font-weight: 700; }
.accepted { fill: #1a7f37; } .rejected { fill: #cf222e; fill-opacity: 0.75; text-decoration: line-through 1px; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; } .prompt { fill: #8b949e; } .target { fill: #f0f6fc; }
  .accepted { fill: #3fb950; } .rejected { fill: #ff7b72; }
}
"""

Piece = tuple[str, str]  # text, class


def pieces_of(engine_dir: Path) -> tuple[list[Piece], float]:
    """The prompt and its continuation, and the mean tokens of a verify step."""
    with LLM(engine_dir, device="cpu", draft_length=7, kv_cache_bytes=1 << 28) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True), reports_drafts=True)
        assert llm.codec is not None and output.acceptance_length is not None
        texts = [(text.shown, text.origin) for text in marked_texts(output, llm.codec)]
    return [(PROMPT, "prompt"), *texts], output.acceptance_length


def lines_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    line: list[Piece] = []
    for text, style in pieces:
        first, *others = text.split("\n")
        line.append((first, style))
        for other in others:
            yield line
            line = [(other, style)]
    yield line


def svg(lines: list[list[Piece]], title: str) -> str:
    num_columns = max(sum(len(text) for text, _ in line) for line in lines)
    width, height = round(num_columns * _ADVANCE) + 2 * _MARGIN, len(lines) * _LINE_HEIGHT + 2 * _MARGIN
    rows = []
    for index, line in enumerate(lines):
        spans = "".join(f'<tspan class="{style}">{escape(text)}</tspan>' for text, style in line if text)
        y = _MARGIN + _FONT_SIZE + index * _LINE_HEIGHT
        rows.append(f'<text x="{_MARGIN}" y="{y}" xml:space="preserve">{spans}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
            *rows,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    engine_dir, path = map(Path, sys.argv[1:])
    pieces, length = pieces_of(engine_dir)
    title = f"Text by the origin of its tokens: {length:.1f} tokens per step of the target"
    path.write_text(svg([*lines_of(pieces), [("", "prompt")], list(LEGEND)], title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
