"""The device memory of a TensorRT step: inputs, outputs and pages, allocated once at their largest size.

Addresses never change after construction, so that they are bound once and CUDA graphs stay valid.
"""

from dataclasses import fields

import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.network import StepNetworkSpec, state_of, step_inputs_of, step_outputs_of
from dflash_trt.core.batch import ExecutorLimits
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.network.ops import StepInputs

Shapes = dict[str, tuple[int, ...]]


class StepBuffers:
    """`inputs` and `outputs` are flat; a step uses the first elements of each. `state` are the pages."""

    def __init__(self, spec: StepNetworkSpec, limits: ExecutorLimits, *, device: torch.device) -> None:
        width = spec.max_draft_len + 1 if spec.has_drafts else 1
        largest = {
            "T": limits.max_num_tokens,
            "R": limits.max_batch_size,
            "R+1": limits.max_batch_size + 1,
            "K": width - 1,
            "K+1": width,
            "P": -(-limits.max_seq_len // limits.page_size),
        }

        def allocate(axes: tuple[str, ...], dtype: str) -> Tensor:
            return torch.zeros([largest[axis] for axis in axes], dtype=torch_dtype(dtype), device=device).flatten()

        self.device = device
        self.inputs = {tensor.name: allocate(tensor.axes, tensor.dtype) for tensor in step_inputs_of(spec)}
        self.outputs = {tensor.name: allocate(tensor.axes, tensor.dtype) for tensor in step_outputs_of(spec)}
        self._output_axes = {tensor.name: tensor.axes for tensor in step_outputs_of(spec)}
        self.state = {
            tensor.name: torch.zeros(
                (limits.num_pages + 1, *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype), device=device
            )  # the last page takes what padding rows write
            for tensor in state_of(spec)
        }
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeroed, before another stream writes into them

    @property
    def scratch_page(self) -> int:
        return int(next(iter(self.state.values())).shape[0]) - 1

    def fill(self, inputs: StepInputs[Tensor]) -> Shapes:
        """Copy a step's host tensors to the device; the shapes of all inputs, state included."""
        shapes: Shapes = {name: tuple(pages.shape) for name, pages in self.state.items()}
        for item in fields(inputs):
            value: Tensor = getattr(inputs, item.name)
            buffer = self.inputs[item.name]
            assert value.numel() <= buffer.numel() and value.dtype == buffer.dtype, item.name
            buffer[: value.numel()].copy_(value.flatten(), non_blocking=True)
            shapes[item.name] = tuple(value.shape)
        return shapes

    def read(self, *, num_requests: int, width: int) -> dict[str, Tensor]:
        """The outputs of a step of R requests, on the host; waits for the device."""
        return {name: view.cpu() for name, view in self._views(num_requests, width).items()}

    def advance(self, *, num_requests: int, width: int) -> None:
        """Make the outputs of a step of verify blocks the inputs of the next one, on the device.

        Every request goes on with [bonus, drafts] at its new context length; page_table and sampling stay.
        """
        outputs = self._views(num_requests, width)
        bonus = outputs["emitted_tokens"].gather(1, outputs["num_accepted"].long()[:, None])
        lens = outputs["next_context_lens"]
        slots = torch.arange(width, dtype=torch.int32, device=self.device)
        rows = torch.arange(num_requests, dtype=torch.int32, device=self.device)[:, None] * width + slots
        ends = torch.arange(num_requests + 1, dtype=torch.int32, device=self.device) * width
        self._put("token_ids", torch.cat((bonus, outputs["draft_tokens"]), 1))
        self._put("positions", lens[:, None] + slots)
        self._put("context_lens", lens)
        self._put("token_offsets", ends)
        self._put("logit_rows", rows)
        self._put("num_candidates", torch.full_like(lens, width - 1))

    def _put(self, name: str, value: Tensor) -> None:
        self.inputs[name][: value.numel()].copy_(value.flatten())

    def _views(self, num_requests: int, width: int) -> dict[str, Tensor]:
        sizes = {"R": num_requests, "K+1": width, "K": width - 1}
        views = {}
        for name, buffer in self.outputs.items():
            shape = [sizes[axis] for axis in self._output_axes[name]]
            views[name] = buffer[: torch.Size(shape).numel()].view(shape)
        return views
