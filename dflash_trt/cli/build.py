"""`dflash-trt build`: reads the YAML and the flags, shows progress, prints sizes."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from dflash_trt.cli.check import check
from dflash_trt.cli.help_text import PATH, examples, with_default
from dflash_trt.cli.other_engines import Choice
from dflash_trt.cli.quantization_tables import FLAG_KEYS, plan_table, size_table, with_flags
from dflash_trt.cli.recipes import config_path
from dflash_trt.cli.time_left import StageLines
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.core.chat_template_options import options_from_words
from dflash_trt.core.config import MTP, Backend, BuildConfig, CollectiveMode, build_config_from
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.kernel_archive import Architecture
from dflash_trt.core.known_pairs import HubName

if TYPE_CHECKING:
    from dflash_trt.compile.build import BuildProgress, ProgressCallback
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.quantize.plan import QuantizationPlan

_FIELDS = tuple(BuildConfig.model_fields)
_FORMATS = "none, fp8, fp8_w8a16, fp8_block, int4, int8, mxfp4, nvfp4 or nvfp4_w4a16"


def _choice(kind: Any) -> Choice:
    """A choice among the values of a Literal."""
    return Choice(get_args(kind))


def _key(flag: str, help: str, *, type: Any = int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option of a key of the configuration that has a default."""
    return click.option(flag, type=type, help=with_default(help, flag.removeprefix("--").replace("-", "_")))


class _BuildCommand(click.Command):
    """Reads a bare `--check` as `--check=kinds`: click would take the next argument for its value."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, ["--check=kinds" if word == "--check" else word for word in args])


@click.command(
    cls=_BuildCommand,
    short_help="Build an engine directory from checkpoints.",
    epilog=examples(
        "dflash-trt build --target Qwen/Qwen3-8B -o qwen3-8b",
        "dflash-trt build pair.yaml -o engine --dtype float32 --overwrite",
    ),
)
@click.argument("config_file", metavar="[CONFIG.yaml | RECIPE]", required=False)
@click.option(
    "--target",
    metavar="NAME|DIR",
    help="Model to serve: a name on the Hugging Face hub (OWNER/NAME[@REVISION]) or a directory.",
)
@click.option(
    "--drafter",
    metavar="NAME|DIR|mtp|none",
    help="Its drafter (default: the known one for a name, none for a directory); mtp: the MTP head of the target's own "
    "checkpoint; none: autoregressive decoding.",
)
@click.option(
    "--drafter-override",
    "drafter_overrides",
    metavar="KEY=JSON",
    multiple=True,
    help="Read a key of the drafter's config.json as this value; repeatable.",
)
@click.option("--draft-window", type=int, help="Tokens of context that the drafter sees at most.  [default: its own]")
@click.option(
    "--chat-template-option",
    "chat_template_options",
    metavar="NAME=VALUE",
    multiple=True,
    help="Store an option of the chat template for every conversation, such as enable_thinking=false; repeatable.",
)
@click.option("-o", "--output", type=PATH, help="Engine directory to write.")
@_key("--backend", "Runtime of the engine.", type=_choice(Backend))
@_key(
    "--dtype",
    "Data type of activations and unquantized weights; no float16 with backend torch. On a CPU, K and batch mates "
    "change practically no text.",
    type=_choice(FloatDType),
)
@_key("--max-batch-size", "Requests that run together.")
@click.option(
    "--max-seq-len",
    type=int,
    help="Prompt and output tokens of one request.  [default: as many as the checkpoints allow]",
)
@_key("--max-num-tokens", "Tokens of one step, all requests together.")
@click.option("--max-draft-len", type=int, help="Drafts per request and step.  [default: as many as the drafter makes]")
@_key("--page-size", "Token positions per K/V page.")
@_key("--tp-size", "Ranks that share every layer, a process and a GPU each.")
@_key("--ep-size", "Groups of those ranks that have a part of the experts each.")
@_key("--dcp-size", "Ranks that divide the positions of a request's latents: 1, or as many as --tp-size.")
@click.option(
    "--attention-dp",
    is_flag=True,
    default=None,
    help="Each rank has requests and attention of its own; all ranks share the other weights.",
)
@click.option(
    "--quantization",
    metavar="FORMAT",
    help=f"Weight format of target and drafter: {_FORMATS}.  [default: the checkpoints' format]",
)
@click.option(
    "--drafter-quantization", metavar="FORMAT", help="Another format for the drafter.  [default: --quantization]"
)
@click.option(
    "--head-quantization",
    metavar="FORMAT",
    help="Weight format of the target's head, which most drafters share.  [default: the checkpoint's format]",
)
@click.option(
    "--kv-cache", type=Choice(["fp8", "none"]), help="Format of K/V pages; none is the dtype.  [default: none]"
)
@click.option(
    "--plugin-library",
    type=click.Path(),
    help="Backend tensorrt: the library of plugins, which dflash-trt build-plugin makes.",
)
@_key(
    "--collectives", "Backend tensorrt, several ranks: TensorRT's own layers, or plugins.", type=_choice(CollectiveMode)
)
@click.option(
    "--deterministic",
    is_flag=True,
    default=None,
    help="Backend tensorrt: an engine whose texts depend on their request alone, bit for bit.",
)
@click.option(
    "--compile-for",
    metavar="ARCH,...",
    callback=lambda context, option, value: value and value.split(","),
    help=f"Backend torch: ship kernels compiled for {' or '.join(get_args(Architecture))}, with this Triton.",
)
@click.option(
    "--check",
    "checked_layers",
    type=click.Choice(["kinds", "full"]),
    metavar="[=full]",
    help="Only build the TensorRT network on this CPU and report it: a layer of each kind, or all. Needs no weights.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing engine at the output path.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_obj
def build(
    command: list[str],
    /,
    config_file: str | None,
    output: Path | None,
    checked_layers: Literal["kinds", "full"] | None,
    overwrite: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Build an engine directory from a YAML file or a recipe, from flags, or from both: flags win.

    `dflash-trt recipes` lists recipes, which are YAML files of the package. A recipe's name is one whatever lies in the
    current directory; ./NAME is a file.

    Paths in the YAML are relative to the YAML file. Its `quantization` key takes a format, or a mapping with `target`,
    `drafter`, `lm_head`, `draft_lm_head`, `kv_cache`, `draft_kv_cache`, `overrides` and `calibration`.
    """
    config, base_dir = merged_config(config_file, flags)
    if checked_layers is not None:
        check(config, base_dir, is_full=checked_layers == "full", as_json=as_json)
        return
    if output is None:
        raise ConfigError.about("build", expected="an output", found="none", hint="Pass -o DIR, or --check.")
    from dflash_trt.compile.build import build_engine

    with _progress_shown() as progress:
        engine = build_engine(
            config,
            output,
            base_dir=base_dir,
            overwrite=overwrite,
            command=command,
            progress=progress,
            on_plan=lambda plan: _print_plan(plan, config),
            warn=lambda message: click.echo(message, err=True),
        )
    if as_json:
        click.echo(json.dumps(_summary(engine), indent=2))
    else:
        _print_summary(engine)


def merged_config(given_file: str | None, flags: dict[str, Any]) -> tuple[BuildConfig, Path]:
    """Merge a YAML file and flags; also the directory that paths are relative to.

    Raises:
        ConfigError: a key or a value is wrong, or there is no target.
    """
    words = flags.pop("chat_template_options")
    mappings = {
        "drafter_overrides": _overrides(flags.pop("drafter_overrides")),
        "chat_template_options": options_from_words(words, flag="--chat-template-option"),
    }
    given = {name: value for name, value in flags.items() if value is not None}
    chosen = {name: given.pop(name) for name in FLAG_KEYS if name in given}
    assert given.keys() <= set(_FIELDS)
    if given_file is None:
        if "target" not in given:
            hint = "Pass CONFIG.yaml, a recipe's name, or --target NAME|DIR (and --drafter NAME|DIR|mtp)."
            raise ConfigError.about("build", expected="a configuration", found="none", hint=hint)
        given |= {"quantization": with_flags(None, chosen)} if chosen else {}
        given |= {name: value for name, value in mappings.items() if value}
        return build_config_from(given, source="command line"), Path.cwd()
    config_file = config_path(given_file)
    for name in ("target", "drafter", "plugin_library"):
        is_hub_name = name != "plugin_library" and HubName.parse(given.get(name, "")) is not None
        if name in given and given[name] not in ("none", MTP) and (Path(given[name]).exists() or not is_hub_name):
            given[name] = str(Path(given[name]).absolute())
    fields = read_yaml(config_file)
    if chosen:
        given["quantization"] = with_flags(fields.get("quantization"), chosen)
    for name, value in mappings.items():
        if value:
            of_the_file = fields.get(name)
            given[name] = of_the_file | value if isinstance(of_the_file, dict) else value
    return build_config_from(fields | given, source=str(config_file)), config_file.absolute().parent


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """KEY=JSON each."""
    overrides = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            overrides[name] = json.loads(text)
        except ValueError as error:
            hint = "A string is quoted twice: 'model_type=\"qwen3\"'."
            raise ConfigError.about("--drafter-override", expected="KEY=JSON", found=repr(word), hint=hint) from error
    return overrides


@contextmanager
def _progress_shown() -> Iterator["ProgressCallback"]:
    """A bar on a terminal; elsewhere lines. Always on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_shown()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def show(progress: "BuildProgress") -> None:
            if progress.stage == "downloading":  # with bars of huggingface_hub
                bar.stop()
                return
            bar.start()
            total = progress.total_bytes or progress.total_prompts or progress.total_steps or None
            done = progress.done_bytes or progress.done_prompts or progress.done_steps
            label = f"{progress.stage} (prompts)" if progress.total_prompts else progress.stage
            bar.update(task, description=label, completed=done, total=total)

        yield show


def _lines_shown() -> "ProgressCallback":
    lines = StageLines()

    def show(progress: "BuildProgress") -> None:
        done, total = progress.done_bytes, progress.total_bytes
        counts = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        if not total:
            done, total = progress.done_prompts or progress.done_steps, progress.total_prompts or progress.total_steps
            counts = f"{done} of {total} {'prompts' if progress.total_prompts else 'steps'}"
        lines.show(progress.stage, done, total, counts)

    return show


def _summary(engine: "EngineDir") -> dict[str, Any]:
    provenance, quantization = engine.provenance(), engine.manifest.pretrained_config.quantization
    sizes = {name: (engine.path / name).stat().st_size for name in engine.file_names}
    return {
        "engine_dir": str(engine.path),
        "build_config": engine.manifest.build_config.model_dump(),
        "dtype": engine.manifest.pretrained_config.dtype,
        "file_size_bytes": sizes,
        "total_size_bytes": sum(sizes.values()),
        "build_time_s": provenance["build_time_s"],
        "quantization": None if quantization is None else quantization.model_dump(mode="json"),
        "chat_template_options": engine.manifest.chat_template_options,
        "component_bytes": provenance["component_bytes"],
        "notes": provenance["notes"],
    }


def _print_plan(plan: "QuantizationPlan", config: BuildConfig) -> None:
    """On stderr, before the work; nothing for an engine without any low precision."""
    from rich.console import Console

    if not plan.spec().is_empty:
        Console(stderr=True, markup=False).print(plan_table(plan, config.dtype))


def _print_summary(engine: "EngineDir") -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    summary = _summary(engine)
    table = Table("file", "size", title=f"engine {engine.path}", title_justify="left", show_footer=True)
    for name, size_bytes in summary["file_size_bytes"].items():
        table.add_row(name, decimal(size_bytes))
    table.columns[0].footer = f"total, built in {summary['build_time_s']:.1f} s"
    table.columns[1].footer = decimal(summary["total_size_bytes"])
    console = Console(markup=False)
    console.print(table)
    if summary["quantization"] is not None:
        console.print(size_table(summary["component_bytes"], summary["dtype"]))
    click.echo(", ".join(f"{name} {value}" for name, value in summary["build_config"].items()))
    for note in summary["notes"]:
        click.echo(f"note: {note}")
