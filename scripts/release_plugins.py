"""Makes plugin libraries of published pairs, as files for a release: `python -m scripts.release_plugins RECIPE...`

One library for each recipe and kind of GPU, in dist/plugins, with SHA256SUMS and index.json. Shapes come from
`scripts/published_shapes.py`, so that no checkpoint and no hub is needed; TensorRT's headers are. A name says what a
library is for: recipe, architecture, TensorRT's version and the start of its SHA-256. It uploads nothing.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from dflash_trt import __version__
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.plugin_build import build_plugin_library, headers_version, tensorrt_headers
from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.recipes import Recipe, recipes
from scripts.published_shapes import DRAFTERS, TARGETS, write_config

ARCHITECTURES = {"H200": "90a", "B300": "103a"}


@dataclass(frozen=True, kw_only=True)
class ReleasedLibrary:
    """A row of index.json."""

    file: str
    recipe: str
    architecture: str
    compute_capability: str
    tensorrt: str
    triton: str
    dflash_trt: str
    platform: str
    num_kernels: int
    size_bytes: int
    sha256: str
    build_core_s: float  # of processor time, less where kernels are cached


def chosen_recipes(names: Sequence[str]) -> list[Recipe]:
    """Raises ConfigError: no recipe of published pairs has such a name."""
    known = {recipe.name: recipe for recipe in recipes() if recipe.gpus}
    unknown = [name for name in names if name not in known]
    if unknown:
        hint = f"Choose among {', '.join(known)}."
        raise ConfigError.about("recipes", expected="names of recipes", found=", ".join(unknown), hint=hint)
    return [known[name] for name in names] or list(known.values())


def architectures_of(recipe: Recipe, asked: Sequence[str]) -> Iterator[str]:
    """Of the GPUs that the recipe is for, and only those that were asked for, if any were."""
    found = (ARCHITECTURES[gpu] for gpu in recipe.gpus)
    yield from (architecture for architecture in found if not asked or architecture in asked)


def write_build_file(recipe: Recipe, directory: Path) -> Path:
    """The recipe with directories that have config.json alone in the place of the hub's names."""
    fields = read_yaml(recipe.path)
    for part in ("target", "drafter"):
        name = str(fields.get(part, ""))
        if name in TARGETS | DRAFTERS:
            fields[part] = str(write_config(directory, name))
    path = directory / f"{recipe.name}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def make_library(recipe: Recipe, architecture: str, output: Path, *, tensorrt: str) -> ReleasedLibrary:
    """Compile a library and move it to `output` under its name. Raises DFlashError."""
    started_s = _children_s()
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--config", str(write_build_file(recipe, Path(scratch))), "--arch", architecture]
        library = build_plugin_library(options, Path(scratch) / "plugin")
        if library is None:
            hint = "The kernel compiler has said why."
            raise ConfigError.about(f"recipe {recipe.name}", expected="a library", found="none", hint=hint)
        manifest = json.loads((Path(scratch) / "plugin/kernels/manifest.json").read_text())
        sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
        name = f"{library.stem}-{recipe.name}-sm_{architecture}-trt{tensorrt}-{sha256[:8]}.so"
        size_bytes = library.stat().st_size
        shutil.move(library, output / name)
    return ReleasedLibrary(
        file=name,
        recipe=recipe.name,
        architecture=f"sm_{architecture}",
        compute_capability=f"{architecture[:-2]}.{architecture[-2]}",
        tensorrt=tensorrt,
        triton=manifest["origin"]["triton"],
        dflash_trt=__version__,
        platform=f"{sys.platform}-{platform.machine()}",
        num_kernels=len(manifest["kernels"]),
        size_bytes=size_bytes,
        sha256=sha256,
        build_core_s=round(_children_s() - started_s, 1),
    )


def _children_s() -> float:
    """Processor time of the compilers that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def write_index(libraries: Sequence[ReleasedLibrary], output: Path) -> None:
    (output / "index.json").write_text(json.dumps([asdict(library) for library in libraries], indent=2) + "\n")
    (output / "SHA256SUMS").write_text("".join(f"{library.sha256}  {library.file}\n" for library in libraries))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="names of `dflash-trt recipes` (default: all)")
    parser.add_argument("--arch", default="", help="architectures, such as 90a,103a (default: those of each recipe)")
    parser.add_argument("-o", "--output", type=Path, default=Path("dist/plugins"))
    parser.add_argument("--dry-run", action="store_true", help="say what would be made, and make nothing")
    told = parser.parse_args(words)
    asked = list(filter(None, told.arch.split(",")))
    try:
        plan = [(recipe, name) for recipe in chosen_recipes(told.recipes) for name in architectures_of(recipe, asked)]
        if told.dry_run:
            print("\n".join(f"{recipe.name} sm_{architecture}" for recipe, architecture in plan))
            return 0
        tensorrt = ".".join(headers_version(tensorrt_headers()))
        told.output.mkdir(parents=True, exist_ok=True)
        made = []
        for recipe, architecture in plan:
            made.append(make_library(recipe, architecture, told.output, tensorrt=tensorrt))
            print(f"{made[-1].file}: {made[-1].size_bytes / 1e6:.1f} MB, {made[-1].build_core_s:.0f} core-seconds")
            write_index(made, told.output)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
