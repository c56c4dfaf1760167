"""Opens an engine with a status line, its settings, and refusals before any weights are read."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.prompts import InputRow, Refusal
from dflash_trt.cli.run_options import RunOptions
from dflash_trt.cli.runtime_options import settings_line
from dflash_trt.cli.status_line import status_line
from dflash_trt.core.chat_template_options import shown_options
from dflash_trt.core.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.serving.llm import LLM
    from dflash_trt.serving.request_reader import RequestReader

_MAX_LISTED_FAILURES = 10


def open_engine(
    options: RunOptions, *, has_conversations: bool, before_load: "Callable[[RequestReader], object]"
) -> "LLM":
    """Load it, and say how it was opened. `before_load` as for LLM."""
    started = time.monotonic()
    with status_line(f"opening {options.engine_dir} ...") as line:
        from dflash_trt.serving.llm import LLM

        llm = LLM(options.engine_dir, options.runtime, before_load=before_load, on_progress=line.show_read)
    if not options.as_json:
        click.echo(settings_line(llm.config), err=True)
        template_options = {**llm.chat_template_options, **options.template_kwargs}
        if has_conversations and template_options:
            click.echo(f"chat template: {shown_options(template_options)}", err=True)
        if llm.page_plan is not None:
            click.echo(f"K/V: {llm.page_plan}", err=True)
    if sys.stderr.isatty():
        click.echo(f"ready in {time.monotonic() - started:.1f} s", err=True)
    return llm


def refuse_if_none_runs(rows: Sequence[InputRow], reader: "RequestReader") -> None:
    """Raise RequestError if every row is refused. Reads rows only up to the first that is not."""
    reasons: list[str] = []
    for row in rows:
        if isinstance(row, Refusal):
            reasons.append(f"{row.row_id}: {row.error}")
            continue
        try:
            reader.read(row.prompt, row.sampling)
        except RequestError as error:
            reasons.append(f"{row.row_id}: {error}")
        else:
            return
    raise RequestError(listed_failures(reasons, len(rows)))


def listed_failures(failures: Sequence[str], num_rows: int) -> str:
    """A heading and the first reasons."""
    listed = list(failures[:_MAX_LISTED_FAILURES])
    if len(failures) > len(listed):
        listed.append(f"... and {len(failures) - len(listed)} more")
    lines = "".join(f"\n  - {line}" for line in listed)
    return f"{len(failures)} of {num_rows} requests failed{lines}"
