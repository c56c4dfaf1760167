"""Inputs of `GatedDelta` nodes, the kernels that a library needs for them, and what a node computes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.gated_delta import SlotRows, gated_delta
from dflash_trt.core.dtype import dtype_name, torch_dtype
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.kernels.programs import GATED_DELTA
from dflash_trt.network.ops import DeltaParameters
from dflash_trt.network.state import RecurrentCache
from tests.trt.host_memory import view_at

NET = GatedDelta(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=24, conv_size=4)
NUM_RECORDS, NUM_SLOTS = 4, 5
FIRST_STATE = 2  # in state_pools, behind one of another layer and one of nobody
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaCase:
    """A step: rows, committed tokens and slot of each request, and the position of each slot's state."""

    num_rows: tuple[int, ...]
    context_lens: tuple[int, ...]
    slot_ids: tuple[int, ...]
    positions: tuple[int, ...] = (0,) * NUM_SLOTS
    num_padding: int = 0  # rows of no request at the end

    def node(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[dict[str, Tensor], dict[str, float], list[Tensor]]:
        """Named inputs, fields and the state's tensors, all new."""
        random = torch.Generator().manual_seed(7)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        spec = state_spec(dtype)
        tensors = {
            name: randn(NUM_SLOTS, *shape).to(torch_dtype(kind)) for name, (shape, kind) in spec.tensors().items()
        }
        tensors["keys"] = F.normalize(tensors["keys"], dim=-1)
        tensors["decays"] = -tensors["decays"].abs()
        tensors["position"] = torch.tensor(self.positions, dtype=torch.int32)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        pools = torch.zeros(FIRST_STATE + len(tensors) + 1, dtype=torch.int64)
        for i, tensor in enumerate(tensors.values()):
            pools[FIRST_STATE + i] = tensor.data_ptr()
        num_rows, offsets = sum(self.num_rows) + self.num_padding, [0]
        for count in self.num_rows:
            offsets.append(offsets[-1] + count)
        inputs = {
            "qkvz": randn(num_rows, NET.num_channels + NET.v_size).to(dtype),
            "ba": randn(num_rows, 2 * NET.num_value_heads).to(dtype),
            "conv": (randn(NET.num_channels, NET.conv_size) * 0.5).to(dtype),
            "log_rate": randn(NET.num_value_heads) - 1.0,
            "dt_bias": randn(NET.num_value_heads),
            "norm": (1.0 + 0.1 * randn(NET.value_head_dim)).to(dtype),
            "state_pools": pools,
            "slot_ids": torch.tensor(self.slot_ids),
            "token_offsets": torch.tensor(offsets, dtype=torch.int32),
            "context_lens": torch.tensor(self.context_lens, dtype=torch.int32),
        }
        fields = {"state": FIRST_STATE, "num_records": NUM_RECORDS, "num_key_heads": NET.num_key_heads, "eps": EPS}
        return {name: inputs[name].to(device) for name in GATED_DELTA.input_names}, fields, list(tensors.values())


def state_spec(dtype: torch.dtype = torch.float32) -> Recurrent:
    return NET.state("state", dtype_name(dtype), num_records=NUM_RECORDS)


CASES = {
    "a new prompt": DeltaCase(num_rows=(37,), context_lens=(0,), slot_ids=(3,)),
    "verify blocks": DeltaCase(
        num_rows=(4, 2, 3), context_lens=(9, 0, 20), slot_ids=(1, 3, 0), positions=(16, 7, 0, 5, 0)
    ),
    "a block alone": DeltaCase(num_rows=(4,), context_lens=(9,), slot_ids=(2,), positions=(0, 0, 9, 0, 0)),
    "a chunk beside a block, in a padded step": DeltaCase(
        num_rows=(3, 9, 0, 0),
        context_lens=(8, 6, 0, 0),
        slot_ids=(2, 0, 4, 4),
        positions=(5, 0, 4, 0, 0),
        num_padding=5,
    ),
}


def kept_state(case: DeltaCase, tensors: list[Tensor], *, has_unit_keys: bool = True) -> list[Tensor]:
    """What a next step may read of each slot, and all of the slots that the step does not have; float32.

    Keys that are no unit vectors become some.
    """
    kept = []
    counts = dict(zip(case.slot_ids, case.num_rows, strict=True))
    for name, stored in zip(state_spec().tensors(), tensors, strict=True):
        tensor = F.normalize(stored, dim=-1) if name == "keys" and not has_unit_keys else stored
        for slot in range(NUM_SLOTS):
            count = counts.get(slot, 0)
            num_records = 0 if count > NUM_RECORDS else count
            ends = {"state": None, "position": None, "window": NET.conv_size - 1 + num_records}
            end = ends.get(name, num_records) if count else None
            kept.append((tensor[slot] if end is None else tensor[slot, :end]).float().cpu())
    return [part for part in kept if part.numel()]


def run_reference(
    x: dict[str, Tensor], settings: dict[str, float], *, compute: Callable[..., Tensor] = gated_delta
) -> list[Tensor]:
    """plugins/README.md in PyTorch: rows of no request get zeros, and requests without rows are left alone."""
    heads, value_dim, num_key_heads = len(x["log_rate"]), len(x["norm"]), int(settings["num_key_heads"])
    net = GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=heads,
        key_head_dim=(len(x["conv"]) - heads * value_dim) // (2 * num_key_heads),
        value_head_dim=value_dim,
        conv_size=x["conv"].shape[1],
    )
    state = net.state("state", dtype_name(x["qkvz"].dtype), num_records=int(settings["num_records"]))
    num_slots, first = int(x["slot_ids"].max()) + 1, int(settings["state"])
    tensors = {
        name: view_at(int(x["state_pools"][first + i]), (num_slots, *shape), torch_dtype(dtype))
        for i, (name, (shape, dtype)) in enumerate(state.tensors().items())
    }
    counts = x["token_offsets"].diff()
    is_there, total = counts > 0, int(x["token_offsets"][-1])
    out = torch.zeros(len(x["qkvz"]), net.v_size, dtype=x["qkvz"].dtype)
    if total:
        rows = SlotRows(
            slot_ids=x["slot_ids"][is_there],
            num_rows=counts[is_there].tolist(),
            context_lens=x["context_lens"][is_there].long(),
        )
        parameters = DeltaParameters(**{name: x[name] for name in ("conv", "log_rate", "dt_bias", "norm")})
        cache, given = RecurrentCache(tensors, state), (x["qkvz"][:total], x["ba"][:total])
        out[:total] = compute(*given, parameters, rows, cache, net, settings["eps"])
        rows.store()
    return [out]
