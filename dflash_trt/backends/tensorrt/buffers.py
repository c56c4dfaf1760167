"""The device memory of TensorRT steps: staged inputs and results, and the state, allocated once.

Addresses never change, so that they are bound once and CUDA graphs stay valid.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.slots import PageTables
from dflash_trt.backends.staging import InputStaging, ResultStaging
from dflash_trt.backends.step_inputs import TensorBlock
from dflash_trt.backends.tensorrt.network import (
    PAGE_TABLE,
    STATE_POOLS,
    StepNetworkSpec,
    pool_axis,
    state_outputs_of,
    state_tensors_of,
    step_inputs_of,
    step_outputs_of,
    step_tensors_of,
    table_name,
)
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.state_spec import page_group_of
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow
from dflash_trt.core.step_spec import DRAFT_OUTPUTS
from dflash_trt.network.proposal import Proposal

Shapes = dict[str, tuple[int, ...]]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class EngineState:
    """Pages and slots of every state, which the network finds by address."""

    def __init__(
        self,
        spec: StepNetworkSpec,
        *,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        page_windows: Sequence[PageWindow] = (),
    ) -> None:
        """`num_slots` are the requests', one for padding, and snapshots. `page_windows` match the spec's."""
        assert tuple(group.window for group in page_windows) == spec.page_windows, "pools for the groups of the engine"
        sizes = {pool_axis(None): num_pages, "slots": num_slots}
        sizes |= {pool_axis(group.window): group.blank_page + 1 for group in page_windows}
        self._kinds = {tensor.name: tensor.axes[0] for tensor in state_tensors_of(spec)}
        self._groups = {state.name: page_group_of(state, spec.page_windows) for state in spec.states}
        self._tensors = {
            tensor.name: torch.zeros(
                (sizes[tensor.axes[0]], *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype), device=device
            )
            for tensor in state_tensors_of(spec)
        }
        addresses = [tensor.data_ptr() for tensor in self._tensors.values()]
        self._pools = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._unread = {
            tensor.name: torch.zeros(tensor.shape, dtype=torch_dtype(tensor.dtype), device=device)
            for tensor in state_outputs_of(spec)
        }

    @property
    def contents(self) -> dict[str, Tensor]:
        """All pages and slots in the order of their layers, as the last step left them."""
        return dict(self._tensors)

    @property
    def pages(self) -> dict[str, Tensor]:
        """By name of the state, [pages, ...]."""
        return {name: tensor for name, tensor in self._tensors.items() if self._kinds[name] != "slots"}

    @property
    def paged(self) -> list[tuple[int, Tensor]]:
        """All that pages hold, with its page group."""
        return [(self.group_of(name), pages) for name, pages in self.pages.items()]

    def group_of(self, name: str) -> int:
        """Index of the page group of a state."""
        return self._groups[name]

    @property
    def slots(self) -> dict[str, Tensor]:
        """The parts of recurrent states, [slots, ...]; names as of `slot_tensor_name`."""
        return {name: tensor for name, tensor in self._tensors.items() if self._kinds[name] == "slots"}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to bind, by engine tensor name."""
        return {STATE_POOLS: self._pools} | self._unread

    def fill(self, value: float) -> None:
        """Overwrite everything: for canaries, never while requests are alive."""
        for tensor in self._tensors.values():
            tensor.fill_(value)


class StepBuffers:
    """Inputs and results of a step, flat; a step uses the first elements of each.

    The drafts' top-k candidates stay on the device: the slots keep them.
    """

    def __init__(self, spec: StepNetworkSpec, limits: ExecutorLimits, *, device: torch.device) -> None:
        """`limits` are the limits of the engine's steps, with the K and C that it always drafts."""
        self.device = device
        self.staging = InputStaging(limits, device)
        self.results = ResultStaging(limits, device)
        self._tables = PageTables(limits, device=device) if limits.page_windows else None
        self._table_names = (PAGE_TABLE.name, *(table_name(group.window) for group in limits.page_windows))
        self._draft_topk_tensors = TensorBlock(DRAFT_OUTPUTS, limits, device=device)
        self._sizes = {"max_pages": limits.max_pages, "draft_topk": limits.draft_topk}
        self._step_tensors = step_tensors_of(spec)
        self._inputs = tuple(tensor.name for tensor in step_inputs_of(spec))
        self._outputs = tuple(tensor.name for tensor in step_outputs_of(spec))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name of the engine's tensor."""
        tables = {} if self._tables is None else dict(zip(self._table_names, self._tables.flat, strict=True))
        inputs = {**self.staging.device_tensors, **tables}
        outputs = {**self.results.device_tensors, **self._draft_topk_tensors.flat}
        return {name: inputs[name] for name in self._inputs} | {name: outputs[name] for name in self._outputs}

    def shapes(self, shape: StepShape) -> Shapes:
        sizes = shape.sizes(**self._sizes)
        return {tensor.name: tuple(tensor.extents(sizes)) for tensor in self._step_tensors}

    def assemble(self, shape: StepShape) -> None:
        """The first part of a step on the device."""
        self.staging.assemble(shape, None if self._tables is None else self._tables.views(shape))

    def store(self, shape: StepShape) -> None:
        """The last part of a step on the device, from its outputs."""
        outputs, drafts = self.results.outputs(shape)
        bonus = outputs.emitted_tokens.gather(1, outputs.num_accepted.long()[:, None])[:, 0]
        proposal = None
        if shape.num_draft_tokens:
            views = self._draft_topk_tensors.views(shape)
            draft_topk_ids, draft_topk_probs = (views[tensor.name] for tensor in DRAFT_OUTPUTS)
            proposal = Proposal(tokens=drafts.tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)
        self.staging.store(shape, bonus, proposal, outputs.next_context_lens)
