"""The tensors of a packed linear: names, dtypes and shapes, as checkpoints are read into and engines store.

A linear `X` of `core/weight_spec.py` in a packed format is several tensors, meaning as in `formats/base.py`:
`X` the codes, `X.block_scale` (NVFP4), `X.weight_scale`, `X.input_scale` (unless weight-only).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dflash_trt.core.dtype import stored_num_bytes
from dflash_trt.core.model_spec import DraftSpec, TargetSpec
from dflash_trt.core.quantization import QuantizationSpec, WeightFormat
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, draft_weights, target_weights

BLOCK_COLUMNS = 16  # of one NVFP4 block scale

_SCALES = ("block_scale", "weight_scale", "input_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTensorSpec:
    """`dtype` in safetensors' words: F8_E4M3, U8, F32."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return stored_num_bytes(self.dtype) * math.prod(self.shape)


def packed_tensors(name: str, spec: WeightSpec, weight_format: WeightFormat) -> tuple[PackedTensorSpec, ...]:
    """The tensors of one linear, in the order of the file. `spec.shape` may be a rank's share."""
    rows, columns = spec.shape
    scales = (len(segments_of(spec)),)
    parts: tuple[tuple[str, str, tuple[int, ...]], ...]
    if weight_format == "fp8":
        parts = (("", "F8_E4M3", (rows, columns)), (".weight_scale", "F32", scales), (".input_scale", "F32", scales))
    else:
        parts = (
            ("", "U8", (rows, columns // 2)),
            (".block_scale", "F8_E4M3", (rows, columns // BLOCK_COLUMNS)),
            (".weight_scale", "F32", scales),
        )
        if weight_format == "nvfp4":
            parts += ((".input_scale", "F32", scales),)
    return tuple(PackedTensorSpec(name=name + suffix, dtype=dtype, shape=shape) for suffix, dtype, shape in parts)


def stored_format(tensor_name: str, linears: Mapping[str, WeightFormat]) -> WeightFormat | None:
    """The format of the packed linear that a stored tensor belongs to, codes or scales; None for any other tensor."""
    linear, _, suffix = tensor_name.rpartition(".")
    return linears.get(linear if suffix in _SCALES else tensor_name)


def segments_of(spec: WeightSpec) -> tuple[int, ...]:
    """Rows per stacked linear; one segment for a linear that is not fused."""
    return spec.segments or (spec.shape[0],)


def engine_table(target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None) -> WeightTable:
    """The canonical weights of an engine, with the packed copies of the head that quantization adds."""
    table = target_weights(target)
    if draft is not None:
        table |= draft_weights(draft)
    for name in extra_heads(table, quantization.linears if quantization else ()):
        shape = (target.vocab_size, target.hidden_size)
        table[name] = WeightSpec(shape=shape, sharding="rows", segments=(target.vocab_size,))
    return table


def extra_heads(table: WeightTable, linears: Iterable[str]) -> tuple[str, ...]:
    """Heads among `linears` that the models themselves do not have: copies of the target's."""
    wanted = set(linears)
    return tuple(name for name in ("target.lm_head", "draft.lm_head") if name in wanted and name not in table)


def check_quantization(quantization: QuantizationSpec, target: TargetSpec, draft: DraftSpec | None) -> None:
    """Raises ValueError when the names or lengths do not fit the models."""
    table = engine_table(target, draft, quantization)
    wrong = [name for name in quantization.linears if name not in table or not is_linear(table[name], name)]
    if wrong:
        raise ValueError(f"quantization of linears that the models have (not {', '.join(wrong)})")
    for kv_scales, spec in ((quantization.target_kv, target), (quantization.draft_kv, draft)):
        num_layers = spec.num_layers if spec is not None else 0
        if kv_scales is not None and len(kv_scales) != num_layers:
            raise ValueError(f"K/V scales of {num_layers} layers (not {len(kv_scales)})")


def rank_share(spec: WeightSpec, tp_size: int) -> WeightSpec:
    """The part that every rank of `tp_size` holds, as a spec of its own."""
    rows, cut = spec.shape[0], tp_size if spec.sharding != "replicated" else 1
    if spec.sharding == "columns":
        return replace(spec, shape=(rows, spec.shape[1] // cut))
    shape = (rows // cut, *spec.shape[1:])
    return replace(spec, shape=shape, segments=tuple(segment // cut for segment in spec.segments))


def is_linear(spec: WeightSpec, name: str) -> bool:
    """Whether a canonical tensor is the weight of a GEMM: a matrix that is no embedding, and no biases of experts."""
    return len(spec.shape) == 2 and not name.endswith((".embedding", "_bias"))
