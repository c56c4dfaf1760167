"""`dflash-trt eval`: compares two engines of one pair, with the report of a bench, and as a gate for CI.

Knows options, files and the terminal; the numbers are `bench.comparison`'s.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_report import REPORT, Report, check_paths, exit_code, gate_lines, gate_rows
from dflash_trt.cli.help_text import COUNT, PATH, Number, examples
from dflash_trt.cli.prompt_source import PromptSource, prompt_options
from dflash_trt.cli.prompts import MAX_LISTED_ROWS, Job
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.cli.time_left import Countdown
from dflash_trt.core.chat_template_options import shown_options
from dflash_trt.core.errors import ConfigError, RequestError, problem, raise_all
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import NODES, RuntimeConfig
from dflash_trt.core.sampling import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from dflash_trt.bench.comparison import Comparison, Gate, LogitsOf
    from dflash_trt.engine_dir import EngineDir


@click.command(
    "eval",
    short_help="Compare two engines of the same pair.",
    epilog=examples("dflash-trt eval engine-fp8 --against engine-bf16 --input-file prompts.jsonl --max-kl 0.01"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option("--against", required=True, metavar="ENGINE_DIR", type=PATH, help="The baseline engine.")
@prompt_options(required=True)
@click.option("--max-new-tokens", type=COUNT, default=128, show_default=True, help="Longest text in tokens.")
@click.option("--max-kl", type=Number(), metavar="NATS", help="Gate: the mean KL divergence at most.")
@click.option("--min-acceptance-ratio", type=Number(), metavar="X", help="Gate: acceptance length over the baseline's.")
@click.option("--min-agreement", type=Number(), metavar="X", help="Gate: fraction of equal greedy next tokens.")
@runtime_options(without=["seed", *NODES])  # texts are greedy
@REPORT
@click.pass_context
def evaluate(context: click.Context, /, engine_dir: Path, against: Path, **options: Any) -> None:
    """Measure what ENGINE_DIR loses against another engine of the same pair, greedily.

    Both targets compute their next-token distributions along the baseline's own texts, for token agreement and KL
    divergence. Perplexity is measured on the prompts, acceptance length on each engine's own run. The baseline is of
    backend torch. An ENGINE_DIR of backend tensorrt gives log probabilities of its 20 most likely tokens: its KL
    divergence has all others as one, and is at most the whole. One of tensorrt_llm is compared by its texts and its
    acceptance. With gates, the exit code is 3 if one is missed. --csv has a row for each prompt.
    """
    from dflash_trt.engine_dir import EngineDir

    check_paths(options)
    config = runtime_from_options(options)
    engines = {"candidate": EngineDir.open(engine_dir), "baseline": EngineDir.open(against)}
    _require_same_pair(engines["candidate"], engines["baseline"])
    if options["min_acceptance_ratio"] is not None:
        _require_drafts(engines.values(), config)
    jobs = PromptSource.of_options(options).jobs(SamplingParams(max_new_tokens=options["max_new_tokens"]))
    _require_same_conversations(engines["candidate"], engines["baseline"], jobs)
    if engines["baseline"].manifest.backend != "torch":
        found, hint = engines["baseline"].manifest.backend, "Compare with an engine built with --backend torch."
        raise ConfigError.about(f"baseline {against}", expected="backend torch, for its logits", found=found, hint=hint)
    for engine in engines.values():
        _check(engine, jobs, config)
    comparison = _measure(engines, jobs, config)
    gates = _gates(comparison, options)
    names = {"candidate": str(engine_dir), "baseline": str(against)}
    Report(
        rows=[
            {"id": job.row_id, "category": job.category, **text.as_row()}
            for job, text in zip(jobs, comparison.texts, strict=True)
        ],
        lines=[*_table(comparison, **names), *gate_lines(gates)],
        facts={**names, **comparison.as_json(), "gates": gate_rows(gates)},
        draw=partial(_draw, comparison),
    ).publish(options)
    context.exit(exit_code(gates))


def _draw(comparison: "Comparison", path: Path, caption: tuple[str, ...]) -> None:
    from dflash_trt.bench.comparison_figure import draw_comparison

    draw_comparison(comparison, path, caption)


def _require_same_pair(candidate: "EngineDir", baseline: "EngineDir") -> None:
    problems = []
    for part in ("target", "draft"):
        ours, theirs = getattr(candidate.manifest, part), getattr(baseline.manifest, part)
        if ours == theirs or (part == "draft" and None in (ours, theirs)):
            continue
        hint = "Compare engines that were built from the same checkpoints."
        if part == "draft":
            hint += " `dflash-trt bench speedup` compares drafters, with a gate, too."
        found = f"another {part} in {baseline.path}"
        problems.append(problem(f"{part} of {candidate.path}", expected="the same in both", found=found, hint=hint))
    raise_all(ConfigError, "eval", problems)


def _require_drafts(engines: "Iterable[EngineDir]", config: RuntimeConfig) -> None:
    """Raises ConfigError: the gate of acceptance can measure none."""
    if not config.use_drafter:
        raise ConfigError("options: --no-drafter and --min-acceptance-ratio are mutually exclusive.")
    for engine in engines:
        if engine.manifest.draft is None:
            found = f"{engine.path} without one"
            raise ConfigError.about("--min-acceptance-ratio", expected="engines with a drafter", found=found)


def _require_same_conversations(candidate: "EngineDir", baseline: "EngineDir", jobs: Sequence[Job]) -> None:
    """Both engines must make the same prompts of the rows."""
    ours, theirs = (engine.manifest.chat_template_options for engine in (candidate, baseline))
    if ours != theirs and any(job.is_conversation for job in jobs):
        expected, found = (shown_options(options) or "none" for options in (theirs, ours))
        hint = "Build both with the same --chat-template-option."
        raise ConfigError.about(f"chat template options of {candidate.path}", expected=expected, found=found, hint=hint)


def _check(engine: "EngineDir", jobs: Sequence[Job], config: RuntimeConfig) -> None:
    """Raises ConfigError: a setting or a prompt that this engine refuses, before anything is loaded."""
    from dflash_trt.serving.llm import open_request_reader
    from dflash_trt.serving.opening import checked_settings

    checked_settings(engine, config)
    reader = open_request_reader(engine).prompts
    refused = []
    for job in jobs:
        try:
            reader.read(job.prompt)
        except RequestError as error:
            refused.append(f"{job.row_id}: {error}")
    raise_all(ConfigError, "prompts", refused[:MAX_LISTED_ROWS])


def _measure(engines: "dict[str, EngineDir]", jobs: Sequence[Job], config: RuntimeConfig) -> "Comparison":
    from dflash_trt.bench.comparison import compare, scores_of_logits, scores_of_top_tokens

    outputs = {name: _generate(engine, jobs, config) for name, engine in engines.items()}
    prompts, candidate = _token_ids(engines["baseline"], jobs), engines["candidate"]
    click.echo("scoring ...", err=True)
    scores, kl_num_top = None, None
    if candidate.manifest.backend == "tensorrt":
        scores = scores_of_top_tokens(_scored_texts(candidate, config, prompts, outputs["baseline"]))
        kl_num_top = min(MAX_TOP_LOGPROBS, candidate.manifest.target.vocab_size)
    with ExitStack() as stack:
        if candidate.manifest.backend == "torch":
            scores = scores_of_logits(_logits_of(candidate, config, stack))
        return compare(
            prompts,
            outputs["baseline"],
            outputs["candidate"],
            baseline_logits=_logits_of(engines["baseline"], config, stack),
            candidate_scores=scores,
            kl_num_top=kl_num_top,
        )


def _scored_texts(
    engine: "EngineDir", config: RuntimeConfig, prompts: Sequence[Sequence[int]], outputs: Sequence[GenerationOutput]
) -> dict[tuple[int, ...], GenerationOutput]:
    """Log probabilities of the texts, as prompts of the engine; the token generated stands for the last one."""
    from dflash_trt.serving.llm import LLM

    pairs = zip(prompts, outputs, strict=True)
    texts = [(*prompt, *output.token_ids[:-1]) for prompt, output in pairs]
    sampling = SamplingParams(
        max_new_tokens=1,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=MAX_TOP_LOGPROBS,
        prompt_logprobs=MAX_TOP_LOGPROBS,
    )
    with LLM(engine.path, config.without_drafter()) as llm:
        scored = llm.generate([{"prompt_token_ids": list(text)} for text in texts], sampling)
    raise_all(ConfigError, "prompts", [output.error for output in scored if output.error is not None])
    return dict(zip(texts, scored, strict=True))


def _generate(engine: "EngineDir", jobs: Sequence[Job], config: RuntimeConfig) -> list[GenerationOutput]:
    """Greedy texts. A prompt that cannot run is an error, since the comparison needs all of them."""
    from dflash_trt.executor.opening import with_one_draft_length
    from dflash_trt.serving.llm import LLM

    click.echo(f"generating with {engine.path} ...", err=True)
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(engine.path, with_one_draft_length(config, engine)))
        countdown, numbers = Countdown("prompts"), count(1)
        stack.callback(countdown.wipe)

        def advance(*_: object) -> None:
            number = next(numbers)
            countdown.show(number, len(jobs), f"{number}/{len(jobs)}")

        outputs = llm.generate([job.prompt for job in jobs], [_greedy(job) for job in jobs], on_output=advance)
    errors = [
        f"{job.row_id}: {output.error}" for job, output in zip(jobs, outputs, strict=True) if output.error is not None
    ]
    raise_all(ConfigError, "prompts", errors[:MAX_LISTED_ROWS])
    return outputs


def _greedy(job: Job) -> SamplingParams:
    return SamplingParams(max_new_tokens=job.sampling.max_new_tokens, ignore_eos=job.sampling.ignore_eos)


def _token_ids(engine: "EngineDir", jobs: Sequence[Job]) -> list[list[int]]:
    from dflash_trt.serving.llm import open_request_reader

    reader = open_request_reader(engine).prompts
    return [list(reader.read(job.prompt)) for job in jobs]


def _logits_of(engine: "EngineDir", config: RuntimeConfig, stack: ExitStack) -> "LogitsOf":
    """On the device that generated; the stack closes it."""
    from dflash_trt.executor.opening import open_executor

    target_alone = config.without_drafter()
    executor = open_executor(engine, target_alone)
    stack.callback(executor.close)
    target_logits: Any = getattr(executor, "target_logits")  # noqa: B009 - of the executors of backend torch alone
    return lambda token_ids: target_logits(token_ids).float().numpy()


def _gates(comparison: "Comparison", options: dict[str, Any]) -> "list[Gate]":
    from dflash_trt.bench.comparison import Gate

    known = (
        ("max_kl", comparison.kl_nats, True),
        ("min_acceptance_ratio", comparison.acceptance_ratio, False),
        ("min_agreement", comparison.token_agreement_fraction, False),
    )
    return [
        Gate(name=name, bound=options[name], value=value, is_upper=is_upper)
        for name, value, is_upper in known
        if options[name] is not None
    ]


def _table(comparison: "Comparison", *, baseline: str, candidate: str) -> list[str]:
    """Its lines."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "baseline", "candidate", "over", title=f"{candidate} against {baseline}", title_justify="left")
    positions = f"{comparison.num_generated_positions} generated positions"
    if comparison.kl_nats is not None:
        table.add_row("token agreement", "", f"{comparison.token_agreement_fraction:.4f}", positions)
        table.add_row(f"{comparison.kl_name}, mean (nats)", "", f"{comparison.kl_nats:.3g}", positions)
        table.add_row("KL divergence, 99th percentile", "", f"{comparison.kl_nats_p99:.3g}", positions)
    prompts = f"{comparison.num_prompts} prompts"
    table.add_row("identical texts", "", f"{comparison.identical_texts_fraction:.4f}", prompts)
    perplexities = (comparison.baseline_perplexity, comparison.candidate_perplexity)
    table.add_row("perplexity", *map(_number, perplexities), f"{comparison.num_prompt_positions} prompt positions")
    accepted = (comparison.baseline_acceptance, comparison.candidate_acceptance)
    lengths = [_number(acceptance.acceptance_length) for acceptance in accepted]
    steps = " and ".join(str(acceptance.num_verify_steps) for acceptance in accepted)
    table.add_row("acceptance length, bonus included", *lengths, f"{steps} verify steps")
    table.add_row("acceptance ratio", "", _number(comparison.acceptance_ratio), "")
    console = Console(markup=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
