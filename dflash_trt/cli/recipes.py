"""`dflash-trt recipes`: build configurations of the package, and which of them fit this machine."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.help_text import examples
from dflash_trt.cli.other_engines import Group
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.known_pairs import HubName, build_command

if TYPE_CHECKING:
    from dflash_trt.backends.machine import Machine
    from dflash_trt.recipes import Recipe

_GIB = 2**30


@click.group(
    cls=Group,
    invoke_without_command=True,
    short_help="List build configurations that come with the package.",
    epilog=examples("dflash-trt recipes", "dflash-trt recipes --json"),
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def recipes(context: click.Context, as_json: bool) -> None:
    """List build configurations of known pairs, and which of them fit this machine.

    `dflash-trt build RECIPE -o DIR` builds one. Weights count target and drafter; `fits` compares them with the memory
    of a GPU (without one: of the host) for each rank, before any K/V pages.
    """
    if context.invoked_subcommand is not None:
        return
    from dflash_trt.backends.machine import this_machine
    from dflash_trt.recipes import recipes as all_recipes

    machine = this_machine()
    if as_json:
        rows = [_describe(recipe, machine) for recipe in all_recipes()]
        click.echo(json.dumps({"machine": str(machine), "recipes": rows}, indent=2))
    else:
        _print(all_recipes(), machine)


@recipes.command(
    short_help="Print the build configuration of a recipe.", epilog=examples("dflash-trt recipes show demo")
)
@click.argument("name", metavar="RECIPE")
def show(name: str) -> None:
    """Print the YAML of a recipe, with what it is for: to be kept as a file, changed, and passed to `build`.

    The paths of `demo` are relative to the recipe's own directory.
    """
    from dflash_trt.recipes import recipes as all_recipes

    known = {recipe.name: recipe for recipe in all_recipes()}
    if name not in known:
        nearest = nearest_name(name, list(known))
        hint = f"Did you mean '{nearest}'?" if nearest else "`dflash-trt recipes` lists them."
        raise ConfigError.about("RECIPE", expected="a recipe's name", found=name, hint=hint)
    click.echo(f"# {known[name].path}: {_facts(known[name], _config_of(known[name]))}")
    click.echo(known[name].path.read_text("utf-8"), nl=False)


def config_path(given: str) -> Path:
    """The recipe of this name, even if a file has the name too; else the path itself.

    Raises:
        ConfigError: neither.
    """
    from dflash_trt.engine_dir.opening import is_engine_dir
    from dflash_trt.recipes import recipe_path
    from dflash_trt.recipes import recipes as all_recipes

    recipe, path = recipe_path(given), Path(given)
    if recipe is not None:
        return recipe
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_dir()):
        return path
    nearest = nearest_name(given, [recipe.name for recipe in all_recipes()])
    if is_engine_dir(path):
        hint = f"It is an engine already: dflash-trt run {shlex.quote(given)}"
    elif path.is_dir() or (nearest is None and HubName.parse(given) is not None):
        hint = f"Pass a checkpoint as --target: {build_command(given)}"
    else:
        hint = f"Did you mean '{nearest}'?" if nearest else "`dflash-trt recipes` lists recipes."
    found = "a directory" if path.is_dir() else "neither"
    raise ConfigError.about(given, expected="a YAML file or a recipe's name", found=found, hint=hint)


def fits(recipe: "Recipe", config: BuildConfig, machine: "Machine") -> str:
    """Judge a recipe by its weights alone: "yes", or "no" with the reason."""
    from dflash_trt.formats.registry import weight_formats

    known = weight_formats().get(recipe.format)
    first = None if known is None else known.first_capability
    if machine.capability is not None:
        if first is not None and machine.capability < first:
            return f"no, {recipe.format} needs compute capability {first[0]}.{first[1]} or later"
        if config.tp_size > machine.num_devices:
            return f"no, {config.tp_size} ranks for {machine.num_devices} GPUs"
    num_ranks = 1 if machine.capability is None else config.tp_size
    memory_gib = machine.memory_bytes / _GIB
    if recipe.weights_gib / num_ranks >= memory_gib:
        return f"no, {memory_gib:.1f} GiB of memory"
    return "yes"


def _config_of(recipe: "Recipe") -> BuildConfig:
    from dflash_trt.cli.yaml_file import read_yaml

    return build_config_from(read_yaml(recipe.path), source=recipe.name)


def _facts(recipe: "Recipe", config: BuildConfig) -> str:
    ranks = f"{config.tp_size} rank{'s' if config.tp_size > 1 else ''}"
    devices = " or ".join(recipe.gpus) or "any device"
    return f"{recipe.format}, {ranks} on {devices}, {recipe.weights_gib:g} GiB of weights"


def _describe(recipe: "Recipe", machine: "Machine") -> dict[str, Any]:
    config = _config_of(recipe)
    return {
        "name": recipe.name,
        "target": config.target,
        "drafter": config.drafter,
        "format": recipe.format,
        "gpus": list(recipe.gpus),
        "tp_size": config.tp_size,
        "weights_gib": recipe.weights_gib,
        "fits": fits(recipe, config, machine),
        "path": str(recipe.path),
    }


def _print(found: "Sequence[Recipe]", machine: "Machine") -> None:
    """Two lines each, which fit a terminal."""
    width = max(len(recipe.name) for recipe in found) + 2
    for recipe in found:
        config = _config_of(recipe)
        click.echo(f"{recipe.name:{width}}{config.target} with {config.drafter}")
        click.echo(f"{'':{width}}{_facts(recipe, config)}; fits: {fits(recipe, config, machine)}")
    click.echo(f"this machine: {machine}")
    click.echo("build one: dflash-trt build RECIPE -o DIR; print its file: dflash-trt recipes show RECIPE")
