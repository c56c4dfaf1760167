"""The kernels of latent attention against the torch back end: what they write to pages, and what they attend to."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.cuda import latent_attention
from dflash_trt.kernels import latent_attention_launch
from tests.kernels.latent_steps import Step, Tensors, make_tensors, mla_of, run_kernels, run_ranks, run_reference
from tests.kernels.test_sampling_variants import Recorder

# Largest absolute error seen under the interpreter, times 3: 1e-6 in float32, 2e-3 in float16.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 8e-3}
if torch.cuda.is_available():
    TOLERANCE[torch.float32] = 4e-5
PAGE_TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
PUBLISHED = {"latent_dim": 512, "nope_dim": 128, "rope_dim": 64, "v_head_dim": 128}

STEPS = {
    "prompts of one token less than a page, a page, and one more": Step(rows=(15, 16, 17), contexts=(0, 0, 0)),
    "verify blocks behind page boundaries": Step(rows=(4, 1, 3, 2), contexts=(0, 31, 32, 15)),
    "a request without rows, rows without a request": Step(rows=(2, 0, 3), contexts=(5, 9, 40), num_extra_rows=3),
    "a prompt's chunk beside a verify block, 5 heads, halves": Step(
        rows=(30, 4), contexts=(20, 33), mla=mla_of(5, has_paired_rope=False)
    ),
    "a prompt that begins, its chunk behind a context, a short prompt and a verify block": Step(
        rows=(66, 64, 5, 4), contexts=(0, 9, 0, 33), mla=mla_of(2), page_size=32
    ),
    "a prompt of 65 tokens over FP8 pages": Step(rows=(65,), contexts=(0,), mla=mla_of(1), k_scale=0.02),
    "a prompt of the published sizes, float16": Step(
        rows=(130, 1), contexts=(0, 40), mla=mla_of(2, **PUBLISHED), page_size=32, dtype=torch.float16
    ),
    "16 heads, one tile a row, many splits": Step(rows=(3,), contexts=(600,), mla=mla_of(16), page_size=32),
    "34 heads in groups of 2": Step(rows=(2, 1), contexts=(3, 40), mla=mla_of(34)),
    "128 heads of the published sizes, float16": Step(
        rows=(2, 1), contexts=(30, 70), mla=mla_of(128, **PUBLISHED), page_size=32, dtype=torch.float16
    ),
    "16 heads of the published sizes, float16, pages of 16": Step(
        rows=(8, 1), contexts=(130, 0), mla=mla_of(16, **PUBLISHED), dtype=torch.float16
    ),
    "pages of 8": Step(rows=(4, 11), contexts=(21, 0), page_size=8, dtype=torch.float16),
    "FP8 pages, float16, 33 heads": Step(
        rows=(4, 1), contexts=(70, 16), mla=mla_of(33), page_size=32, dtype=torch.float16, k_scale=0.02
    ),
    "FP8 pages, float32": Step(rows=(4, 1), contexts=(30, 16), k_scale=0.02),
}


def error(got: Tensor, want: Tensor) -> float:
    """NaN counts as infinitely wrong."""
    return float((got.float() - want.float()).abs().nan_to_num(torch.inf).max())


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_rows_attend_as_on_the_torch_back_end(step: Step, device: torch.device, exact_fp8: None) -> None:
    tensors = make_tensors(step)
    assert_as_reference(step, *run_kernels(step, tensors, device), *run_reference(step, tensors))


def assert_as_reference(step: Step, got: Tensor, pages: Tensor, want: Tensor, expected: Tensor) -> None:
    """What rows attend to, and the pages that they have written."""
    num_rows = sum(step.rows)
    is_stored = ~pages.float().isnan()
    assert int(is_stored.all(-1).sum()) == num_rows + sum(step.contexts), "other rows were written"
    differences = (pages.float() - expected.float())[is_stored].abs()
    if step.k_scale is None:
        assert differences.max() <= PAGE_TOLERANCE[step.dtype]
    else:  # a number on the border between two codes may go either way
        assert (differences > 0).sum() <= 0.01 * differences.numel()
    assert error(got[:num_rows], want) <= TOLERANCE[step.dtype] * (1 if step.k_scale is None else 4)
    assert (got[num_rows:] == 0).all(), "rows that belong to no request were written"


DIVIDED = {
    "prompts and blocks, two ranks": (2, Step(rows=(15, 4, 1, 17), contexts=(0, 31, 32, 0))),
    "a rank without positions of a request, padded rows, four ranks": (
        4,
        Step(rows=(2, 0, 1, 1), contexts=(0, 9, 40, 1), num_extra_rows=3),
    ),
    "a prompt that begins, its chunk behind a context, two ranks": (
        2,
        Step(rows=(66, 40, 4), contexts=(0, 9, 33), mla=mla_of(2), page_size=32),
    ),
    "many splits, two ranks": (2, Step(rows=(3,), contexts=(1200,), mla=mla_of(16), page_size=64)),
    "published sizes, float16, eight ranks": (
        8,
        Step(rows=(3, 1), contexts=(130, 20), mla=mla_of(16, **PUBLISHED), page_size=128, dtype=torch.float16),
    ),
    "FP8 pages, two ranks": (2, Step(rows=(4, 1), contexts=(30, 16), page_size=32, k_scale=0.02)),
}


@pytest.mark.parametrize(("num_ranks", "step"), DIVIDED.values(), ids=DIVIDED.keys())
def test_ranks_that_divide_positions_attend_as_one(
    num_ranks: int, step: Step, device: torch.device, exact_fp8: None
) -> None:
    """Pages as of one rank, each position on one rank alone; the sums are joined as if they had not been divided."""
    tensors = make_tensors(step)
    assert_as_reference(step, *run_ranks(step, tensors, device, num_ranks=num_ranks), *run_reference(step, tensors))


def test_long_steps_are_exchanged_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end within requests, and the last has rows of no request alone; with the memory of one piece."""
    step = Step(rows=(5, 2), contexts=(3, 31), num_extra_rows=5)
    tensors = make_tensors(step)
    monkeypatch.setattr(latent_attention, "CONTEXT_PIECE_ROWS", 4)
    assert_as_reference(step, *run_ranks(step, tensors, device, num_ranks=2), *run_reference(step, tensors))


def test_prompts_that_begin_are_attended_directly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the direct form's kernel is not launched, their rows are zeros, and no others."""
    step = Step(rows=(64, 64, 63, 1), contexts=(0, 1, 0, 0), mla=mla_of(2))
    tensors = make_tensors(step)
    want, _ = run_reference(step, tensors)
    monkeypatch.setattr(latent_attention_launch, "latent_chunk_kernel", Recorder())
    got, _ = run_kernels(step, tensors, device)
    assert (got[:64] == 0).all()
    assert error(got[64:], want[64:]) <= TOLERANCE[step.dtype]


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Step, Tensors], tuple[Step, Tensors]]:
    return lambda step, tensors: (step, replace(tensors, **{name: change(getattr(tensors, name))}))


def _of_mla(**changes: object) -> Callable[[Step, Tensors], tuple[Step, Tensors]]:
    return lambda step, tensors: (replace(step, mla=step.mla.model_copy(update=changes)), tensors)


PERTURBATIONS: dict[str, Callable[[Step, Tensors], tuple[Step, Tensors]]] = {
    "a value of one head": _with("kv_b", lambda x: torch.cat((x[:-1], x[-1:] + 1))),
    "a norm's weight": _with("norm", lambda x: torch.cat((x[:-1], x[-1:] + 1))),
    "one rotated number of a query": _with("q_rope", lambda x: torch.cat((x[..., :-1], x[..., -1:] + 1), -1)),
    "halves in the place of pairs": _of_mla(has_paired_rope=False),
    "another scale": _of_mla(scale=0.31),
    "a context one token shorter": lambda step, tensors: (
        step,
        replace(tensors, requests=replace(tensors.requests, context_lens=tensors.requests.context_lens - 1)),
    ),
}


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_a_perturbed_reference_is_told_apart(name: str, device: torch.device) -> None:
    step = Step(rows=(3,), contexts=(20,))
    tensors = make_tensors(step)
    (got, _), (want, _) = run_kernels(step, tensors, device), run_reference(*PERTURBATIONS[name](step, tensors))
    assert error(got, want) > 100 * TOLERANCE[step.dtype]


def test_the_number_of_splits_changes_nothing_but_rounding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(rows=(2, 1), contexts=(400, 30))
    tensors, results = make_tensors(step), []
    for num_multiprocessors in (1, 7):
        monkeypatch.setattr(latent_attention_launch, "num_multiprocessors", lambda _, n=num_multiprocessors: n)
        monkeypatch.setattr("tests.kernels.latent_steps.num_multiprocessors", lambda _, n=num_multiprocessors: n)
        results.append(run_kernels(step, tensors, device)[0])
        assert error(results[-1], run_reference(step, tensors)[0]) <= TOLERANCE[step.dtype]
    assert not torch.equal(*results), "both launches cut the keys alike: the test compares nothing"
