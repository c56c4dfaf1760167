"""`dflash-trt run`: rows in, texts out, a summary at the end.

Knows options, files and the terminal; everything about generation is LLM's.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.conversation import converse
from dflash_trt.cli.draft_marks import marked, marked_chunks, refuse_drafts
from dflash_trt.cli.help_text import PATH, LongCommand, examples
from dflash_trt.cli.open_engine import listed_failures, open_engine, refuse_if_none_runs
from dflash_trt.cli.partial_results import partial_results
from dflash_trt.cli.prompt_source import prompt_options
from dflash_trt.cli.prompts import InputRow, Job, Refusal
from dflash_trt.cli.report import RunSummary, summarize, summary_lines
from dflash_trt.cli.result_files import InOrder, json_line, new_jsonl_file, output_rows, trace_lines
from dflash_trt.cli.run_options import RunOptions
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.cli.sampling_options import SAMPLING_NAMES, sampling_from_options, sampling_options
from dflash_trt.cli.time_left import Countdown
from dflash_trt.core.errors import ErrorCollector
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.request import GenerationOutput
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.serving.llm import LLM
    from dflash_trt.serving.output_processor import StreamChunk
    from dflash_trt.serving.request_reader import RequestReader
    from dflash_trt.serving.text import TextCodec

Emit = Callable[[int, GenerationOutput | None], None]


@click.command(
    cls=LongCommand,
    common="prompts input_file output_file chat system stream show_drafts as_json max_new_tokens temperature "
    "top_p top_k n seed stop no_drafter draft_length adaptive device kv_cache_bytes deterministic",
    short_help="Generate text from an engine directory.",
    epilog=examples(
        "dflash-trt run engine --prompt 'def fibonacci(n):' --max-new-tokens 64",
        "dflash-trt run engine --chat",
        "dflash-trt run engine --input-file prompts.jsonl --output-file results.jsonl",
    ),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; repeatable. Without one: stdin.")
@prompt_options()
@click.option("--output-file", type=PATH, help="JSONL results, in input order.")
@click.option("--overwrite", is_flag=True, help="Replace files of results that exist.")
@click.option("--resume", is_flag=True, help="Continue a run that was interrupted: rows with a result are kept.")
@click.option(
    "--trace-file", type=PATH, help="JSONL, one line per request and step, with drafts; `show-drafts` reads it."
)
@click.option(
    "--chat",
    is_flag=True,
    help="Make each prompt the user message of a conversation. Without prompts, on a terminal: have a conversation.",
)
@click.option("--system", metavar="TEXT", help="System message of conversations that have none.")
@click.option(
    "--chat-template-option",
    "chat_template_options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of the chat template, such as enable_thinking=false, for every conversation; repeatable. "
    "Default: those that the engine was built with.",
)
@runtime_options(without=["seed"])  # --seed is the sampling seed of every row
@click.option(
    "--stream/--no-stream", default=None, help="Print text as it comes; for one prompt (default: on a terminal)."
)
@click.option(
    "--show-drafts",
    is_flag=True,
    help="Mark the accepted drafts of a text, and show the rejected ones: in green and red on a terminal, else as "
    "{+accepted+} and [-rejected-]. The rest is the target's own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print summary and results as one JSON object.")
@sampling_options
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Generate text for one or many prompts, all of them together.

    An input row is a JSON object with one of `prompt`, `messages`, `prompt_token_ids` or `turns` (here a single text),
    an optional `id` and `category`, which its results have, too, `chat_template_kwargs` for messages, and sampling
    fields that override the command line. They have the names of the options from max_new_tokens on, except the lists
    `stop` and `stop_token_ids`. A row that cannot run gets finish_reason "error" and its reason in `error`; the others
    go on, and the exit code is 3. A row with `n` samples has as many results, with their `sample_index`.

    Finished rows are kept in FILE.partial next to the --output-file FILE until that is complete. After an interrupt, a
    crash or a full disk, the same command with --resume runs the rows that have no result.
    """
    told = _checked_options(options)
    if told.is_conversation:
        context.exit(converse(told))
    rows = told.read_rows()
    summary, failures = _run(told, rows)
    if not told.as_json:
        for line in summary_lines(summary):
            click.echo(line, err=True)
    if failures:
        click.secho(f"error: {listed_failures(failures, len(rows))}", fg="red", err=True)
    context.exit(ExitCode.REQUEST_FAILED if failures else ExitCode.DONE)


def _checked_options(options: dict[str, Any]) -> RunOptions:
    """Raises ConfigError: every option that is wrong, and all that exclude each other."""
    errors = ErrorCollector()
    given = {name: options.pop(name) for name in SAMPLING_NAMES}
    sampling = errors.run(lambda: sampling_from_options(given))
    runtime = errors.run(lambda: runtime_from_options(options))
    checked = RunOptions(**options, sampling=sampling or SamplingParams(), runtime=runtime or RuntimeConfig())
    errors.run(checked.check)
    errors.raise_all("options")
    return checked


def _run(options: RunOptions, rows: Sequence[InputRow]) -> tuple[RunSummary, list[str]]:
    """Run every row that has no result yet; failures are `id: reason`.

    Files appear when all rows are done.
    """

    def before_load(reader: "RequestReader") -> None:
        if options.show_drafts:
            refuse_drafts(options.engine_dir, reader)
        refuse_if_none_runs(rows, reader)

    with ExitStack() as stack:
        sink = _open_results(options, stack, rows)
        started = time.monotonic()
        reads = any(isinstance(row, Job) and row.is_conversation for row in rows)
        llm = stack.enter_context(open_engine(options, has_conversations=reads, before_load=before_load))
        if options.show_drafts and llm.codec is not None and not options.streams(len(rows)):
            sink = _with_drafts(sink, rows, llm.codec)
        load_time_s = time.monotonic() - started
        started = time.monotonic()
        produce = _stream if options.streams(len(rows)) else _generate
        outputs = produce(llm, rows, sink, options)
        samples = [
            (row, sample)
            for index, row in enumerate(rows)
            if isinstance(row, Job) and index in outputs
            for sample in outputs[index].samples
        ]
        summary = summarize(
            [sample for _, sample in samples],
            max_new_tokens=[row.sampling.max_new_tokens for row, _ in samples],
            num_refused=sum(isinstance(row, Refusal) for row in rows),
            load_time_s=load_time_s,
            wall_time_s=time.monotonic() - started,
            max_draft_tokens=llm.config.max_draft_tokens,
        )
    if options.as_json:
        pages = None if llm.page_plan is None else asdict(llm.page_plan)
        document: dict[str, Any] = {"summary": asdict(summary), "kv_pages": pages}
        document["settings"] = llm.config.model_dump()
        document["chat_template_options"] = {**llm.chat_template_options, **options.template_kwargs}
        if options.resume:
            document["num_rows_kept"] = len(sink.finished)
        if options.output_file is None:
            document["outputs"] = sink.results
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    return summary, [reason for index, row in enumerate(rows) for reason in _failure(row, outputs.get(index))]


@dataclass(frozen=True, kw_only=True)
class _Sink:
    """Destination of rows. `emit` takes a row's output by its index, in any order; None for a refused row."""

    emit: Emit
    finished: frozenset[int] = frozenset()  # rows that need not run
    results: list[dict[str, Any]] = field(default_factory=list)  # in input order, for `--json`


def _open_results(options: RunOptions, stack: ExitStack, rows: Sequence[InputRow]) -> _Sink:
    if options.keeps_rows:
        return _open_partial(options, stack, rows)
    results: list[dict[str, Any]] = []
    write_trace = None if options.trace_file is None else stack.enter_context(new_jsonl_file(options.trace_file))
    write_row: Callable[[dict[str, Any]], None]
    if options.output_file is not None:
        write_row = stack.enter_context(new_jsonl_file(options.output_file))
    elif options.as_json:
        write_row = results.append
    else:
        write_row = _print_row

    def emit(index: int, output: GenerationOutput | None) -> None:
        row = rows[index]
        if write_trace is not None and output is not None:
            for line in trace_lines(row.row_id, output):
                write_trace(line)
        if not options.prints_text:
            for result in output_rows(row, output):
                write_row(result)
        elif not options.streams(len(rows)) and not options.show_drafts and output is not None:
            _print_texts(row, output, _text_of, has_others=len(rows) > 1)

    return _Sink(emit=InOrder(emit).done, results=results)


def _with_drafts(sink: _Sink, rows: Sequence[InputRow], codec: "TextCodec") -> _Sink:
    """Print texts with their drafts, too."""
    from dflash_trt.serving.marked_texts import marked_texts

    def text_of(output: GenerationOutput) -> str:
        return marked(marked_texts(output, codec))

    def emit(index: int, output: GenerationOutput | None) -> None:
        if output is not None:
            _print_texts(rows[index], output, text_of, has_others=len(rows) > 1)

    in_order = InOrder(emit).done

    def emit_both(index: int, output: GenerationOutput | None) -> None:
        sink.emit(index, output)
        in_order(index, output)

    return replace(sink, emit=emit_both)


def _open_partial(options: RunOptions, stack: ExitStack, rows: Sequence[InputRow]) -> _Sink:
    """Keep rows as they finish."""
    from dflash_trt.engine_dir import EngineDir

    assert options.output_file is not None
    settings = {"engine": EngineDir.open(options.engine_dir).sha256} | options.text_settings()
    partial = stack.enter_context(
        partial_results(options.output_file, options.trace_file, rows, settings, resumes=options.resume)
    )
    if options.resume and not options.as_json:
        click.echo(f"{partial.path}: {len(partial.finished)} of {len(rows)} rows have a result", err=True)

    def emit(index: int, output: GenerationOutput | None) -> None:
        if output is not None:
            partial.add(index, output, has_trace=options.trace_file is not None)

    return _Sink(emit=emit, finished=partial.finished)


def _generate(llm: "LLM", rows: Sequence[InputRow], sink: _Sink, options: RunOptions) -> dict[int, GenerationOutput]:
    """All rows together but those that are finished or refused; outputs by the row's index."""
    outputs: dict[int, GenerationOutput] = {}
    jobs: list[tuple[int, Job]] = []
    for index, row in enumerate(rows):
        if isinstance(row, Refusal):
            sink.emit(index, None)
        elif index not in sink.finished:
            jobs.append((index, row))
    with _progress(options, len(jobs)) as advance:

        def take(job_index: int, output: GenerationOutput) -> None:
            index, _ = jobs[job_index]
            outputs[index] = output
            sink.emit(index, output)
            advance(output)

        llm.generate(
            [job.prompt for _, job in jobs],
            [job.sampling for _, job in jobs],
            on_output=take,
            reports_drafts=_wants_drafts(llm, options),
        )
    return outputs


def _stream(llm: "LLM", rows: Sequence[InputRow], sink: _Sink, options: RunOptions) -> dict[int, GenerationOutput]:
    """One row, printed as it comes."""
    (row,) = rows
    if isinstance(row, Refusal):
        return {}
    text_of = marked_chunks(llm.codec) if options.show_drafts and llm.codec is not None else _text_of_chunk
    outputs: dict[int, GenerationOutput] = {}
    for chunk in llm.stream(row.prompt, row.sampling, reports_drafts=_wants_drafts(llm, options)):
        click.echo(text_of(chunk), nl=False)
        sys.stdout.flush()
        if chunk.output is not None:
            outputs[0] = chunk.output
    click.echo()
    sink.emit(0, outputs[0])
    return outputs


def _wants_drafts(llm: "LLM", options: RunOptions) -> bool:
    """A trace has the drafts of engines that report them; `--show-drafts` has refused the others."""
    return options.show_drafts or (options.trace_file is not None and llm.engine.manifest.reports_drafts)


@contextmanager
def _progress(options: RunOptions, num_jobs: int) -> Iterator[Callable[[GenerationOutput], None]]:
    """On stderr, if several requests run and no text goes to the same terminal."""
    if num_jobs < 2 or (options.output_file is None and sys.stdout.isatty()):
        yield lambda output: None
        return
    countdown, started_s = Countdown("requests"), time.monotonic()
    num_done = num_tokens = 0

    def advance(output: GenerationOutput) -> None:
        nonlocal num_done, num_tokens
        num_done += 1
        num_tokens += sum(len(sample.token_ids) for sample in output.samples)
        speed = num_tokens / (time.monotonic() - started_s)
        countdown.show(num_done, num_jobs, f"{num_done}/{num_jobs}, {speed:.0f} tok/s")

    try:
        yield advance
    finally:
        countdown.wipe()


def _failure(row: InputRow, output: GenerationOutput | None) -> Iterator[str]:
    if isinstance(row, Refusal):
        yield f"{row.row_id}: {row.error}"
    elif output is not None:
        yield from (f"{row.row_id}: {sample.error}" for sample in output.samples if sample.error is not None)


def _print_row(fields: dict[str, Any]) -> None:
    click.echo(json_line(fields), nl=False)
    sys.stdout.flush()


def _text_of(output: GenerationOutput) -> str:
    return " ".join(map(str, output.token_ids)) if output.text is None else output.text


def _text_of_chunk(chunk: "StreamChunk") -> str:
    return "".join(f"{token_id} " for token_id in chunk.token_ids) if chunk.text is None else chunk.text


def _print_texts(
    row: InputRow, output: GenerationOutput, text_of: Callable[[GenerationOutput], str], *, has_others: bool
) -> None:
    """Print the texts of all samples; several ones are prefixed with the row's id and the sample's index."""
    for sample in output.samples:
        if sample.error is None:
            text = text_of(sample)
            names = [str(row.row_id)] * has_others + [f"sample {sample.sample_index}"] * bool(output.other_samples)
            click.echo(f"[{', '.join(names)}] {text}" if names else text)
