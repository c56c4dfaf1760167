"""Prompts from files the demo pair has never seen: the beginnings of functions in held-out source files.

`python -m scripts.train_demo.prompts` prints them as JSONL rows for `dflash-trt run` and `dflash-trt bench`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click

from scripts.train_demo.corpus import read_source, standard_library

_DEFINITION = re.compile(r"^(?:def|class) \w+.*:$", re.MULTILINE)
_PROMPT_CHARACTERS = 400


def held_out_prompts(num_prompts: int) -> list[str]:
    """At most one prompt per held-out file: the text up to the end of a definition's first line."""
    return [prompt for path in standard_library().held_out for prompt in _prompts_of(path)][:num_prompts]


def _prompts_of(path: Path) -> Iterator[str]:
    source = read_source(path)
    for match in _DEFINITION.finditer(source, _PROMPT_CHARACTERS):
        start = source.rfind("\n", 0, match.end() - _PROMPT_CHARACTERS) + 1
        yield source[start : match.end()] + "\n"
        return


@click.command()
@click.option("--num-prompts", default=32, show_default=True)
def main(num_prompts: int) -> None:
    """Print held-out prompts, one JSON object per line."""
    for prompt in held_out_prompts(num_prompts):
        category = "class" if prompt.splitlines()[-1].startswith("class") else "function"
        click.echo(json.dumps({"prompt": prompt, "category": category}))


if __name__ == "__main__":
    main()
