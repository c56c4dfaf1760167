"""The kernels of gated delta nets against `backends/torch/gated_delta.py`, step by step, states included."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.kernels import gated_delta_launch as launch
from dflash_trt.network.state import RecurrentCache
from tests.kernels.gated_delta_steps import NUM_SLOTS, Layer, Row

RECORDS = 5
# Sums in another order, of results of up to 4; measured in the interpreter: 7e-6.
TOLERANCE = 5e-5
# Two places of bfloat16 of the largest results, which are 8; measured in the interpreter, which truncates: 0.0625.
BFLOAT16_TOLERANCE = 0.125


def make_spec(**changes: int) -> GatedDelta:
    sizes = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 16, "value_head_dim": 16, "conv_size": 4}
    return GatedDelta(**sizes | changes)


def assert_same(layer: Layer, rows: list[Row], *, seed: int = 0, tolerance: float = TOLERANCE) -> None:
    assert layer.error(rows, seed=seed) < tolerance
    assert max(layer.state_error(row) for row in rows) < tolerance


@pytest.mark.parametrize("num_accepted", range(1, RECORDS + 1))
def test_the_next_step_folds_what_was_accepted(device: torch.device, num_accepted: int) -> None:
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    assert_same(layer, [Row(0, 0, RECORDS + 2)])
    assert_same(layer, [Row(0, RECORDS + 2, RECORDS)])
    at = RECORDS + 2 + num_accepted
    assert_same(layer, [Row(0, at, RECORDS)], seed=1)
    assert_same(layer, [Row(0, at + 1, 2)], seed=2)


def test_a_step_that_runs_again_folds_nothing_twice(device: torch.device) -> None:
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    first, again = [Row(1, 0, 3)], [Row(1, 2, 4)]
    for rows in (first, first, again, again, [Row(1, 5, 1)]):
        assert_same(layer, rows)
    found = [layer.run_kernels(again) for _ in range(2)]
    assert torch.equal(*found)


def test_prompts_verify_blocks_and_new_requests_share_a_step_and_k_changes(device: torch.device) -> None:
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    assert_same(layer, [Row(2, 0, 4), Row(0, 0, 1)])
    chunk = launch.CHUNK
    assert_same(layer, [Row(2, 3, chunk + 1), Row(0, 1, 5), Row(1, 0, chunk)])  # a prompt after records
    assert_same(layer, [Row(0, 4, 2), Row(1, chunk, RECORDS + 1), Row(2, chunk + 4, 1)])
    assert_same(layer, [Row(2, chunk + 5, 5), Row(0, 5, 1)])
    assert_same(layer, [Row(0, 0, 2), Row(2, chunk + 9, 3)])  # slot 0 has a new request


@pytest.mark.parametrize(
    ("changes", "num_records"),
    [
        ({"num_value_heads": 1, "key_head_dim": 128, "value_head_dim": 128}, 8),
        ({"num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 64, "conv_size": 2}, 3),
        ({"num_key_heads": 3, "num_value_heads": 3, "key_head_dim": 24, "value_head_dim": 40, "conv_size": 6}, 1),
        ({"key_head_dim": 64}, 20),
    ],
    ids=["1x", "4x", "odd sizes", "many records"],
)
def test_every_size_of_heads_filters_and_records_is_computed(
    device: torch.device, changes: dict[str, int], num_records: int
) -> None:
    layer = Layer.make(make_spec(**changes), device, num_records=num_records)
    assert_same(layer, [Row(0, 0, num_records + 1), Row(1, 0, num_records)])
    rows = [Row(0, num_records + 1, num_records), Row(1, max(1, num_records - 1), num_records)]
    assert_same(layer, rows)
    assert_same(layer, [replace(row, context_len=row.context_len + 1, num_rows=1) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_order_the_steps_compute_what_is_defined(device: torch.device, dtype: torch.dtype) -> None:
    layer = Layer.make(make_spec(num_value_heads=4), device, num_records=RECORDS, dtype=dtype)
    layer, tolerance = replace(layer, is_in_order=True), TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    for rows in ([Row(0, 0, 40), Row(1, 0, 3)], [Row(0, 40, 5), Row(1, 2, 5)], [Row(0, 44, 5), Row(1, 7, 9)]):
        assert_same(layer, rows, tolerance=tolerance)


STEPS_OF_20 = {  # of a request: rows that are kept, and rejected drafts after them
    "one chunk": [(20, 0)],
    "token by token": [(1, 0)] * 20,
    "chunks": [(6, 0), (5, 0), (9, 0)],
    "verify blocks": [(6, 0), (2, 3), (5, 0), (1, 4), (1, 0), (4, 1), (1, 4)],
}


def rows_of(layer: Layer, steps: list[tuple[int, int]], *, has_neighbour: bool) -> torch.Tensor:
    """The results of the rows that are kept."""
    results, at = [], 0
    for kept, rejected in steps:
        rows = [Row(0, at, kept + rejected)]
        if has_neighbour:
            rows.insert(0, Row(1, 0, 1 + at % 7))
        results.append(layer.run_kernels(rows)[sum(row.num_rows for row in rows) - kept - rejected :][:kept])
        at += kept
    return torch.cat(results)


@pytest.mark.parametrize("is_in_order", [True, False])
def test_in_order_neither_chunks_nor_drafts_nor_other_requests_change_a_bit(
    device: torch.device, is_in_order: bool
) -> None:
    """Without the order they do: the negative control."""

    def found(steps: list[tuple[int, int]], *, has_neighbour: bool) -> torch.Tensor:
        layer = Layer.make(make_spec(key_head_dim=24), device, num_records=RECORDS)
        return rows_of(replace(layer, is_in_order=is_in_order), steps, has_neighbour=has_neighbour)

    expected = found(STEPS_OF_20["one chunk"], has_neighbour=False)
    same = [
        torch.equal(found(steps, has_neighbour=i % 2 == 1), expected) for i, steps in enumerate(STEPS_OF_20.values())
    ]
    assert all(same) if is_in_order else same[1:] == [False] * 3


def test_bfloat16_is_as_close_as_its_roundings(device: torch.device) -> None:
    layer = Layer.make(make_spec(num_value_heads=4), device, num_records=RECORDS, dtype=torch.bfloat16)
    for rows in ([Row(0, 0, 40), Row(1, 0, 3)], [Row(0, 40, 5), Row(1, 2, 5)], [Row(0, 44, 5), Row(1, 7, 1)]):
        assert_same(layer, rows, tolerance=BFLOAT16_TOLERANCE)


def test_keys_that_are_all_equal_lose_no_digits(device: torch.device) -> None:
    """The inverse of a triangle of ones: its powers, which nobody computes, would cancel to nothing."""
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    layer.parameters.log_rate.fill_(-20.0)  # no decay

    def make_equal(qkvz: torch.Tensor, ba: torch.Tensor) -> None:
        qkvz[:, : 2 * layer.spec.k_size] = 1.0
        ba.fill_(10.0)  # rates of one

    assert_same(replace(layer, change=make_equal), [Row(0, 0, launch.CHUNK)])


@pytest.mark.parametrize("padding", [0, 3])
def test_padding_touches_no_slot_and_its_rows_are_zeros(device: torch.device, padding: int) -> None:
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    rows = [Row(1, 0, 2), Row(0, 0, 3)]
    found, expected = layer.run_kernels(rows, num_padding=padding), layer.run_defined(rows)
    assert (found[: len(expected)] - expected).abs().max() < TOLERANCE
    assert not found[len(expected) :].any()
    for name, tensor in layer.kernels.tensors.items():
        untouched = tensor[NUM_SLOTS - 1].cpu()
        assert bool((untouched == 3).all() if name == "position" else untouched.isnan().all())


@pytest.mark.parametrize("name", ["state", "keys", "deltas", "decays", "window", "position"])
def test_a_changed_state_is_noticed(device: torch.device, name: str) -> None:
    """The negative control: without the change the step is as it is defined."""
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    assert_same(layer, [Row(0, 0, 4)])
    second = [Row(0, 3, 2)]
    changed = layer.copy()
    changed.kernels.tensors[name][0] += 1
    assert changed.error(second) > 100 * TOLERANCE
    assert_same(layer, second)


@pytest.mark.parametrize("is_in_order", [False, True])
def test_states_are_found_by_their_addresses(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, is_in_order: bool
) -> None:
    """As plugins find them: the tensors of two layers in one table, of which the kernels read the second one's."""
    layer = replace(Layer.make(make_spec(), device, num_records=RECORDS), is_in_order=is_in_order)
    decoy = layer.copy()
    tables = [cache.tensors[name].data_ptr() for cache in (decoy.kernels, layer.kernels) for name in cache.tensors]
    pools = torch.tensor(tables, device=device)
    names = ("convolve", "delta_verify", "delta_prompt", "delta_in_order", "finish")
    for kernel_name in (f"{name}_kernel" for name in names):
        monkeypatch.setattr(launch, kernel_name, _Pooled(getattr(launch, kernel_name), pools, first=6))
    placeholder = RecurrentCache(
        {name: torch.zeros_like(x) for name, x in layer.kernels.tensors.items()}, layer.kernels.spec
    )
    pooled = replace(layer, kernels=placeholder)
    for rows in ([Row(0, 0, 7), Row(1, 0, 3)], [Row(0, 7, 4), Row(1, 2, 2)], [Row(0, 9, 1)]):
        expected = layer.run_defined(rows)
        assert (pooled.run_kernels(rows) - expected).abs().max() < TOLERANCE
        assert max(layer.state_error(row) for row in rows) < TOLERANCE


class _Pooled:
    """A kernel whose states are at addresses of `pools` from `first` on."""

    def __init__(self, kernel: Any, pools: torch.Tensor, *, first: int) -> None:
        self._kernel, self._pools, self._first = kernel, pools, first

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            given = dict(zip(self._kernel.arg_names, args, strict=False))
            given |= {"state_pools": self._pools, "state_index": self._first}
            self._kernel[grid](*given.values(), **constants | {"POOLED": True})

        return run


def test_tensors_that_kernels_would_misread_are_refused(device: torch.device) -> None:
    layer = Layer.make(make_spec(), device, num_records=RECORDS)
    layer.kernels.tensors["state"].resize_(0)
    with pytest.raises(ValueError, match="state: expected shape"):
        layer.run_kernels([Row(0, 0, 1)])
