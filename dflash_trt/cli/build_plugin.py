"""`dflash-trt build-plugin`: the plugin library that TensorRT engines need, compiled on this machine."""

import sys
from pathlib import Path

import click

from dflash_trt.cli.help_text import COUNT, PATH, examples
from dflash_trt.core.exit_codes import ExitCode


@click.command(
    "build-plugin",
    epilog=examples("dflash-trt build-plugin --engine qwen3-8b", "dflash-trt build-plugin --config build.yaml"),
)
@click.option("--engine", type=click.Path(), help="The kernels of this engine, built with any backend.")
@click.option("--config", "config_file", type=click.Path(), help="Those of the engine that this file builds.")
@click.option("--deterministic", is_flag=True, help="With --engine: of its pair, built with --deterministic.")
@click.option(
    "--arch", help="GPUs to compile for, such as 90a,100a,103a.  [default: that of the engine's plans, or all of these]"
)
@click.option("--jobs", type=COUNT, help="Processes that compile.  [default: one per core]")
@click.option(
    "-o", "--output", type=PATH, default=Path("plugin"), show_default=True, help="Directory to write the library to."
)
@click.option("--kernels-only", is_flag=True, help="Without TensorRT and its headers: the kernels and a C interface.")
@click.argument("kernels", nargs=-1, type=click.UNPROCESSED)
def build_plugin(
    engine: str | None,
    config_file: str | None,
    deterministic: bool,
    arch: str | None,
    jobs: int | None,
    output: Path,
    kernels_only: bool,
    kernels: tuple[str, ...],
) -> None:
    """Compile the plugin library of a TensorRT engine: minutes, without a GPU.

    Needs cmake, ninja, a C++ compiler, Triton (the extra `kernels`) and the headers of TensorRT 11. Compiled kernels
    are kept for later builds. KERNELS, after `--`, are options of the kernel compiler itself; `-- --help` lists them.
    """
    from dflash_trt.compile.plugin_build import build_plugin_library

    named = {"--engine": engine, "--config": config_file, "--arch": arch, "--jobs": jobs}
    options = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    options += ["--deterministic"] if deterministic else []
    library = build_plugin_library([*options, *kernels], output, kernels_only=kernels_only)
    if library is None:
        sys.exit(ExitCode.USAGE)
    click.echo(library)
