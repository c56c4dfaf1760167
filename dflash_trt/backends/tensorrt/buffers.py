"""The device memory of a TensorRT step: its staged inputs and results, and the pages, allocated once.

Addresses never change after construction, so that they are bound once and CUDA graphs stay valid.
"""

import torch

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.staging import InputStaging, ResultStaging
from dflash_trt.backends.tensorrt.network import StepNetworkSpec, state_of, step_inputs_of, step_outputs_of
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.step_plan import ExecutorLimits
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
        self._max_pages = limits.max_pages
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

    def store(self, shape: StepShape) -> None:
        """The last part of a step on the device, from its outputs."""
        outputs, drafts = self.results.outputs(shape)
        bonus = outputs.emitted_tokens.gather(1, outputs.num_accepted.long()[:, None])[:, 0]
        self.staging.store(shape, bonus, drafts if shape.num_draft_tokens else None, outputs.next_context_lens)
