"""Steps of a gated delta net with states of their own, over the kernels and over PyTorch's definition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.gated_delta import SlotRows, gated_delta
from dflash_trt.backends.torch.loading import allocate_state
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.kernels.gated_delta_launch import DeltaRows, DeltaWeights, run_gated_delta
from dflash_trt.network.ops import DeltaParameters
from dflash_trt.network.state import RecurrentCache

EPS = 1e-6
NUM_SLOTS = 4


@dataclass(frozen=True)
class Row:
    """A request in a step: `num_rows` from `context_len` on."""

    slot: int
    context_len: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer and one state for each of the two; inputs of a step are made from its rows."""

    spec: GatedDelta
    parameters: DeltaParameters[Tensor]
    kernels: RecurrentCache[Tensor]
    defined: RecurrentCache[Tensor]
    dtype: torch.dtype
    change: Callable[[Tensor, Tensor], None] | None = None  # of qkvz and ba, in place
    is_in_order: bool = False

    @classmethod
    def make(
        cls, spec: GatedDelta, device: torch.device, *, num_records: int = 5, dtype: torch.dtype = torch.float32
    ) -> "Layer":
        generator = torch.Generator().manual_seed(7)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        state = spec.state("state", dtype_name(dtype), num_records=num_records)
        states = EngineStates(target=(state,))
        kernels, defined = (
            allocate_state(states, num_pages=1, page_size=1, num_slots=NUM_SLOTS, device=where).target_kv[0]
            for where in (device, torch.device("cpu"))
        )
        assert isinstance(kernels, RecurrentCache) and isinstance(defined, RecurrentCache)
        for name, tensor in kernels.tensors.items():  # as another request may have left it
            tensor.fill_(3 if name == "position" else torch.nan)
        for name in ("state", "window"):
            defined.tensors[name].fill_(torch.nan)
        parameters = DeltaParameters(
            conv=(randn(spec.num_channels, spec.conv_size) * 0.5).to(dtype),
            log_rate=randn(spec.num_value_heads) - 1.0,
            dt_bias=randn(spec.num_value_heads),
            norm=(1.0 + 0.1 * randn(spec.value_head_dim)).to(dtype),
        )
        return cls(spec=spec, parameters=parameters, kernels=kernels, defined=defined, dtype=dtype)

    def inputs(self, rows: Sequence[Row], *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """qkvz and ba of the rows, which depend on slot and position alone; `seed` makes other drafts."""
        parts = []
        for row in rows:
            for position in range(row.context_len, row.context_len + row.num_rows):
                generator = torch.Generator().manual_seed(1000 * row.slot + position + 100_000 * seed)
                size = self.spec.num_channels + self.spec.v_size + 2 * self.spec.num_value_heads
                parts.append(torch.randn(size, generator=generator))
        x = torch.stack(parts).to(self.dtype)
        qkvz, ba = x.split((self.spec.num_channels + self.spec.v_size, 2 * self.spec.num_value_heads), 1)
        if self.change is not None:
            self.change(qkvz, ba)
        return qkvz.contiguous(), ba.contiguous()

    def run_defined(self, rows: Sequence[Row], *, seed: int = 0) -> Tensor:
        qkvz, ba = self.inputs(rows, seed=seed)
        slot_rows = SlotRows(
            slot_ids=torch.tensor([row.slot for row in rows]),
            num_rows=[row.num_rows for row in rows],
            context_lens=torch.tensor([row.context_len for row in rows]),
        )
        out = gated_delta(qkvz, ba, self.parameters, slot_rows, self.defined, self.spec, EPS)
        slot_rows.store()
        return out

    def run_kernels(self, rows: Sequence[Row], *, seed: int = 0, num_padding: int = 0) -> Tensor:
        """With `num_padding` requests and rows that are none at the end, as of a step in a graph."""
        device = self.kernels.tensors["position"].device
        qkvz, ba = (torch.cat((x, x[:1].expand(num_padding, -1))).to(device) for x in self.inputs(rows, seed=seed))
        sizes = torch.tensor([0, *(row.num_rows for row in rows), *[0] * num_padding])
        ints = {"dtype": torch.int32, "device": device}
        step = DeltaRows(
            slot_ids=torch.tensor([row.slot for row in rows] + [NUM_SLOTS - 1] * num_padding, device=device),
            token_offsets=sizes.cumsum(0).to(**ints),
            context_lens=torch.tensor([row.context_len for row in rows] + [0] * num_padding, **ints),
            has_prompts=any(row.num_rows > self.kernels.spec.num_records for row in rows),
        )
        weights = DeltaWeights(
            **{name: getattr(self.parameters, name).to(device) for name in DeltaWeights.__dataclass_fields__}
        )
        given = qkvz, ba, weights, step, self.kernels.tensors, self.kernels.spec, EPS
        return run_gated_delta(*given, is_in_order=self.is_in_order).cpu()

    def error(self, rows: Sequence[Row], *, seed: int = 0) -> float:
        """The largest difference of the results of one step."""
        found, expected = self.run_kernels(rows, seed=seed), self.run_defined(rows, seed=seed)
        return (found - expected).abs().max().item()

    def state_error(self, row: Row) -> float:
        """The largest difference of what the two have in a slot behind a step: its state, and what may be folded."""
        num_kept, kept = self.spec.conv_size - 1, 0 if row.num_rows > self.kernels.spec.num_records else row.num_rows
        ends = {"window": num_kept + kept, "state": None, "position": None}
        errors = []
        for name, tensor in self.defined.tensors.items():
            found, expected = (x[row.slot].cpu().float() for x in (self.kernels.tensors[name], tensor))
            if name == "keys" and self.is_in_order:
                found = F.normalize(found, dim=-1)  # their lengths are computed where they are used
            if (end := ends.get(name, kept)) is not None:
                found, expected = found[:end], expected[:end]
            if found.numel():
                errors.append((found - expected).abs().max().item())
        return max(errors)

    def copy(self) -> "Layer":
        def copied(cache: RecurrentCache[Tensor]) -> RecurrentCache[Tensor]:
            return RecurrentCache({name: tensor.clone() for name, tensor in cache.tensors.items()}, cache.spec)

        return replace(self, kernels=copied(self.kernels), defined=copied(self.defined))
