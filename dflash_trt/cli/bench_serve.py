"""`dflash-trt bench serve`: servers of the OpenAI API under load."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bench_machine import MACHINE, measure_now, read_machine, roofs_of
from dflash_trt.cli.bench_options import (
    FIXED_BY_ROUNDS,
    INPUT,
    LENGTH,
    PER_CLIENT,
    ROUNDS,
    check_names,
    conversations_of,
    is_url,
    named,
)
from dflash_trt.cli.bench_report import REPORT, Report, check_paths, this_machine
from dflash_trt.cli.help_text import COUNT, POSITIVE, LongCommand, NumberRange, OptionSet, examples
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.cli.time_left import TimeLeft
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.bench.load_report import Limits, LoadReport
    from dflash_trt.bench.request_load import Load
    from dflash_trt.bench.roofline import Roofline
    from dflash_trt.bench.server_sweep import Side
    from dflash_trt.plan.machine_file import MachineFile
    from dflash_trt.servers.dynamo.supervisor import Service

_CONCURRENCIES = (1, 2, 4, 8, 16)
_LIMITS = {"ttft": "time_to_first_token_s", "tpot": "time_per_output_token_s", "e2el": "end_to_end_s"}
_PORTS = range(20000, 32768)  # Dynamo reads the metrics port as a signed 16-bit number

Engines = Mapping[str, tuple[Path, RuntimeConfig]]  # by the name of the server

_OPTIONS = OptionSet(
    click.option(
        "--autoregressive", is_flag=True, help="Measure each engine without its drafter, too, before the others."
    ),
    click.option(
        "--concurrency",
        "concurrencies",
        multiple=True,
        type=COUNT,
        help="Number of clients (closed loop); repeatable.  [default: 1, 2, 4, 8, 16, or none with --request-rate]",
    ),
    click.option(
        "--request-rate",
        "request_rates",
        multiple=True,
        type=POSITIVE,
        metavar="PER_SECOND",
        help="Rate of Poisson arrivals (open loop); repeatable.",
    ),
    PER_CLIENT,
    click.option(
        "--duration",
        "duration_s",
        type=POSITIVE,
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="How long requests arrive at a rate.",
    ),
    LENGTH,
    click.option("--temperature", type=NumberRange(min=0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--ignore-eos", is_flag=True, help="Texts of equal length, to measure throughput only."),
    click.option("--goodput", metavar="ttft:MS,tpot:MS,e2el:MS", help="Limits of a good request, as in vLLM."),
    click.option("--model-name", metavar="NAME", help="Model to request from a URL (default: the server's first)."),
    click.option("--num-gpus", type=COUNT, help="GPUs of each server; else speeds are per server."),
    click.option(
        "--hardware",
        metavar="TEXT",
        help="Name of the hardware in reports (default: this machine, if no URL is measured).",
    ),
    click.option(
        "--interactivity",
        multiple=True,
        type=POSITIVE,
        metavar="TOK_PER_S",
        help="Compare at this tok/s per user; repeatable.  [default: the highest that all reach]",
    ),
    MACHINE,
)


@click.command(
    cls=LongCommand,
    common="input_file categories num_prompts autoregressive concurrencies request_rates max_new_tokens "
    "temperature ignore_eos goodput num_gpus rounds csv_path figure as_json",
    short_help="Put servers of the OpenAI API under load: throughput and latencies.",
    epilog=examples(
        "dflash-trt bench serve engine --autoregressive --input-file prompts.jsonl --figure speed.svg",
        "dflash-trt bench serve vllm=http://127.0.0.1:8001 http://127.0.0.1:8000 --input-file prompts.jsonl",
    ),
)
@click.argument("sources", metavar="[NAME=]URL|ENGINE_DIR...", nargs=-1, required=True)
@INPUT
@_OPTIONS
@ROUNDS
@runtime_options(without=[*FIXED_BY_ROUNDS, "use_drafter"])
@REPORT
def serve(sources: tuple[str, ...], **options: Any) -> None:
    """Throughput, latencies and acceptance of servers, by concurrency and request rate.

    Servers alternate by rounds. A URL names a running server. An engine is served for its turns, with the options of
    its runtime and without prefix caching. Rows have the format of `run` or of SPEED-Bench, whose conversations are
    sent turn by turn.
    """
    _check_client()
    from dflash_trt.bench.server_sweep import sweep_servers

    runtime = runtime_from_options(options)
    limits, loads = _limits(options["goodput"]), _loads(options)
    check_paths(options)
    machine = read_machine(options["machine"])
    conversations = conversations_of(PromptSource.of_options(options).jobs(takes_turns=True))
    sides, engines = _sides(sources, runtime, options)
    fields: dict[str, Any] = {"max_tokens": options["max_new_tokens"], "temperature": options["temperature"]}
    if options["ignore_eos"]:
        fields["ignore_eos"] = True
    reports = sweep_servers(
        sides, conversations, loads, fields=fields, limits=limits, num_rounds=options["rounds"], progress=TimeLeft()
    )
    has_url = any(is_url(source) for _, source in map(named, sources))
    hardware = options["hardware"] or ("not stated" if has_url else this_machine())
    workload = _workload(options["input_file"], len(conversations), fields, options["rounds"])
    _publish(reports, list(floors_beside(reports, engines, machine)), options, hardware=hardware, workload=workload)


def _publish(
    reports: "Sequence[LoadReport]", floors: "Sequence[Roofline | None]", options: dict[str, Any], **facts: str
) -> None:
    """Print the reports, and write the files."""
    from dflash_trt.bench.load_table import acceptance_lines, load_warnings, table
    from dflash_trt.bench.pareto import curves, shared_interactivity
    from dflash_trt.bench.pareto_figure import Figure, draw, ratio_text

    unit = "GPU" if options["num_gpus"] else "server"
    points = {name: found for name, found in curves(reports).items() if found}
    shared = shared_interactivity(points)
    interactivity = options["interactivity"] or ((shared,) if shared is not None else ())
    ratios = [ratio_text(points, per_user) for per_user in (interactivity if len(points) > 1 else ())]
    title = f"Throughput per {unit} against speed per user"
    Report(
        rows=[
            asdict(report) | {"roofline": floor and asdict(floor)}
            for report, floor in zip(reports, floors, strict=True)
        ],
        lines=[*table(reports, unit=unit), *acceptance_lines(reports), *map(str, filter(None, floors)), *ratios],
        facts=facts,
        warnings=load_warnings(reports),
        draw=lambda path, caption: draw(
            Figure(title=title, curves=points, unit=unit, caption=caption, interactivity=interactivity), path
        ),
    ).publish(options)


def floors_beside(
    reports: "Sequence[LoadReport]", engines: Engines, machine: "MachineFile | None"
) -> Iterator["Roofline | None"]:
    """One floor per report. None for URLs, open-loop arrivals (unknown batch sizes) and unanswered loads.

    Without a machine file this machine is measured once, when the first engine comes.
    """
    from dflash_trt.bench.request_load import counted_clients
    from dflash_trt.bench.roofline import mean_context_len

    for report in reports:
        if report.server not in engines or report.concurrency is None or not report.num_requests:
            yield None
            continue
        engine_dir, runtime = engines[report.server]
        machine = machine or measure_now(runtime)
        mean_prompt, mean_output = (
            round(count / report.num_requests) for count in (report.num_prompt_tokens, report.num_output_tokens)
        )
        roofs = roofs_of(engine_dir, machine, runtime)
        yield roofs.beside(
            report.output_tok_per_s,
            num_requests=report.concurrency,
            context_len=mean_context_len([mean_prompt], mean_output),
            acceptance_length=report.acceptance.length if report.acceptance else None,
            num_draft_tokens=roofs.fixed_drafts(runtime),
            label=f"{report.server}, {counted_clients(report.concurrency)}",
        )


def _sides(
    sources: Sequence[str], runtime: RuntimeConfig, options: dict[str, Any]
) -> "tuple[list[Side], dict[str, tuple[Path, RuntimeConfig]]]":
    """Sides in command line order, autoregressive ones first; and engines by name. Raises ConfigError."""
    from dflash_trt.bench.server_sweep import Side

    autoregressive, others, engines = [], [], {}
    settings = runtime.replaced(enable_prefix_caching=False)
    num_gpus = options["num_gpus"]

    def served(name: str, engine_dir: Path, config: RuntimeConfig) -> Side:
        engines[name] = (engine_dir, config)
        return Side(name=name, open=_starter(engine_dir, config), num_gpus=num_gpus)

    for name, source in map(named, sources):
        if is_url(source):
            address, model = source.rstrip("/").removesuffix("/v1"), options["model_name"]
            others.append(Side(name=name, open=_finder(address), num_gpus=num_gpus, model=model))
            continue
        if options["autoregressive"]:
            autoregressive.append(served(f"{name}, autoregressive", Path(source), settings.without_drafter()))
        others.append(served(name, Path(source), settings))
    sides = [*autoregressive, *others]
    if options["autoregressive"] and not autoregressive:
        hint = "Start that server with --no-drafter and pass its URL."
        raise ConfigError.about("--autoregressive", expected="an engine directory", found="URLs alone", hint=hint)
    check_names((side.name for side in sides), "servers")
    return sides, engines


def _finder(url: str) -> Callable[[], Any]:
    return lambda: nullcontext(url)


def _starter(engine_dir: Path, runtime: RuntimeConfig) -> Callable[[], Any]:
    """Starts `dflash-trt serve` with one replica. Raises ConfigError or EngineDirError before it starts."""
    from dflash_trt.cli.serve import worker_settings
    from dflash_trt.servers.dynamo.settings import check_package

    check_package()
    settings, _ = worker_settings(engine_dir, runtime)
    from dflash_trt.servers.dynamo.supervisor import Service

    @cache
    def log_file() -> Path:
        """One log file for all turns: a line per request would bury the progress lines."""
        handle, name = mkstemp(prefix="dflash-trt-bench-serve-", suffix=".log")
        os.close(handle)
        click.echo(f"the server of {engine_dir} writes to {name}", err=True)
        return Path(name)

    def start() -> Any:
        port = _free_ports()
        arguments = ("--router-mode", "round-robin", "--migration-limit", "0")
        service = Service(
            worker=settings, port=port, first_metrics_port=port + 1, frontend_arguments=arguments, log_file=log_file()
        )
        return _supervised(service)

    return start


@contextmanager
def _supervised(service: "Service") -> Iterator[str]:
    from dflash_trt.servers.dynamo.supervisor import Supervisor

    with Supervisor(service, lambda line: click.echo(line, err=True)) as supervisor:
        supervisor.wait_until_ready()
        yield service.url


def _free_ports() -> int:
    """The first of two neighbouring ports that are free now."""
    for port in _PORTS[::2]:
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise ConfigError.about("ports", expected=f"two of {_PORTS[0]} to {_PORTS[-1]} free", found="none")


def _loads(options: dict[str, Any]) -> "list[Load]":
    """Closed loads first, each once."""
    from dflash_trt.bench.request_load import Load

    rates = tuple(dict.fromkeys(options["request_rates"]))
    concurrencies = options["concurrencies"] or (() if rates else _CONCURRENCIES)
    per_client, duration_s = options["requests_per_client"], options["duration_s"]
    closed = [Load(num_conversations=per_client * count, concurrency=count) for count in dict.fromkeys(concurrencies)]
    return closed + [
        Load(num_conversations=max(1, round(rate * duration_s)), request_rate_per_s=rate) for rate in rates
    ]


def _limits(text: str | None) -> "Limits":
    """Raises ConfigError."""
    from dflash_trt.bench.load_report import Limits

    values: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = part.partition(":")
        try:
            values[_LIMITS[name.strip()]] = POSITIVE.convert(number, None, None) / 1e3
        except (KeyError, click.BadParameter) as error:
            expected = f"{', '.join(_LIMITS)} with milliseconds, more than 0"
            hint = "Write --goodput ttft:500,tpot:20 for example."
            raise ConfigError.about("--goodput", expected=expected, found=part, hint=hint) from error
    return Limits(**values)


def _check_client() -> None:
    from importlib.util import find_spec

    if find_spec("aiohttp") is None:
        hint = "Install it with: pip install 'dflash-trt[serve]'"
        raise ConfigError.about("bench serve", expected="the package aiohttp", found="none", hint=hint)


def _workload(input_file: Path, num_rows: int, fields: dict[str, Any], rounds: int) -> str:
    eos = "ignored" if fields.get("ignore_eos") else "ends a text"
    return (
        f"{num_rows} rows of {input_file.name}, at most {fields['max_tokens']} tokens each, "
        f"temperature {fields['temperature']:g}, EOS {eos}, {rounds} alternating rounds"
    )
