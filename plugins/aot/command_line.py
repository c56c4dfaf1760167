"""`python -m plugins.aot OUT`: which kernels to compile, for an engine or by lists, and for which GPUs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.core.config import build_config_from
from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.core.host_resources import available_cores
from plugins.aot.compile import ARCHITECTURES, DEFAULT_ARCHITECTURES
from plugins.aot.engine_kernels import kernels_of_config, kernels_of_engine, local_architecture
from plugins.aot.library import Contents, compile_library, default_cache
from plugins.aot.variants import LibrarySpec


def main() -> int:
    arguments = _arguments()
    try:
        contents, architectures = _contents(arguments)
        manifest = compile_library(
            arguments.out,
            contents,
            arguments.arch or architectures or DEFAULT_ARCHITECTURES,
            num_jobs=arguments.jobs,
            cache=arguments.cache,
            progress=lambda line: _say(sys.stderr, line),
        )
    except DFlashError as error:
        _say(sys.stderr, f"error: {error}")
        return error.exit_code
    _say(sys.stdout, str(manifest))
    return 0


def _contents(arguments: argparse.Namespace) -> tuple[Contents, Sequence[str]]:
    """What is compiled, and the architectures that an engine's plans were built for, if they were."""
    listed = {item.name: getattr(arguments, item.name) for item in fields(LibrarySpec)}
    listed = {name: values for name, values in listed.items() if values is not None}
    ways = {"--engine": arguments.engine, "--config": arguments.config, "--all": arguments.all or None}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1 or (listed and chosen not in ([], ["--all"])) or not (chosen or listed):
        given = [*chosen, *(f"--{name.replace('_', '-')}" for name in listed)]
        raise ConfigError.about(
            "kernels to compile",
            expected="--engine DIR, --config FILE, or --all for every model",
            found=" and ".join(given) or "none of them",
            hint="Lists such as --dtypes and --head-dims make --all smaller; the full library takes 20 minutes.",
        )
    if arguments.deterministic and arguments.engine is None:
        found, hint = "--deterministic alone", "A configuration says it itself: `deterministic: true`."
        raise ConfigError.about("--deterministic", expected="--engine DIR as well", found=found, hint=hint)
    if arguments.engine is not None:
        return kernels_of_engine(arguments.engine, is_deterministic=arguments.deterministic)
    if arguments.config is not None:
        config = build_config_from(read_yaml(arguments.config), source=str(arguments.config))
        return kernels_of_config(config, arguments.config.absolute().parent), local_architecture()
    return LibrarySpec(**listed), ()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m plugins.aot", description="Compile the kernels of the plugin library."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for cubins, manifest and C++")
    parser.add_argument("--engine", type=Path, metavar="DIR", help="kernels of this engine, built with any backend")
    parser.add_argument("--config", type=Path, metavar="FILE", help="kernels of the engine that this file builds")
    parser.add_argument(
        "--deterministic", action="store_true", help="those of an engine of --engine's pair that is built with it"
    )
    parser.add_argument("--all", action="store_true", help="kernels of every model, within the lists below")
    known, every = ", ".join(ARCHITECTURES), ",".join(DEFAULT_ARCHITECTURES)
    parser.add_argument(
        "--arch",
        type=_names,
        metavar="LIST",
        help=f"of {known} (default: that of the engine's plans, or this machine's, or {every})",
    )
    for item in fields(LibrarySpec):
        default: tuple[object, ...] = item.default  # type: ignore[assignment]
        read: Callable[[str], object] = _names if isinstance(default[0], str) else _numbers
        shown = ",".join(str(value) for value in default)
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=read, metavar="LIST", help=f"default: {shown}")
    parser.add_argument("--jobs", type=int, default=available_cores(), help="processes (default: one per core)")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), metavar="DIR", help="compiled kernels (default: %(default)s)"
    )
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(name) for name in _names(text))


def _say(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
