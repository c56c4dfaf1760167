"""PyTorch's operators on the software GPU, computed by its CPU over the same memory, in the order of the stream.

Without this its CUDA kernels and cuBLAS's calls are counted and compute nothing. An operator runs when its stream
comes to it, and again whenever the graph that captured it is launched; until then its outputs hold what their
memory held, as on a GPU.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from software_gpu.runtime.library import software_cuda

_CALLBACK: Final = ctypes.CFUNCTYPE(None, ctypes.c_long)
# Those that allocate, look at a tensor from the side, or copy between host and device by the runtime's own calls.
_OWN: Final = (
    *("empty", "empty_strided", "resize_", "set_", "record_stream", "is_pinned", "_pin_memory", "is_set_to"),
    *("view", "as_strided", "alias", "_reshape_alias", "unfold", "copy_", "_copy_from", "_local_scalar_dense"),
)


def install() -> None:
    """Compute every operator that PyTorch registers for CUDA, but those that only move or name memory."""
    software_cuda().library.software_gpu_submit.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _CALLBACK, ctypes.c_long]
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and packet not in _OWN:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(rest, _implementation(op), "CUDA")
    library.impl("copy_", _copy, "CUDA")
    _KEPT.append(library)


_KEPT: Final[list[torch.library.Library]] = []
_numbers = itertools.count()
_submitted: Final[dict[int, Callable[[], None]]] = {}


@_CALLBACK
def _run(number: int) -> None:
    """A function of the stream; errors must not leave it."""
    try:
        _submitted[number]()
    except BaseException as error:  # noqa: BLE001 - told, as nobody is there to catch it
        software_cuda().library.software_gpu_problem(f"an operator failed: {type(error).__name__}: {error}".encode())


def _implementation(op: Any) -> Callable[..., Any]:
    returns = op._schema.returns
    writes = [
        argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    outs = [argument.name for argument in op._schema.arguments if argument.is_out]
    names = [argument.name for argument in op._schema.arguments]
    are_tensors = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_as_tensor(x) if is_tensor else x for x, is_tensor in zip(args, are_tensors, strict=False))
        given = dict(zip(names, args, strict=False)) | kwargs
        if writes:
            results = [given[name] for name in writes]
            outputs: list[Tensor] = []
            if outs:
                found = op(*tree_map(_meta, args), **tree_map(_meta, kwargs))
                for name, shaped in zip(outs, found if isinstance(found, tuple | list) else [found], strict=True):
                    if given[name].shape != shaped.shape:
                        given[name].resize_(shaped.shape)
        else:
            try:
                meta = op(*tree_map(_meta, args), **tree_map(_meta, kwargs))
            except (NotImplementedError, RuntimeError):  # its sizes depend on contents, or the arguments are wrong
                return _run_now(op, args, kwargs)
            outputs = [_empty_like(item) for item in (meta if isinstance(meta, tuple | list) else [meta])]
            results = outputs
        _submit(op, args, kwargs, outputs)
        if not returns:
            return None
        return results[0] if len(returns) == 1 and len(results) == 1 else tuple(results)

    return run


def _as_tensor(value: Any) -> Any:
    """PyTorch 2.11 gives an operator of two tensors a wrapped number as a number of Python."""
    return torch.tensor(value) if isinstance(value, int | float) else value


def _run_now(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """PyTorch's CUDA waits for the stream here, too."""
    torch.cuda.current_stream().synchronize()
    found = op(*(_opened(_on_host(arg)) for arg in args), **{name: _opened(_on_host(x)) for name, x in kwargs.items()})
    return tree_map(lambda x: x.to("cuda") if isinstance(x, Tensor) else x, found)


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """On a device, or between it and the host; of another type or layout through a dense copy, which waits."""
    if to.is_cuda and source.is_cuda:
        _submit(torch.ops.aten.copy_.default, (to, source), {}, [])
    elif to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous() and to.shape == source.shape:
        _transfer(to, source, is_blocking=not non_blocking)
    else:
        dense = torch.empty(to.shape, dtype=to.dtype, device=to.device)
        _transfer(dense, source.to(to.dtype).expand(to.shape).contiguous(), is_blocking=True)
        to.copy_(dense)
    return to


def _transfer(to: Tensor, source: Tensor, *, is_blocking: bool) -> None:
    library = software_cuda().library
    stream = torch.cuda.current_stream()
    failed = library.cudaMemcpyAsync(
        ctypes.c_void_p(to.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(to.nbytes),
        4,  # cudaMemcpyDefault
        ctypes.c_void_p(stream.cuda_stream),
    )
    if failed:
        raise RuntimeError(f"CUDA error {failed}")
    if is_blocking:
        stream.synchronize()
    elif not torch.cuda.is_current_stream_capturing():
        _hold(to if source.is_cuda else source, stream)


def _hold(tensor: Tensor, stream: Any) -> None:
    """Until the stream comes here: PyTorch's own copy records an event for the allocator of pinned memory."""
    number = next(_numbers)

    def release(held: Tensor = tensor) -> None:
        del _submitted[number]

    _submitted[number] = release
    software_cuda().library.software_gpu_submit(stream.cuda_stream, b"event of a pinned block", _run, number)


def _submit(op: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    """Addresses are kept, and no tensors: the memory may be given to somebody else behind this in the stream."""
    call_args, call_kwargs = tree_map(_on_host, (args, kwargs))
    hosts = [_on_host(output) for output in outputs]
    runs_again = torch.cuda.is_current_stream_capturing()
    number = next(_numbers)

    def compute() -> None:
        if not runs_again:
            del _submitted[number]
        found = op(*tree_map(_opened, call_args), **tree_map(_opened, call_kwargs))
        for host, value in zip(hosts, found if isinstance(found, tuple | list) else [found], strict=False):
            torch.ops.aten.copy_.default(_opened(host), value)

    _submitted[number] = compute
    stream = torch.cuda.current_stream().cuda_stream
    software_cuda().library.software_gpu_submit(stream, str(op).encode(), _run, number)


class _HostView:
    """The memory of a CUDA tensor, as the CPU's."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._address, self._bytes = storage.data_ptr(), storage.nbytes()
        self._dtype, self._shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def open(self) -> Tensor:
        if not self._bytes:
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype)
        memory = (ctypes.c_uint8 * self._bytes).from_address(self._address)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=self._dtype).set_(whole.untyped_storage(), self._offset, self._shape, self._strides)


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else torch.device("meta") if _is_device(value) else value


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _HostView(value) if value.is_cuda else value.clone()
    return torch.device("cpu") if _is_device(value) else value


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, _HostView) else value


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _empty_like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cuda")
