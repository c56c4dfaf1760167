"""torch tensors as the host tensors a TensorRT network takes: the same memory, never a copy."""

from collections.abc import Mapping as AbcMapping

from torch import Tensor

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.ops import RopeTables
from dflash_trt.backends.torch.ops import make_rope_table
from dflash_trt.core.dtype import dtype_name, torch_dtype
from dflash_trt.formats.base import QuantizedWeight, tensor_name


def host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """`tensor` must be contiguous and on the CPU; its memory lives as long as the result."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{name} is not plain host memory"
    return HostTensor(
        name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), address=tensor.data_ptr(), owner=tensor
    )


def host_tensors(tensors: AbcMapping[str, Tensor]) -> dict[str, HostTensor]:
    return {name: host_tensor(name, tensor) for name, tensor in tensors.items()}


def host_quantized(quantized: AbcMapping[str, QuantizedWeight[Tensor]]) -> dict[str, QuantizedWeight[HostTensor]]:
    def hosted(name: str, weight: QuantizedWeight[Tensor]) -> QuantizedWeight[HostTensor]:
        return weight.map_tensors(lambda field, tensor: host_tensor(tensor_name(name, field), tensor))

    return {name: hosted(name, weight) for name, weight in quantized.items()}


def host_rope_tables(spec: StepNetworkSpec, *, max_seq_len: int) -> RopeTables:
    """cos and sin of each decoder up to the last position a draft block may reach, in the network's dtype."""
    decoders = [spec.target] if spec.draft is None else [spec.draft, spec.target]
    num_positions = max_seq_len + 2 * spec.max_draft_len + 1
    tables = {}
    for i, rotary in enumerate({rotary: None for decoder in decoders for rotary in decoder.rotaries}):
        cos, sin = make_rope_table(rotary, num_positions=num_positions, dtype=torch_dtype(spec.dtype))
        tables[rotary] = (host_tensor(f"rope_cos.{i}", cos), host_tensor(f"rope_sin.{i}", sin))
    return tables
