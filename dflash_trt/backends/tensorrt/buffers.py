"""The device memory of a TensorRT step: its staged inputs and results, and the pages, allocated once.

Addresses never change after construction, so that they are bound once and CUDA graphs stay valid.
"""

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape, max_pages_per_request
from dflash_trt.backends.staging import InputStaging, ResultStaging
from dflash_trt.backends.tensorrt.network import StepNetworkSpec, state_of, step_inputs_of, step_outputs_of
from dflash_trt.core.batch import ExecutorLimits
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.step_spec import STEP_INPUTS

Shapes = dict[str, tuple[int, ...]]


class StepBuffers:
    """`inputs` and `outputs` are flat; a step uses the first elements of each. `state` are the pages."""

    def __init__(self, spec: StepNetworkSpec, limits: ExecutorLimits, *, device: torch.device) -> None:
        """`limits` are those of the engine's steps, with the K that it always drafts."""
        self.device = device
        self.staging = InputStaging(limits, device, scratch_page=limits.num_pages)
        self.results = ResultStaging(limits, device)
        self.state = {
            tensor.name: torch.zeros(
                (limits.num_pages + 1, *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype), device=device
            )  # the last page takes what padding rows write
            for tensor in state_of(spec)
        }
        self._max_pages = max_pages_per_request(limits)
        self._inputs = tuple(tensor.name for tensor in step_inputs_of(spec))
        self._outputs = tuple(tensor.name for tensor in step_outputs_of(spec))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeroed, before another stream writes into them

    def addresses(self) -> dict[str, int]:
        """Of every input and output but the state."""
        inputs, outputs = self.staging.device_tensors, self.results.device_tensors
        given = {name: inputs[name].data_ptr() for name in self._inputs}
        return given | {name: outputs[name].data_ptr() for name in self._outputs}

    def shapes(self, shape: StepShape) -> Shapes:
        """Of all inputs of a step, state included."""
        sizes = shape.sizes(max_pages=self._max_pages)
        shapes: Shapes = {name: tuple(pages.shape) for name, pages in self.state.items()}
        return shapes | {tensor.name: tuple(tensor.extents(sizes)) for tensor in STEP_INPUTS}

    def advance(self, shape: StepShape) -> None:
        """Make the outputs of a step of verify blocks the inputs of the next one, on the device.

        Every request goes on with [bonus, drafts] at its new context length; page_table and sampling stay.
        """
        inputs, (outputs, drafts) = self.staging.inputs(shape), self.results.outputs(shape)
        bonus = outputs.emitted_tokens.gather(1, outputs.num_accepted.long()[:, None])
        lens = outputs.next_context_lens
        slots = torch.arange(shape.width, dtype=torch.int32, device=self.device)
        _put(inputs.token_ids, torch.cat((bonus, drafts), 1))
        _put(inputs.positions, lens[:, None] + slots)
        _put(inputs.context_lens, lens)
        _put(inputs.num_candidates, torch.full_like(lens, shape.num_draft_tokens))
        rows = torch.arange(shape.num_requests, dtype=torch.int32, device=self.device)[:, None] * shape.width
        _put(inputs.logit_rows, rows + slots)


def _put(target: Tensor, value: Tensor) -> None:
    target.copy_(value.view(target.shape))
