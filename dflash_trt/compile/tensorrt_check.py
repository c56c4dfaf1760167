"""`dflash-trt build --check`: the step network through TensorRT-RTX's CPU-only builder, without a GPU.

The real front end sees every kind of layer at full width, with the dtypes, shapes and profiles of the configuration.
The network is the one that `build` ships, but for stubs of plugin nodes (`node_stubs`). Weights are blank memory of the
right shapes, so the plan is thrown away. Sizes come from the headers that the weights will have.
"""

from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dflash_trt.backends.tensorrt.builder import BuiltPlan, PlanOptions, StepsCallback, build_plan
from dflash_trt.backends.tensorrt.host_weights import blank_rope_tables, blank_tensors
from dflash_trt.backends.tensorrt.plan_stream import NoBytes
from dflash_trt.backends.tensorrt.sizes import RankSizes, rank_sizes
from dflash_trt.backends.tensorrt.support import network_spec, unsupported_problems
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.sources import find_checkpoints
from dflash_trt.checkpoint.specs import with_draft_window
from dflash_trt.compile.description import describe_engine
from dflash_trt.compile.layer_kinds import layer_kinds, one_of_each_kind, with_few_embedding_rows
from dflash_trt.compile.quantized import local_capability
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig, TensorHeader, tensor_headers
from dflash_trt.formats.registry import split_quantized

CHECK_CAPABILITY: Final = "SM120"  # the CPU-only builder has neither SM90 nor SM100; this one knows every format


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Report of the built networks and their configuration.

    `built` is by rank; ranks that are left out have the same network as another one. `layer_ids` are the layers that
    were built, by model, out of `num_layers`; `sizes` count all layers.
    """

    built: dict[int, BuiltPlan]
    layer_ids: dict[str, tuple[int, ...]]
    num_layers: dict[str, int]
    sizes: RankSizes
    limits: EngineLimits
    compute_capability: str
    notes: tuple[str, ...]


def check_config(
    config: BuildConfig,
    *,
    base_dir: Path,
    is_full: bool = False,
    progress: StepsCallback = lambda phase, done, total: None,
) -> CheckReport:
    """Build one layer of each kind in `config`, or all if `is_full`, on this CPU, and report it.

    Raises:
        ConfigError: a limit, a foreign config or the number of ranks is wrong.
        CheckpointError: tensors or tokenizers are wrong, if they are there.
        BuildError: TensorRT-RTX is missing, or TensorRT refuses the network.
    """
    if config.backend == "tensorrt_llm":
        hint = "Leave --check out: its checkpoints are checked before they are written."
        raise ConfigError.about("--check", expected="backend torch or tensorrt", found=config.backend, hint=hint)
    sources = find_checkpoints(config, base_dir, needs_tensors=False)
    config, paths = sources.config, sources.paths
    pair = read_pair(paths["target"], paths.get("drafter"), drafter_overrides=config.drafter_overrides)
    pair = with_draft_window(pair, config.draft_window)
    described = describe_engine(
        config,
        pair,
        unsupported=lambda target, draft, quantization, mapping: unsupported_problems(
            target, draft, quantization, config.dtype, mapping
        ),
        subject="backend tensorrt",
        capability=local_capability(),
    )
    pretrained, limits = described.pretrained_config, described.build_config
    linears = pretrained.quantization.linears if pretrained.quantization else {}
    models = [pair.target, *([pair.draft] if pair.draft else [])]
    chosen = pretrained if is_full else one_of_each_kind(pretrained)
    headers = tensor_headers(chosen) if is_full else with_few_embedding_rows(tensor_headers(chosen), chosen.target)
    options = PlanOptions(
        flavor="tensorrt_rtx", compute_capability=CHECK_CAPABILITY, deterministic=config.deterministic
    )
    return CheckReport(
        built={rank: _build(chosen, limits, rank, headers, options, progress) for rank in _distinct_ranks(chosen)},
        layer_ids={
            model.role: tuple(range(model.num_layers) if is_full else sorted(set(layer_kinds(model, linears))))
            for model in models
        },
        num_layers={model.role: model.num_layers for model in models},
        sizes=rank_sizes(pretrained, limits),
        limits=limits,
        compute_capability=CHECK_CAPABILITY,
        notes=(*sources.notes, *_notes_of_parts(pretrained, chosen, headers), *described.notes, *pair.notes),
    )


def _notes_of_parts(
    config: PretrainedConfig, chosen: PretrainedConfig, headers: AbcMapping[str, TensorHeader]
) -> list[str]:
    """Notes on parts other than layers that were built only partly."""
    parts = [(_num_experts(config), _num_experts(chosen), "experts of a layer")]
    table = "target.embedding"
    parts.append(({tensor_headers(config)[table].shape[0]}, {headers[table].shape[0]}, "rows of the embedding"))
    return [
        f"{_listed(built)} of {_listed(whole)} {what} were built (--check=full: all)"
        for whole, built, what in parts
        if whole != built
    ]


def _num_experts(config: PretrainedConfig) -> set[int]:
    return {moe.num_experts for moe in config.target.moes}


def _listed(numbers: set[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _distinct_ranks(config: PretrainedConfig) -> tuple[int, ...]:
    """Rank 0, and another one if rank 0 alone adds the biases of linear layers whose results are summed."""
    table = engine_weights(config.target, config.draft, config.quantization)
    has_summed_bias = any(name.endswith((".o_bias", ".down_bias")) for name in table)
    return (0, 1) if has_summed_bias and config.mapping.world_size > 1 else (0,)


def _build(
    config: PretrainedConfig,
    limits: EngineLimits,
    rank: int,
    headers: AbcMapping[str, TensorHeader],
    options: PlanOptions,
    progress: StepsCallback,
) -> BuiltPlan:
    spec = network_spec(config.model_copy(update={"mapping": config.mapping.of_rank(rank)}), limits)
    whole = engine_weights(config.target, config.draft, config.quantization)
    table = {name: rank_shard(weight, config.mapping) for name, weight in whole.items()}
    formats = config.quantization.linears if config.quantization else {}
    plain, quantized = split_quantized(blank_tensors(headers), table, formats)
    return build_plan(
        spec,
        limits,
        plain,
        quantized=quantized,
        rope_tables=blank_rope_tables(spec, max_seq_len=limits.max_seq_len),
        options=options,
        sink=NoBytes(),
        progress=progress,
    )
