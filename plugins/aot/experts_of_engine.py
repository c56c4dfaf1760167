"""Experts' kernels that an engine's config asks for: sizes of a rank, and the formats of its weights."""

from collections.abc import Iterator
from dataclasses import replace

from dflash_trt.backends.cuda.packed import form_of, router_kind
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.weight_spec import rank_shard, segments_of
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.formats.registry import weight_format
from dflash_trt.kernels.launch_rules import PLAIN
from plugins.aot.experts_variants import ExpertsKernels, MatrixKernels, matrix_choices


def experts_of(config: PretrainedConfig, *, max_rows: int) -> Iterator[ExpertsKernels]:
    """Of every layer, the drafter's too; those of equal kinds are equal."""
    formats = config.quantization.linears if config.quantization else {}
    table = engine_weights(config.target, config.draft, config.quantization)
    has_bias_once = config.mapping.moe_tp_size > 1
    for name, moe in _named_experts(config):
        gate_up = rank_shard(table[f"{name}.gate_up"], config.mapping)
        down = rank_shard(table[f"{name}.down"], config.mapping)
        for of_gate_up in matrix_choices(
            _matrix(formats.get(f"{name}.gate_up"), moe), splits_input=True, is_bias_of_one=False
        ):
            for of_down in matrix_choices(
                _down_matrix(formats.get(f"{name}.down"), moe), splits_input=False, is_bias_of_one=has_bias_once
            ):
                yield ExpertsKernels(
                    num_experts=moe.num_experts,
                    num_here=down.shape[0],
                    num_chosen=moe.num_experts_per_token,
                    hidden_size=down.shape[1],
                    ffn_size=segments_of(gate_up)[0],
                    routing=router_kind(moe),
                    normalizes=moe.normalizes_top_k,
                    has_choice_bias=moe.has_choice_bias,
                    num_groups=moe.num_groups,
                    num_chosen_groups=moe.num_chosen_groups,
                    activation=moe.activation,
                    scales_inputs=moe.scales_inputs,
                    gate_up=of_gate_up,
                    down=of_down,
                    max_rows=max_rows,
                )


def _named_experts(config: PretrainedConfig) -> Iterator[tuple[str, Moe]]:
    for decoder in (config.target, *([config.draft] if config.draft else [])):
        for i, layer in enumerate(decoder.layers):
            if layer.moe is not None:
                yield f"{decoder.role}.layers.{i}.experts", layer.moe


def _down_matrix(format_name: str | None, moe: Moe) -> MatrixKernels:
    """A factor of each expert is a scale of its rows (`expert_matrices`)."""
    matrix = _matrix(format_name, moe)
    return replace(matrix, has_row_scale=matrix.has_row_scale or moe.routing == "scaled_softmax_top_k")


def _matrix(format_name: str | None, moe: Moe) -> MatrixKernels:
    if format_name is None:
        return MatrixKernels(form=PLAIN, has_bias=moe.has_bias)
    known = weight_format(format_name)
    has_scale = "weight_scale" in known.layout((1, known.columns_per_block), (1,))
    return MatrixKernels(
        form=form_of(known.weight_type),
        has_row_scale=has_scale or known.has_input_scale,
        num_input_scales=int(known.has_input_scale),
        has_bias=moe.has_bias,
    )
