"""`dflash-trt deploy`: what other servers need to serve an engine."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dflash_trt.cli.help_text import COUNT, PATH, Number, OptionSet, examples
from dflash_trt.cli.other_engines import Group
from dflash_trt.cli.runtime_options import flag_of, runtime_from_options, runtime_options
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import NODES, RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.servers.triton.repository import Deployment

_SETTINGS = OptionSet(
    runtime_options(without=["device", *NODES]),  # an instance's device follows from its group: --gpus, or the CPU
    click.option("--default-max-new-tokens", type=int, default=128, show_default=True, help="Default of requests."),
    click.option("--chat", is_flag=True, help="text_input is the user's message in the chat template."),
    click.option("--system", metavar="TEXT", help="System message of these conversations."),
    click.option(
        "--drain-timeout",
        type=Number(),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="Time for running requests to finish at shutdown.",
    ),
    click.option(
        "--accept-parameter",
        "accept_parameters",
        multiple=True,
        metavar="NAME",
        help="A request parameter to let through unread, such as a header the server forwards; repeatable.",
    ),
    click.option("--keep-server", is_flag=True, help="Do not stop the server when the engine has failed for good."),
    click.option("--accept-numpy-2", is_flag=True, help="The server's Python backend is known to take numpy 2."),
)


@click.group(
    cls=Group,
    short_help="Serve an engine through another server.",
    epilog=examples("dflash-trt deploy triton engine -o models"),
)
def deploy() -> None:
    """Write what other servers need to serve an engine."""


@deploy.command(
    short_help="A model repository for Triton Inference Server.",
    epilog=examples(
        "dflash-trt deploy triton engine -o models --environment venv", "dflash-trt deploy triton -o models --check"
    ),
)
@click.argument("engine_dir", metavar="[ENGINE_DIR]", required=False, type=PATH)
@click.option("-o", "--output", "repository", required=True, type=PATH, help="Model repository to write to.")
@click.option("--model-name", help="Name of the model.  [default: dflash]")
@click.option(
    "--environment",
    type=PATH,
    help="Virtual environment of the model (default: the environment of the first python3 on the server's PATH).",
)
@click.option("--copy-engine", is_flag=True, help="Copy the engine into the repository instead of naming its path.")
@click.option(
    "--instances",
    type=int,
    default=1,
    show_default=True,
    help="Engine instances on a CPU; one process per instance and rank.",
)
@click.option(
    "--gpus",
    metavar="0,1,...",
    help="One instance on each of these GPUs, or on each N of them for an engine of N ranks.",
)
@click.option(
    "--batch-dimension", is_flag=True, help="Accept shape [1, 1] for [1], for clients that send a batch dimension."
)
@click.option("--check", "check_only", is_flag=True, help="Only check an existing repository.")
@click.option(
    "--llmapi",
    type=PATH,
    metavar="DIR",
    help="Write TensorRT-LLM's own model instead, from its triton_backend/all_models/llmapi; backend tensorrt_llm.",
)
@_SETTINGS
@click.pass_context
def triton(
    context: click.Context,
    /,
    engine_dir: Path | None,
    repository: Path,
    check_only: bool,
    llmapi: Path | None,
    **options: Any,
) -> None:
    """Write a complete model repository, which tritonserver starts as it is, or check one with --check.

    The model takes the tensor names of TensorRT-LLM's `llmapi` and `tensorrt_llm_bls` models and streams one response
    per verify step; the documentation of deployment lists them. Running the command again with the same options
    changes nothing.
    """
    if check_only:
        _check(engine_dir, repository, options["model_name"])
        return
    if engine_dir is None:
        hint = "Pass the directory that `dflash-trt build` wrote."
        raise ConfigError.about("deploy triton", expected="an ENGINE_DIR", found="none", hint=hint)
    if llmapi is not None:
        _write_llmapi(context, engine_dir, repository, llmapi, options)
        return
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.opening import check_drafting
    from dflash_trt.servers.triton.repository import write_model

    deployment = _deployment(engine_dir, options)
    check_drafting(EngineDir.open(engine_dir), deployment.settings.runtime)  # its load finds out about the rest
    model_dir = write_model(repository, deployment)
    click.echo(f"model {model_dir.name} in {repository}; serve it, to this machine alone, with")
    _print_command(repository, deployment)


def _write_llmapi(
    context: click.Context, engine_dir: Path, repository: Path, source: Path, options: dict[str, Any]
) -> None:
    """Raises ConfigError: options of our own model are given, too."""
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.servers.triton.llmapi import write_llmapi

    flags_of = {str(param.name): param.opts[0] for param in context.command.params}
    told = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    given = [flags_of[name] for name in told if flags_of[name] not in map(flag_of, RuntimeConfig.model_fields)]
    if given:
        flags = ", ".join(given)
        hint = "Leave them out: they are of our own model."
        raise ConfigError.about("--llmapi", expected="no other options but settings", found=flags, hint=hint)
    model_dir = write_llmapi(repository, EngineDir.open(engine_dir), source, runtime_from_options(options))
    click.echo(
        f"model {model_dir.name} in {repository}; serve it, in NVIDIA's container of TensorRT-LLM and Triton, with"
    )
    click.echo(f"    {shlex.join(['tritonserver', '--model-repository', str(repository)])}")


_NODES = OptionSet(
    click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH),
    click.option("--gpus-per-node", type=COUNT, default=8, show_default=True, help="Ranks of each node."),
    click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the server."),
)


@deploy.command(
    short_help="The command that serves an engine on nodes of Slurm.", epilog=examples("dflash-trt deploy slurm engine")
)
@_NODES
@click.option(
    "--image",
    metavar="NAME",
    help="Container image (default for backend tensorrt_llm: NVIDIA's release of it; else none).",
)
def slurm(engine_dir: Path, gpus_per_node: int, port: int, image: str | None) -> None:
    """Print the srun command that serves an engine on several nodes, for a batch script.

    The engine's directory must be at the same path on every node. The first node listens on all its addresses. Engines
    of backend torch and tensorrt need DFLASH_TRT_SECRET in the environment of the script.
    """
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.servers.nodes import nodes_of, slurm_line

    nodes = nodes_of(EngineDir.open(engine_dir), gpus_per_node=gpus_per_node, port=port)
    click.echo(slurm_line(nodes, image=image))


@deploy.command(
    short_help="The command that serves an engine on nodes, by mpirun.",
    epilog=examples("dflash-trt deploy mpi engine --hosts node0,node1"),
)
@_NODES
@click.option("--hosts", required=True, metavar="NAME,...", help="The nodes; the first one listens.")
def mpi(engine_dir: Path, gpus_per_node: int, port: int, hosts: str) -> None:
    """Print the mpirun command that serves an engine of backend tensorrt_llm on several nodes.

    TensorRT-LLM is installed on every node, and the engine's directory is at the same path.
    """
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.servers.nodes import mpi_command, nodes_of

    nodes = nodes_of(EngineDir.open(engine_dir), gpus_per_node=gpus_per_node, port=port)
    click.echo(shlex.join(mpi_command(nodes, hosts.split(","))))


def _print_command(repository: Path, deployment: "Deployment") -> None:
    """A command line to copy, and what its process needs around it."""
    from dflash_trt.servers.triton.command_line import server_options

    click.echo(f"    {shlex.join(['tritonserver', *server_options(repository)])}")
    if deployment.environment is not None:
        click.echo(f"Python environment of the model: {deployment.environment.resolve()}, activated by the server.")
    else:
        click.echo(
            "Python environment of the model: the first python3 on the server's PATH, which needs dflash-trt, PyTorch "
            "and 'numpy<2', and its libpython on LD_LIBRARY_PATH; --environment DIR names another one."
        )
    if deployment.gpus:
        click.echo(
            f"CUDA_VISIBLE_DEVICES: GPUs {', '.join(map(str, deployment.gpus))} are counted among those it lists."
        )
    click.echo("Before other machines may reach it, read Security in the documentation of deployment.")


def _check(engine_dir: Path | None, repository: Path, model_name: str | None) -> None:
    from dflash_trt.servers.triton.repository import VERSION, check_model, model_dirs

    chosen = [repository / model_name] if model_name is not None else model_dirs(repository)
    if not chosen:
        hint = "Write one with `dflash-trt deploy triton ENGINE_DIR -o MODEL_REPOSITORY`."
        raise ConfigError.about(str(repository), expected="a model of dflash-trt", found="none", hint=hint)
    for model_dir in chosen:
        engine_path = check_model(model_dir).engine_path(model_dir / VERSION)
        if engine_dir is not None and engine_path.resolve() != engine_dir.resolve():
            hint = "Write the model again, or leave ENGINE_DIR out."
            raise ConfigError.about(str(model_dir), expected=f"engine {engine_dir}", found=str(engine_path), hint=hint)
        click.echo(f"model {model_dir.name}: as this version of dflash-trt writes it, engine {engine_path}")


def _deployment(engine_dir: Path, options: dict[str, Any]) -> "Deployment":
    from dflash_trt.servers.triton.repository import Deployment
    from dflash_trt.servers.triton.settings import ModelSettings

    settings = ModelSettings(
        engine_dir=str(engine_dir),
        runtime=runtime_from_options(options),
        default_max_tokens=options["default_max_new_tokens"],
        wraps_in_chat=options["chat"],
        system=options["system"],
        drain_timeout_s=options["drain_timeout"],
        accepted_request_parameters=options["accept_parameters"],
        keeps_server=options["keep_server"],
        accepts_numpy_2=options["accept_numpy_2"],
    )
    return Deployment(
        model_name="dflash" if options["model_name"] is None else options["model_name"],
        settings=settings,
        environment=options["environment"],
        num_instances=options["instances"],
        gpus=_gpus(options["gpus"]),
        has_batch_dimension=options["batch_dimension"],
        copies_engine=options["copy_engine"],
    )


def _gpus(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(index) for index in text.split(","))
    except ValueError:
        hint = "Write --gpus 0,1 for example."
        raise ConfigError.about("--gpus", expected="indices, separated by commas", found=text, hint=hint) from None
