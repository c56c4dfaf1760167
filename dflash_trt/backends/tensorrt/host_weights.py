"""torch tensors as the host tensors a TensorRT network takes: the same memory, never a copy."""

from collections.abc import Mapping as AbcMapping

from torch import Tensor

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.ops import RopeTables
from dflash_trt.backends.torch.ops import make_rope_table
from dflash_trt.core.dtype import dtype_name, torch_dtype
from dflash_trt.formats.base import Fp8Weight, Nvfp4Weight, PackedWeight


def host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """`tensor` must be contiguous and on the CPU; its memory lives as long as the result."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{name} is not plain host memory"
    return HostTensor(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        address=tensor.data_ptr(),
        owner=tensor,
    )


def host_tensors(tensors: AbcMapping[str, Tensor]) -> dict[str, HostTensor]:
    return {name: host_tensor(name, tensor) for name, tensor in tensors.items()}


def host_packed(packed: AbcMapping[str, PackedWeight[Tensor]]) -> dict[str, PackedWeight[HostTensor]]:
    return {name: _host_packed(name, weight) for name, weight in packed.items()}


def host_rope_tables(spec: StepNetworkSpec, *, max_seq_len: int) -> RopeTables:
    """cos and sin of each decoder up to the last position a draft block may reach, in the network's dtype."""
    decoders = [spec.target] if spec.draft is None else [spec.draft, spec.target]
    num_positions = max_seq_len + spec.max_draft_len + 1
    tables = {}
    for decoder in decoders:
        cos, sin = make_rope_table(decoder.rotary, num_positions=num_positions, dtype=torch_dtype(spec.dtype))
        names = (f"{decoder.role}.rope_cos", f"{decoder.role}.rope_sin")
        tables[decoder.rotary] = (host_tensor(names[0], cos), host_tensor(names[1], sin))
    return tables


def _host_packed(name: str, weight: PackedWeight[Tensor]) -> PackedWeight[HostTensor]:
    scale = host_tensor(f"{name}.weight_scale", weight.weight_scale)
    input_scale = None if weight.input_scale is None else host_tensor(f"{name}.input_scale", weight.input_scale)
    if isinstance(weight, Fp8Weight):
        codes = host_tensor(name, weight.codes)
        return Fp8Weight(segments=weight.segments, weight_scale=scale, input_scale=input_scale, codes=codes)
    assert isinstance(weight, Nvfp4Weight), f"no host form for {type(weight).__name__}"
    return Nvfp4Weight(
        segments=weight.segments,
        weight_scale=scale,
        input_scale=input_scale,
        codes=host_tensor(name, weight.codes),
        block_scale=host_tensor(f"{name}.block_scale", weight.block_scale),
    )
