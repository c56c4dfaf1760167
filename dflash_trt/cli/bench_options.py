"""Options that the commands of `dflash-trt bench` share."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.help_text import COUNT
from dflash_trt.cli.prompt_source import prompt_options
from dflash_trt.cli.prompts import KWARGS_FIELD, Job
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import NODES, PREFIX_TIERS
from dflash_trt.demo import PROMPTS

if TYPE_CHECKING:
    from dflash_trt.bench.conversation import Conversation

# Rounds must not profit from the ones before; they open an engine several times.
FIXED_BY_ROUNDS = ("enable_prefix_caching", "num_state_snapshots", *PREFIX_TIERS, *NODES, "max_queue_len", "seed")

INPUT = prompt_options(
    default=PROMPTS, shown="16 beginnings of Python functions, which the demo pair was not trained on"
)
LENGTH = click.option(
    "--max-new-tokens", type=COUNT, default=128, show_default=True, help="Tokens to generate per prompt."
)
ROUNDS = click.option(
    "--rounds", type=COUNT, default=5, show_default=True, help="Measured rounds, alternating; one more warms up."
)
PER_CLIENT = click.option(
    "--requests-per-client", type=COUNT, default=6, show_default=True, help="Requests of a client, in sequence."
)


def named(source: str) -> tuple[str, str]:
    """The name of NAME=PLACE, by default the URL or the engine's directory, and the place."""
    name, separator, place = source.partition("=")
    if separator and name and "/" not in name:
        return name, place
    return (source if is_url(source) else Path(source).absolute().name), source


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def check_names(names: Iterable[str], subject: str) -> None:
    """Raises ConfigError: two have the same name."""
    listed = list(names)
    if len(set(listed)) < len(listed):
        hint = "Name them: NAME=ENGINE_DIR."
        raise ConfigError.about(subject, expected="distinct names", found=", ".join(listed), hint=hint)


def conversations_of(jobs: Iterable[Job]) -> "list[Conversation]":
    return [_conversation(job) for job in jobs]


def _conversation(job: Job) -> "Conversation":
    from dflash_trt.bench.conversation import Conversation

    assert not isinstance(job.prompt, str), "rows name their prompt"
    if "messages" not in job.prompt:
        prompt = job.prompt.get("prompt", job.prompt.get("prompt_token_ids"))
        return Conversation(category=job.category, prompt=prompt)
    fields = {KWARGS_FIELD: job.prompt[KWARGS_FIELD]} if KWARGS_FIELD in job.prompt else {}
    turns = (tuple(job.prompt["messages"]), *map(tuple, job.later_turns))
    return Conversation(category=job.category, turns=turns, fields=fields)
