"""`dflash-trt inspect`: what an engine is, checked and described without loading it."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.help_text import PATH, examples
from dflash_trt.core.chat_template_options import shown_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from dflash_trt.core.model.decoder import TargetSpec
    from dflash_trt.core.model.draft import DraftSpec
    from dflash_trt.core.state_spec import LayerState
    from dflash_trt.engine_dir import EngineDir, PretrainedConfig

_LAYER_SIZES = (
    ("feed_forward", "intermediate_size"),
    ("mixer", "num_heads"),
    ("mixer", "num_kv_heads"),
    ("mixer", "head_dim"),
)


@click.command(
    short_help="Check an engine directory and describe it.",
    epilog=examples("dflash-trt inspect engine --verify-hashes"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option("--verify-hashes", is_flag=True, help="Hash the large files too, not only those below 256 MiB.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(engine_dir: Path, verify_hashes: bool, as_json: bool) -> None:
    """Check an engine directory and describe both models, the limits, the files and where they came from."""
    from dflash_trt.engine_dir import EngineDir

    engine = EngineDir.open(engine_dir, verify_hashes=verify_hashes)
    report = describe(engine, verifies_hashes=verify_hashes)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def describe(engine: "EngineDir", *, verifies_hashes: bool) -> dict[str, Any]:
    """Everything `inspect` says, as plain JSON types."""
    from dflash_trt.engine_dir import is_hashed

    manifest = engine.manifest
    config = manifest.pretrained_config
    return {
        "engine_dir": str(engine.path),
        "version": manifest.version,
        "backend": manifest.backend,
        "dtype": config.dtype,
        "quantization": None if config.quantization is None else config.quantization.model_dump(mode="json"),
        "tensorrt": None if manifest.tensorrt is None else manifest.tensorrt.model_dump(mode="json"),
        "tensorrt_llm": None if manifest.tensorrt_llm is None else manifest.tensorrt_llm.model_dump(mode="json"),
        "mapping": config.mapping.model_dump(exclude={"rank"}),
        **describe_models(config),
        "build_config": manifest.build_config.model_dump(),
        "kv_pages_here": _page_plan(engine),
        "kernels": _kernels(engine),
        "has_tokenizer": engine.tokenizer_path is not None,
        "chat_template_options": manifest.chat_template_options,
        "files": {
            name: {**entry.model_dump(), "is_hash_verified": verifies_hashes or is_hashed(entry)}
            for name, entry in manifest.files.items()
        },
        "provenance": engine.provenance(),
    }


def describe_models(config: "PretrainedConfig") -> dict[str, Any]:
    """Both models: their specs, weights and pages; "draft" is None without a drafter."""
    weights, states = _weights_bytes(config), config.states()
    target = _decoder(config.target) | weights["target"] | _pages(states.target)
    if config.draft is None:
        return {"target": target, "draft": None}
    draft = _decoder(config.draft) | weights["draft"] | _pages(states.draft)
    return {"target": target, "draft": draft | {"max_draft_len": config.draft.max_draft_len}}


def _pages(states: "Sequence[LayerState]") -> dict[str, Any]:
    """Pages of one model, per rank."""
    from dflash_trt.core.state_spec import paged

    return {
        "kv_format": next(("fp8" if kv.scales is not None else kv.dtype for kv in paged(states)), None),
        "kv_bytes_per_token": sum(state.bytes_per_token for state in states),
        "state_bytes_per_request": sum(state.bytes_per_slot for state in states),
    }


def _page_plan(engine: "EngineDir") -> str:
    """Pages that `run` would get on this machine now, or the error."""
    from dflash_trt.backends.page_budget import plan_engine_pages
    from dflash_trt.core.errors import CapacityError
    from dflash_trt.core.runtime_config import RuntimeConfig

    if engine.manifest.backend == "tensorrt_llm":
        return "TensorRT-LLM's own"
    try:
        return str(plan_engine_pages(engine.manifest, RuntimeConfig(), has_groups=engine.manifest.has_page_groups))
    except CapacityError as error:
        return str(error)


def _kernels(engine: "EngineDir") -> dict[str, Any]:
    """Origin of the compiled kernels by architecture; raises EngineDirError if a file of them was changed."""
    archives = {architecture: engine.kernels(architecture) for architecture in engine.kernel_architectures}
    return {name: asdict(archive.index) for name, archive in archives.items() if archive is not None}


def _decoder(spec: "TargetSpec | DraftSpec") -> dict[str, Any]:
    """The spec and sizes that follow from it, of the whole model."""
    return {
        **spec.model_dump(mode="json"),
        "num_layers": spec.num_layers,
        "num_parameters": sum(math.prod(weight.shape) for weight in spec.weights().values() if not weight.is_integer),
    }


def _weights_bytes(config: "PretrainedConfig") -> dict[str, dict[str, Any]]:
    """Bytes of each model's tensors on all ranks. Opening has compared the files' headers."""
    from dflash_trt.engine_dir.manifest import rank_weight_bytes, weight_bytes_fields

    of_rank = rank_weight_bytes(config)
    return {model: weight_bytes_fields(of_rank[model], num_ranks=config.mapping.world_size) for model in of_rank}


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # paths are not markup
    click.echo(
        f"engine {report['engine_dir']}: version {report['version']}, backend {report['backend']}, {report['dtype']}, "
        f"{_ranks_words(report['mapping'])}, "
        f"{'with' if report['has_tokenizer'] else 'without'} tokenizer"
    )
    console.print(models_table(report))
    if report["draft"]:
        console.print(_draft_table(report["draft"]))
        taps = ", ".join(map(str, report["draft"]["target_layer_ids"]))
        click.echo(
            f"{report['draft']['algorithm']} taps the output of target layers {taps} (0-based) and drafts "
            f"K = {report['draft']['max_draft_len']} tokens per step at most"
        )
    limits = ", ".join(f"{name} {value}" for name, value in report["build_config"].items())
    click.echo(f"limits: {limits}")
    if report["chat_template_options"]:
        click.echo(f"chat template: {shown_options(report['chat_template_options'])}")
    if report["tensorrt"]:
        _print_tensorrt(console, report["tensorrt"])
    if report["tensorrt_llm"]:
        click.echo(f"TensorRT-LLM {report['tensorrt_llm']['versions']}, opened as llm_args.yaml says")
    for architecture, index in report["kernels"].items():
        console.print(
            f"{index['num_kernels']} kernels for {architecture}, compiled by Triton {index['triton_version']}"
        )
    click.echo(f"K/V on this machine: {report['kv_pages_here']}")
    console.print(_files_table(report["files"]))
    _print_provenance(report["provenance"])


def _ranks_words(mapping: dict[str, int]) -> str:
    sizes = {name: size for name, size in mapping.items() if name.endswith("_size")}
    num_ranks = sizes.pop("world_size")
    divided = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"world_size {num_ranks} ({divided})" if divided else f"world_size {num_ranks}"


def models_table(report: dict[str, Any]) -> "Table":
    from rich.filesize import decimal
    from rich.table import Table

    models = [report["target"], *([report["draft"]] if report["draft"] else [])]
    table = Table("", "target", *(["drafter"] if report["draft"] else []))
    vocab_sizes = [report["target"]["vocab_size"]]
    if report["draft"]:
        vocab_sizes.append(report["draft"]["draft_vocab_size"] or "the target's")
    table.add_row("family", *(model.get("family", model.get("source_format")) for model in models))
    for name in ("num_layers", "hidden_size"):
        table.add_row(name, *(str(model[name]) for model in models))
    for part, name in _LAYER_SIZES:
        found = [[of_layer[name] for of_layer in _parts(model, part, name)] for model in models]
        if any(found):
            table.add_row(name, *map(_each_once, found))
    for name, words in _target_features(report["target"]).items():
        table.add_row(name, words, *(["none"] if report["draft"] else []))
    experts = [_expert_words(model) for model in models]
    if any(experts):
        table.add_row("experts", *(words or "none" for words in experts))
    table.add_row("vocabulary", *map(str, vocab_sizes))
    by_model = ([mixer["rope"] for mixer in _parts(model, "mixer", "rope")] for model in models)
    ropes = [_each_once(f"{rope['scaling']}, theta {rope['theta']:g}" for rope in of_model) for of_model in by_model]
    table.add_row("rope", *ropes)
    table.add_row("max_position_embeddings", *(str(model["max_position_embeddings"]) for model in models))
    table.add_row("parameters", *(f"{model['num_parameters']:,}" for model in models))
    has_ranks = report["mapping"]["world_size"] > 1
    all_ranks, each_rank = (" of all ranks", " on each rank") if has_ranks else ("", "")
    table.add_row(f"weights{all_ranks}", *(decimal(model["weights_bytes"]) for model in models))
    for name in dict.fromkeys(name for model in models for name in model["weights_bytes_by_format"]):
        table.add_row(f"  in {name}", *(decimal(model["weights_bytes_by_format"].get(name, 0)) for model in models))
    table.add_row("K/V pages", *(model["kv_format"] for model in models))
    table.add_row(f"K/V bytes per token{each_rank}", *(f"{model['kv_bytes_per_token']:,}" for model in models))
    return table


def _target_features(target: dict[str, Any]) -> dict[str, str]:
    """Rows that only some targets have."""
    rows = {}
    mixers = [layer["mixer"] for layer in target["layers"]]
    windows = [mixer["mask"]["window"] for mixer in _parts(target, "mixer", "mask")]
    delta_nets = [mixer for mixer in mixers if mixer["kind"] == "gated_delta"]
    latents = [mixer for mixer in mixers if mixer["kind"] == "mla"]
    if delta_nets:
        net = delta_nets[0]
        rows["gated delta nets"] = f"{len(delta_nets)} of {target['num_layers']} layers"
        keys, values = (f"{net[f'num_{kind}_heads']} x {net[f'{kind}_head_dim']}" for kind in ("key", "value"))
        rows["  heads of keys, of values"] = f"{keys}, {values}"
        rows["  bytes of state per request"] = f"{target['state_bytes_per_request']:,}"
    if latents:
        rows["latent attention"] = f"{latents[0]['latent_dim']} + {latents[0]['rope_dim']} features a token"
    for window in sorted({window for window in windows if window is not None}):
        rows[f"window of {window} tokens"] = f"{windows.count(window)} of {target['num_layers']} layers"
    if any(mixer["has_sinks"] for mixer in _parts(target, "mixer", "has_sinks")):
        rows["attention sinks"] = "one per head"
    return rows


def _expert_words(model: dict[str, Any]) -> str | None:
    experts = [layer["feed_forward"] for layer in model["layers"] if layer["feed_forward"]["kind"] == "moe"]
    if not experts:
        return None
    moe = experts[0]
    return (
        f"{moe['num_experts']} of {moe['intermediate_size']} features, {moe['num_experts_per_token']} per token, "
        f"in {len(experts)} of {model['num_layers']} layers"
    )


def _draft_table(draft: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("drafter layer", "attention", "window")
    for i, layer in enumerate(draft["layers"]):
        mask = layer["mixer"]["mask"]
        table.add_row(str(i), "causal" if mask["is_causal"] else "not causal", _window_words(mask))
    return table


def _each_once(values: "Iterable[Any]") -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _parts(model: dict[str, Any], part: str, name: str) -> list[dict[str, Any]]:
    """Mixers, or feed-forwards, of the layers whose kind has a field of this name."""
    return [layer[part] for layer in model["layers"] if name in layer[part]]


def _window_words(mask: dict[str, Any]) -> str:
    if mask["window"] is None:
        return "full"
    return f"{mask['window']} tokens" + (" before the anchor" if mask["is_window_anchored"] else "")


def _files_table(files: dict[str, Any]) -> "Table":
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("file", "size", "verified")
    for name, entry in files.items():
        checked = "size and sha256" if entry["is_hash_verified"] else "size (--verify-hashes for sha256)"
        table.add_row(name, decimal(entry["size_bytes"]), checked)
    return table


def _print_tensorrt(console: "Console", record: dict[str, Any]) -> None:
    from dflash_trt.cli.check import profiles_table

    click.echo(
        f"TensorRT {record['tensorrt_version']}, for {record['gpu_name']} (compute capability "
        f"{record['compute_capability']}), {record['num_layers']} layers, "
        f"compiled in {record['build_time_s']:.1f} s; flags {', '.join(record['flags']) or 'none'}"
    )
    console.print(profiles_table({profile["name"]: profile["axes"] for profile in record["profiles"]}))


def _print_provenance(provenance: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    click.echo(f"built by: {' '.join(provenance['command'])}")
    click.echo(f"with: {versions}; in {provenance['build_time_s']:.1f} s")
    for role, path in provenance["checkpoints"].items():
        source = provenance["hub"].get(role)
        click.echo(
            f"{role}: {path}" if source is None else f"{role}: {source['name']} at {source['commit']}, in {path}"
        )
    for note in provenance["notes"]:
        click.echo(f"note: {note}")
