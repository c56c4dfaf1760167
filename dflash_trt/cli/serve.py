"""`dflash-trt serve` and `dflash-trt worker`: the OpenAI API, through NVIDIA Dynamo."""

import json
import os
import socket
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.help_text import COUNT, PATH, LongCommand, OptionSet, examples
from dflash_trt.cli.runtime_options import runtime_from_options, runtime_options
from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.servers.dynamo.roles import Role
    from dflash_trt.servers.dynamo.settings import WorkerSettings
    from dflash_trt.servers.dynamo.supervisor import Service

_ROUTER_MODES = ("round-robin", "random", "kv", "least-loaded", "power-of-two-choices")

_MAX_METRICS_PORT = 2**15 - 1  # Dynamo reads a signed 16-bit number

_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
_TEXT: dict[str, Any] = {"prompt": "def fibonacci(n):"}
_TEXT_PATHS = ("completions", "completions")

_MODEL = OptionSet(
    click.option("--model-name", metavar="NAME", help="Name of the model to clients (default: the directory's)."),
    click.option("--tool-call-parser", metavar="NAME", help="Dynamo's parser of tool calls, such as hermes."),
    click.option("--reasoning-parser", metavar="NAME", help="Dynamo's parser of reasoning, such as qwen3."),
)


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        from dflash_trt.core.runtime_config import byte_size

        try:
            found = byte_size(value)
        except ValueError as error:
            self.fail(f"{value!r} is not {error}", param, context)
        assert isinstance(found, int)
        return found


_PROMPTS_APART = OptionSet(
    click.option(
        "--prefill-min-tokens",
        type=click.IntRange(min=0),
        help="Shorter prompts are computed by the worker that answers them.  [default: 512]",
    ),
    click.option(
        "--transfer-backend",
        type=click.Choice(("files", "nixl")),
        help="How blocks of a prompt go from prefill to decode workers: files of a shared directory, or memory that "
        "NVIDIA's NIXL reads, over RDMA where there is any.  [default: files]",
    ),
    click.option(
        "--transfer-bytes",
        type=_Size(),
        metavar="SIZE",
        help="Memory of a prefill worker for blocks that NIXL reads.  [default: 1GiB]",
    ),
)


@click.command(
    cls=LongCommand,
    common="host port replicas gpus router_mode no_ui model_name tool_call_parser reasoning_parser no_drafter "
    "draft_length adaptive device kv_cache_bytes max_queue_len",
    short_help="Serve the OpenAI API on this machine.",
    epilog=examples("dflash-trt serve engine --port 8000", "dflash-trt serve engine --gpus 0,1,2,3 --router-mode kv"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option("--replicas", type=COUNT, help="Engines to run, a process each.  [default: 1]")
@click.option("--gpus", metavar="0,1,...", help="One replica on each of these GPUs, or on each N for N ranks.")
@click.option(
    "--prefill-workers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Replicas that only compute prompts, for the others (with --host-cache-bytes).",
)
@_PROMPTS_APART
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the HTTP server.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the HTTP server.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, _MAX_METRICS_PORT),
    help="Metrics port of the first replica; the others follow.  [default: --port + 1]",
)
@click.option(
    "--router-mode",
    type=click.Choice(_ROUTER_MODES),
    help="How the router chooses a replica (default: kv for several, by prefix).",
)
@click.option(
    "--migration-limit",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often a request may go on at another replica when its own dies.",
)
@click.option(
    "--baseline-replica",
    is_flag=True,
    help="Serve the model without its drafter, too, as NAME-no-drafter on the last of --gpus: the page compares them.",
)
@click.option("--no-ui", is_flag=True, help="Leave out the page for browsers at GET /.")
@_MODEL
@runtime_options()
def serve(engine_dir: Path, **options: Any) -> None:
    """Start a front end and its workers, and keep them running until Ctrl-C.

    The front end is NVIDIA Dynamo's: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /metrics and
    /health. GET / is a page to try the model in a browser, which shows its drafts. Everything but --host listens on
    loopback. A worker that dies is started again; the requests that it had fail, unless --migration-limit lets others
    take them over.
    """
    from dflash_trt.servers.dynamo.settings import card_source, check_package, has_chat_template

    check_package()
    service, engine = _service(engine_dir, options)
    _check_ports(service)
    from dflash_trt.servers.dynamo.supervisor import Supervisor

    with Supervisor(service, lambda line: click.echo(line, err=True)) as supervisor:
        supervisor.wait_until_ready()
        _print_ready(service, has_template=has_chat_template(card_source(engine)))
        supervisor.watch()


@click.command(
    cls=LongCommand,
    common="host namespace discovery_backend request_plane event_plane role model_name tool_call_parser "
    "reasoning_parser draft_length device kv_cache_bytes max_queue_len",
    short_help="Serve an engine in a larger Dynamo deployment.",
    epilog=examples("dflash-trt worker engine --host 10.0.0.2 --namespace production"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Address of this machine that the front end reaches; the worker listens there. etcd needs it.",
)
@click.option("--namespace", default="dynamo", show_default=True, help="Dynamo namespace of the deployment.")
@click.option(
    "--discovery-backend",
    type=click.Choice(("etcd", "kubernetes", "file")),
    default="etcd",
    show_default=True,
    help="Registry of workers; file needs DYN_FILE_KV, a directory shared with the front end.",
)
@click.option(
    "--request-plane",
    type=click.Choice(("tcp", "nats")),
    default="tcp",
    show_default=True,
    help="Request transport; must match the front end's.",
)
@click.option(
    "--event-plane",
    type=click.Choice(("zmq", "nats")),
    default="zmq",
    show_default=True,
    help="How the router is told of the prefix cache; as the front end's.",
)
@click.option(
    "--role",
    type=click.Choice(("both", "prefill", "decode")),
    default="both",
    show_default=True,
    help="Part of each request: prefill computes prompts for decode workers, which get them by --transfer-backend.",
)
@_PROMPTS_APART
@_MODEL
@runtime_options()
@click.pass_context
def worker(context: click.Context, /, engine_dir: Path, **options: Any) -> None:
    """Serve one engine for a front end of NVIDIA Dynamo that runs elsewhere, until a signal.

    ETCD_ENDPOINTS and NATS_SERVER are the addresses of the registry and of NATS. Dynamo's other variables
    (DYN_SYSTEM_PORT, DYN_SYSTEM_HOST, DYN_TCP_RPC_PORT, ...) set single ports and addresses.
    """
    from dflash_trt.servers.dynamo.settings import check_package
    from dflash_trt.servers.dynamo.worker_address import host_of_worker, notices

    check_package()
    settings, _ = _settings(engine_dir, options, roles={options["role"]}, needed="--role")
    settings = settings.model_copy(update={"host": host_of_worker(settings, os.environ)})
    for line in notices(settings, os.environ):
        click.echo(line, err=True)
    from dflash_trt.servers.dynamo.contract import run_worker

    code = run_worker(settings)
    if code == ExitCode.DONE:  # a signal ends the process without coming back here
        expected, found = "one that lasts until a signal", "an expired one, as after a time without a network"
        hint = "Start the worker again, as systemd does with Restart=always."
        raise DFlashError.about("registration", expected=expected, found=found, hint=hint)
    context.exit(code)


def _service(engine_dir: Path, options: dict[str, Any]) -> "tuple[Service, EngineDir]":
    from dflash_trt.servers.dynamo.roles import check_transfers
    from dflash_trt.servers.dynamo.settings import page_settings
    from dflash_trt.servers.dynamo.supervisor import Service

    replicas, gpus = options.pop("replicas"), options.pop("gpus")
    host, port, router_mode = options.pop("host"), options.pop("port"), options.pop("router_mode")
    migration_limit, num_prefill = options.pop("migration_limit"), options.pop("prefill_workers")
    metrics_port, has_page = options.pop("metrics_port") or port + 1, not options.pop("no_ui")
    has_baseline = options.pop("baseline_replica")
    if replicas is not None and gpus is not None:
        raise ConfigError("--replicas and --gpus are mutually exclusive")
    roles: set[Role] = {"prefill", "decode"} if num_prefill else {"both"}
    settings, engine = _settings(engine_dir, options, roles=roles, needed="--prefill-workers")
    nnodes = settings.runtime.nnodes
    groups = _gpu_groups(gpus, engine.manifest.pretrained_config.mapping.world_size // nnodes)
    num_replicas = len(groups) - has_baseline if groups else replicas or 1 + num_prefill
    num_workers, baseline = num_replicas + has_baseline, None
    if has_baseline:
        baseline = f"{settings.model_name}-no-drafter"
        _check_baseline(settings, engine, num_replicas)
    if nnodes > 1 and num_workers > 1:
        hint = "Start a worker for each, with a --master-port of its own: see `dflash-trt worker`."
        expected = f"one replica, which has {nnodes} nodes"
        raise ConfigError.about("--nnodes", expected=expected, found=str(num_workers), hint=hint)
    if num_prefill >= num_replicas:
        expected, found = f"more than {num_prefill} replicas, the others decode", str(num_replicas)
        raise ConfigError.about("--prefill-workers", expected=expected, found=found, hint="Raise --replicas or --gpus.")
    if num_prefill and settings.runtime.host_cache_bytes is None:
        hint = "Prompts go from worker to worker through host memory."
        raise ConfigError.about("--prefill-workers", expected="--host-cache-bytes as well", found="none", hint=hint)
    if num_prefill:
        check_transfers(settings.runtime, settings.transfer_backend)
    if metrics_port + num_workers > _MAX_METRICS_PORT + 1:
        expected, found = f"ports up to {_MAX_METRICS_PORT}", str(metrics_port + num_workers - 1)
        raise ConfigError.about("metrics of the replicas", expected=expected, found=found, hint="Pass --metrics-port.")
    mode = router_mode or ("kv" if num_replicas > 1 else "round-robin")
    service = Service(
        worker=settings.model_copy(update={"num_replicas": num_workers}),
        num_replicas=num_replicas,
        num_prefill_workers=num_prefill,
        baseline=baseline,
        gpus=groups,
        host=host,
        port=port,
        first_metrics_port=metrics_port,
        frontend_arguments=("--router-mode", mode, "--migration-limit", str(migration_limit)),
        page=page_settings(engine, settings).model_copy(update={"baseline": baseline}) if has_page else None,
    )
    return service, engine


def _check_baseline(settings: "WorkerSettings", engine: "EngineDir", num_replicas: int) -> None:
    """Raises ConfigError: there is nothing to compare."""
    if engine.manifest.draft is None or not settings.runtime.use_drafter:
        found = "--no-drafter" if engine.manifest.draft is not None else "an engine without one"
        raise ConfigError.about("--baseline-replica", expected="a drafter to compare with", found=found)
    if num_replicas < 1:
        expected, hint = "GPUs for two replicas", "Name more with --gpus."
        raise ConfigError.about("--baseline-replica", expected=expected, found="for one", hint=hint)


def _settings(
    engine_dir: Path, options: dict[str, Any], *, roles: "Set[Role]", needed: str
) -> "tuple[WorkerSettings, EngineDir]":
    """`roles` are those of the command's workers; `needed` gives them other ones."""
    of_roles = {"prefill_min_tokens": {"prefill"}, "transfer_backend": {"prefill", "decode"}}
    for name, takers in (of_roles | {"transfer_bytes": {"prefill"}}).items():
        flag = _PROMPTS_APART.flags[name]
        if options[name] is None:
            del options[name]
        elif not takers & roles:
            expected = f"{needed} as well" if needed != "--role" else f"{needed} {' or '.join(sorted(takers))} as well"
            raise ConfigError.about(flag, expected=expected, found="none")
        elif name == "transfer_bytes" and options.get("transfer_backend") != "nixl":
            raise ConfigError.about(flag, expected="--transfer-backend nixl as well", found="none")
    runtime = runtime_from_options(options)
    parsers = {name: options[name] for name in ("tool_call_parser", "reasoning_parser")}
    if any(parsers.values()):  # Dynamo's import takes a second
        from dflash_trt.servers.dynamo.contract import check_parsers

        check_parsers(**parsers)
    return worker_settings(engine_dir, runtime, **options)


def worker_settings(
    engine_dir: Path, runtime: "RuntimeConfig", *, model_name: str | None = None, **options: Any
) -> "tuple[WorkerSettings, EngineDir]":
    """Raises ConfigError or EngineDirError before anything starts. `options` are further settings fields."""
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.opening import check_drafting, check_nodes
    from dflash_trt.servers.dynamo.roles import runtime_of
    from dflash_trt.servers.dynamo.settings import WorkerSettings, card_source

    engine = EngineDir.open(engine_dir)
    card_source(engine)
    check_drafting(engine, runtime)
    check_nodes(engine, runtime)
    runtime_of(options.get("role", "both"), runtime, options.get("transfer_backend", "files"))
    name = model_name or engine_dir.resolve().name
    return WorkerSettings(engine_dir=engine_dir.resolve(), runtime=runtime, model_name=name, **options), engine


def _gpu_groups(text: str | None, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each replica."""
    if text is None:
        return ()
    expected = f"distinct indices, {num_ranks} for each replica" if num_ranks > 1 else "distinct indices"
    indices = [int(part) for part in text.split(",")] if all(map(str.isdecimal, text.split(","))) else []
    if not indices or len(set(indices)) != len(indices) or len(indices) % num_ranks:
        raise ConfigError.about("--gpus", expected=expected, found=text, hint="Write --gpus 0,1 for example.")
    return tuple(tuple(indices[first : first + num_ranks]) for first in range(0, len(indices), num_ranks))


def _check_ports(service: "Service") -> None:
    """Raises ConfigError where another process listens."""
    from dflash_trt.servers.dynamo.environment import LOOPBACK

    places = [(service.host, service.port)]
    places += [(LOOPBACK, service.metrics_port(index)) for index in range(service.num_workers)]
    for host, port in places:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                hint = "Choose others with --port and --host."
                raise ConfigError.about(
                    "--port", expected=f"{host}:{port} free", found=str(error), hint=hint
                ) from error


def _print_ready(service: "Service", *, has_template: bool) -> None:
    """Two lines to copy, and where the metrics are."""
    name, url = service.worker.model_name, service.url
    path, call, prompt = ("chat/completions", "chat.completions", _CHAT) if has_template else (*_TEXT_PATHS, _TEXT)
    body = json.dumps({"model": name, **prompt, "max_tokens": 64})
    arguments = ", ".join(f"{key}={value!r}" for key, value in {"model": name, **prompt}.items())
    metrics = " ".join(f"http://127.0.0.1:{service.metrics_port(i)}/metrics" for i in range(service.num_workers))
    click.echo(f"serving {name} at {url}/v1 with {service.num_replicas} replica(s)")
    click.echo(f"  curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'")
    click.echo(f"  openai.OpenAI(base_url={url + '/v1'!r}, api_key='none').{call}.create({arguments})")
    click.echo(f"  metrics: {url}/metrics {metrics}")
    if service.page is not None:
        click.echo(f"  in a browser: {url}")
