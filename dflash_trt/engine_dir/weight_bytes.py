"""Bytes of an engine's weights by model and format, from the headers that its files have or will have."""

from collections import Counter
from typing import Literal

from dflash_trt.core.dtype import stored_dtype
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.engine_dir.manifest import PretrainedConfig, tensor_headers

Model = Literal["target", "draft"]


def rank_weight_bytes(config: PretrainedConfig) -> dict[Model, dict[str, int]]:
    """Bytes that each rank holds, by the format of linear layers and by the dtype of other tensors."""
    quantization = config.quantization or QuantizationSpec()
    has_one_dtype = config.weights_dtype is None
    target, draft = Counter[str](), Counter[str]()
    for name, header in tensor_headers(config).items():
        dtype = config.dtype if has_one_dtype and header.dtype != "I64" else stored_dtype(header.dtype)
        tensor_format = quantization.format_of(name) or str(dtype)
        (target if name.startswith("target.") else draft)[tensor_format] += header.num_bytes
    return {"target": dict(target), "draft": dict(draft)}


def weight_bytes_fields(by_format: dict[str, int], *, num_ranks: int) -> dict[str, object]:
    """As JSON: bytes of all ranks, together and by format."""
    of_all = {name: num_bytes * num_ranks for name, num_bytes in by_format.items()}
    return {"weights_bytes": sum(of_all.values()), "weights_bytes_by_format": of_all}
