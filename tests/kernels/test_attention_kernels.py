"""The attention kernels against their plain-PyTorch reference and against the network's own attention."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch import attention as torch_attention
from dflash_trt.backends.torch import attention_plan
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.kernels import attention_launch
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors, allocate_workspace
from dflash_trt.kernels.row_codes import FP8 as CODES_FP8
from dflash_trt.kernels.row_codes_launch import RowCodes, quantize_rows
from dflash_trt.network.ops import StepInputs
from tests.caches import cache_of
from tests.kernels import reference_attention
from tests.kernels.attention_steps import Heads, Step, Tensors, make_block, make_tensors, on
from tests.logit_rows import columns_off

FP8 = torch.float8_e4m3fn
# Largest absolute error seen under the interpreter, times 3 to 4: 8.4e-7 in float32, 9.8e-4 in float16. A GPU takes
# float32 products apart into three TF32 ones; what that costs is not measured, the allowance is for 2^-17 of a value.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
if torch.cuda.is_available():
    TOLERANCE[torch.float32] = 3e-5
VERIFY_ROWS = 4
SINKS = torch.tensor([0.5, -1.0, 2.0, 4.0])

STEPS = {
    "verify blocks, an empty context, page boundaries": Step(rows=(4, 1, 3, 2), contexts=(0, 31, 32, 15)),
    "one-token requests": Step(rows=(1, 1, 1), contexts=(0, 15, 16)),
    "a request without rows, rows without a request": Step(rows=(2, 0, 3), contexts=(5, 9, 40), num_extra_rows=3),
    "4k context in many splits": Step(rows=(1, 2), contexts=(4095, 70), page_size=64),
    "prefill chunk beside verify blocks": Step(rows=(1, 40, 4), contexts=(9, 90, 30)),
    "prefill chunk under a window": Step(
        rows=(150,), contexts=(130,), heads=Heads(num_heads=2, num_kv_heads=2), options=AttentionOptions(window=100)
    ),
    "20 requests": Step(rows=(1, 2) * 10, contexts=tuple(range(0, 60, 3)), heads=Heads(num_heads=2, num_kv_heads=1)),
    "window of one": Step(rows=(3, 1), contexts=(0, 33), options=AttentionOptions(window=1)),
    "window over splits": Step(rows=(2, 4), contexts=(700, 40), options=AttentionOptions(window=300)),
    "chunks: before a border, at it, behind it, across": Step(
        rows=(1, 1, 1, 4), contexts=(63, 64, 65, 62), options=AttentionOptions(chunk=64)
    ),
    "chunks that end inside of pages and blocks of keys": Step(
        rows=(4, 3, 40), contexts=(38, 700, 90), options=AttentionOptions(chunk=40)
    ),
    "a prefill chunk over many chunks, in whole blocks of keys": Step(
        rows=(300,), contexts=(100,), heads=Heads(num_heads=2, num_kv_heads=2), options=AttentionOptions(chunk=128)
    ),
    "chunks over splits, FP8 pages": Step(
        rows=(2, 4),
        contexts=(1500, 1022),
        dtype=torch.float16,
        page_dtype=FP8,
        options=AttentionOptions(chunk=1024, k_scale=0.5, v_scale=1.5),
    ),
    "chunk, window and sinks": Step(
        rows=(4, 1), contexts=(333, 20), options=AttentionOptions(chunk=100, window=50, sinks=SINKS)
    ),
    "sinks": Step(rows=(2, 4), contexts=(500, 0), options=AttentionOptions(sinks=SINKS)),
    "softcap": Step(rows=(2, 4), contexts=(150, 3), options=AttentionOptions(softcap=1.5)),
    "score scale": Step(rows=(2, 4), contexts=(150, 3), options=AttentionOptions(score_scale=0.4)),
    "window, sinks and softcap": Step(
        rows=(4, 1), contexts=(333, 20), options=AttentionOptions(window=50, sinks=SINKS, softcap=2.0)
    ),
    "8 query heads per K/V head": Step(rows=(4, 2), contexts=(20, 3), heads=Heads(num_heads=8, num_kv_heads=1)),
    "5 query heads per K/V head": Step(rows=(4, 2), contexts=(20, 3), heads=Heads(num_heads=5, num_kv_heads=1)),
    "as many K/V heads as heads": Step(rows=(4, 2), contexts=(20, 3), heads=Heads(num_heads=3, num_kv_heads=3)),
    "head_dim 128": Step(rows=(4, 2), contexts=(60, 3), heads=Heads(head_dim=128)),
    "head_dim 256": Step(rows=(4, 2), contexts=(60, 3), heads=Heads(head_dim=256)),
    "head_dim 512": Step(rows=(4, 2), contexts=(60, 3), heads=Heads(head_dim=512)),
    "head_dim 512, a prefill chunk in halves of a head beside a verify block": Step(
        rows=(3, 30), contexts=(90, 7), heads=Heads(head_dim=512), dtype=torch.float16
    ),
    "head_dim 512, splits in halves of a head": Step(
        rows=(4,), contexts=(700,), heads=Heads(num_heads=16, num_kv_heads=1, head_dim=512), dtype=torch.float16
    ),
    "head_dim 384, FP8 pages under a window": Step(
        rows=(4, 2),
        contexts=(60, 3),
        heads=Heads(num_heads=8, num_kv_heads=1, head_dim=384),
        dtype=torch.float16,
        page_dtype=FP8,
        options=AttentionOptions(k_scale=0.5, v_scale=1.5, window=20),
    ),
    "head_dim 80": Step(rows=(4, 2), contexts=(60, 3), heads=Heads(head_dim=80)),
    "float16": Step(rows=(4, 2), contexts=(60, 3), dtype=torch.float16),
    "FP8 pages, float16": Step(
        rows=(4, 2),
        contexts=(300, 3),
        dtype=torch.float16,
        page_dtype=FP8,
        options=AttentionOptions(k_scale=0.5, v_scale=1.5),
    ),
    "FP8 pages, float32": Step(
        rows=(4, 2), contexts=(60, 3), page_dtype=FP8, options=AttentionOptions(k_scale=0.5, v_scale=1.5)
    ),
}

AHEAD = AttentionOptions(is_causal=False)
DRAFTS = {
    "all of the context and the block": Step(rows=(), contexts=(0, 31, 32, 200), options=AHEAD),
    "causal": Step(rows=(), contexts=(7, 40)),
    "window on both sides": Step(rows=(), contexts=(7, 40, 300), options=replace(AHEAD, window=3)),
    "causal window": Step(rows=(), contexts=(7, 40, 300), options=AttentionOptions(window=20)),
    "anchored window": Step(rows=(), contexts=(2, 40, 300), options=replace(AHEAD, window=3, is_window_anchored=True)),
    "causal anchored window over splits": Step(
        rows=(), contexts=(7, 40, 700), options=AttentionOptions(window=300, is_window_anchored=True)
    ),
    "anchored window in whole blocks of keys": Step(
        rows=(),
        contexts=(7, 700),
        heads=Heads(num_heads=16, num_kv_heads=1),
        options=replace(AHEAD, window=400, is_window_anchored=True),
    ),
    "long context in splits": Step(rows=(), contexts=(1500, 3), heads=Heads(head_dim=128), page_size=32, options=AHEAD),
    "sinks": Step(rows=(), contexts=(150, 0), options=replace(AHEAD, sinks=SINKS)),
    "FP8 pages": Step(
        rows=(),
        contexts=(150, 0),
        dtype=torch.float16,
        page_dtype=FP8,
        options=replace(AHEAD, k_scale=0.5, v_scale=1.5),
    ),
}
DRAFT_WIDTH = 5
ANCHORED = ("anchored window", "causal anchored window over splits", "anchored window in whole blocks of keys")


def run_step(step: Step, tensors: Tensors, device: torch.device) -> Tensor:
    """The kernels' result, on the CPU; what no kernel wrote is NaN."""
    heads, moved = step.heads, tensors.to(device)
    attended = torch.full_like(moved.q, torch.nan)
    attention_launch.attend_pages(
        moved.q,
        moved.pages,
        moved.requests,
        on(step.options, device),
        workspace=allocate_workspace(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, device=device),
        num_verify_rows=VERIFY_ROWS,
        attended=attended,
    )
    return attended.cpu()


def run_draft(step: Step, tensors: Tensors, block: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    heads, moved = step.heads, tensors.to(device)
    attended = torch.full_like(moved.q, torch.nan)
    attention_launch.attend_draft(
        moved.q,
        (block[0].to(device), block[1].to(device)),
        moved.pages,
        moved.requests,
        on(step.options, device),
        workspace=allocate_workspace(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, device=device),
        attended=attended,
    )
    return attended.cpu()


def draft_tensors(step: Step) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    """Queries for every block; the pages hold the context alone."""
    wide = replace(step, rows=(DRAFT_WIDTH,) * len(step.contexts))
    return make_tensors(wide, stored_rows=step.contexts), make_block(step, DRAFT_WIDTH)


def error(got: Tensor, want: Tensor) -> float:
    """NaN counts as infinitely wrong."""
    difference = (got.float() - want.float()).abs()
    return float(difference.nan_to_num(torch.inf).max())


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_steps_rows_attend_as_the_reference_says(step: Step, device: torch.device) -> None:
    tensors = make_tensors(step)
    got, want = run_step(step, tensors, device), reference(step, tensors)
    num_rows = sum(step.rows)
    assert error(got[:num_rows], want[:num_rows]) <= TOLERANCE[step.dtype]
    assert got[num_rows:].isnan().all(), "rows that belong to no request were written"


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_attend_as_the_reference_says(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    num_requests = draw.randint(1, 4)
    step = Step(
        rows=(*(draw.randint(0, 9) for _ in range(num_requests - 1)), draw.randint(1, 9)),
        contexts=tuple(draw.randint(0, 200) for _ in range(num_requests)),
        heads=Heads(num_heads=draw.randint(1, 8), num_kv_heads=1) if seed % 2 else Heads(),
        page_size=draw.choice([8, 16, 32, 128]),
        options=AttentionOptions(window=draw.choice([None, 2, 17, 64, 150])),
    )
    tensors = make_tensors(step, seed=seed)
    assert error(run_step(step, tensors, device), reference(step, tensors)) <= TOLERANCE[step.dtype]


@pytest.mark.parametrize("step", DRAFTS.values(), ids=DRAFTS.keys())
def test_draft_blocks_attend_as_the_reference_says(step: Step, device: torch.device) -> None:
    tensors, block = draft_tensors(step)
    got = run_draft(step, tensors, block, device)
    want = reference_attention.attend_draft(tensors.q, block, tensors.pages, tensors.requests, step.options)
    assert error(got, want) <= TOLERANCE[step.dtype]


def reference(step: Step, tensors: Tensors) -> Tensor:
    return reference_attention.attend_pages(tensors.q, tensors.pages, tensors.requests, step.options)


def test_pages_before_a_chunk_are_not_read(device: torch.device) -> None:
    """A weight of 0 would not hide what they hold. Negative control: the page where the chunk begins."""
    chunk, page_size = 64, 16  # a chunk is whole blocks of keys
    step = Step(rows=(1, 2, 40), contexts=(64, 190, 128), options=AttentionOptions(chunk=chunk))
    tensors = make_tensors(step)
    want, pages = reference(step, tensors), tensors.pages.clone()
    firsts = [context // chunk * chunk // page_size for context in step.contexts]
    for request, first in enumerate(firsts):
        pages[tensors.requests.page_table[request, :first]] = torch.nan
    assert error(run_step(step, replace(tensors, pages=pages), device), want) <= TOLERANCE[step.dtype]
    pages[tensors.requests.page_table[1, firsts[1]]] = torch.nan
    assert run_step(step, replace(tensors, pages=pages), device)[1:3].isnan().all()


def _one_key_too_few(step: Step) -> Step:
    window = step.options.window
    assert window is not None
    return replace(step, options=replace(step.options, window=window - 1))


CROSSING = "chunks: before a border, at it, behind it, across"


def _chunks_of(size: int | None) -> Callable[[Step], Step]:
    return lambda step: replace(step, options=replace(step.options, chunk=size))


PERTURBATIONS: dict[str, tuple[str, Callable[[Step], Step]]] = {
    "one key too few in the window": ("window over splits", _one_key_too_few),
    "a border one position later": (CROSSING, _chunks_of(65)),
    "a border one position earlier": (CROSSING, _chunks_of(63)),
    "no borders": ("chunks over splits, FP8 pages", _chunks_of(None)),
    "a window in place of chunks": (
        CROSSING,
        lambda step: replace(step, options=AttentionOptions(window=step.options.chunk)),
    ),
    "no sinks": ("sinks", lambda step: replace(step, options=AttentionOptions())),
    "no softcap": ("softcap", lambda step: replace(step, options=AttentionOptions())),
    "no score scale": ("score scale", lambda step: replace(step, options=AttentionOptions())),
    "another k_scale": ("FP8 pages, float32", lambda step: replace(step, options=AttentionOptions(v_scale=1.5))),
    "another v_scale": ("FP8 pages, float32", lambda step: replace(step, options=AttentionOptions(k_scale=0.5))),
}


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_a_perturbed_reference_is_told_apart(name: str, device: torch.device) -> None:
    case, perturb = PERTURBATIONS[name]
    step = STEPS[case]
    tensors = make_tensors(step)
    got, want = run_step(step, tensors, device), reference(perturb(step), tensors)
    assert error(got, want) > 100 * TOLERANCE[step.dtype]


def test_a_context_that_is_one_row_longer_or_in_another_page_is_told_apart(device: torch.device) -> None:
    step = Step(rows=(2, 2), contexts=(33, 33))
    tensors = make_tensors(step)
    got = run_step(step, tensors, device)
    shorter = replace(tensors, requests=replace(tensors.requests, context_lens=tensors.requests.context_lens - 1))
    swapped = replace(tensors, requests=replace(tensors.requests, page_table=tensors.requests.page_table.flip(0)))
    for perturbed in (shorter, swapped):
        assert error(got, reference(step, perturbed)) > 100 * TOLERANCE[step.dtype]


def test_masks_of_the_draft_are_told_apart(device: torch.device) -> None:
    step = DRAFTS["window on both sides"]
    tensors, block = draft_tensors(step)
    got = run_draft(step, tensors, block, device)
    for options in (
        AttentionOptions(window=3, is_causal=True),
        AttentionOptions(window=4, is_causal=False),
        AttentionOptions(is_causal=False),
    ):
        want = reference_attention.attend_draft(tensors.q, block, tensors.pages, tensors.requests, options)
        assert error(got, want) > 100 * TOLERANCE[step.dtype]


SPLIT_STEPS = {
    "small tile": Step(rows=(2, 1), contexts=(2000, 200), heads=Heads(num_heads=2, num_kv_heads=1)),
    "verify tile, windowed": Step(
        rows=(16,), contexts=(1100,), heads=Heads(num_heads=4, num_kv_heads=1), options=AttentionOptions(window=900)
    ),
    "prefill tile": Step(rows=(40,), contexts=(1100,), heads=Heads(num_heads=2, num_kv_heads=1)),
}


@pytest.mark.parametrize("step", SPLIT_STEPS.values(), ids=SPLIT_STEPS.keys())
def test_the_number_of_splits_changes_nothing_but_rounding(
    step: Step, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors(step)
    want = reference(step, tensors)
    results = []
    for num_multiprocessors in (0, 5):
        monkeypatch.setattr(attention_launch, "num_multiprocessors", lambda _, n=num_multiprocessors: n)
        results.append(run_step(step, tensors, device))
        assert error(results[-1], want) <= TOLERANCE[step.dtype]
    assert not torch.equal(*results), "both launches cut the keys alike: the test compares nothing"


def step_inputs(requests: RequestTensors, num_rows: list[int]) -> StepInputs[Tensor]:
    contexts = requests.context_lens.tolist()
    positions = [torch.arange(c, c + n) for c, n in zip(contexts, num_rows, strict=True)]
    none = torch.empty(0)
    return StepInputs(
        token_ids=none,
        positions=torch.cat(positions).int(),
        token_offsets=requests.token_offsets,
        context_lens=requests.context_lens,
        page_table=requests.page_table,
        logit_rows=none,
        num_candidates=none,
        **columns_off(0),
    )


@pytest.mark.parametrize("window", [None, 20])
def test_kernels_agree_with_the_networks_attention(device: torch.device, window: int | None) -> None:
    step = Step(rows=(4, 1, 9), contexts=(0, 40, 30), options=AttentionOptions(window=window))
    tensors = make_tensors(step)
    # The network's plan writes the step's K/V itself: hand it what the pages hold already.
    pages = tensors.pages.nan_to_num(0.0)
    inputs = step_inputs(tensors.requests, list(step.rows))
    plan = attention_plan.plan_attention(inputs, page_size=step.page_size, num_draft_tokens=VERIFY_ROWS - 1)
    flat = pages.view(-1, *pages.shape[3:])
    k, v = flat[plan.slots.k], flat[plan.slots.v]
    want = torch_attention.attend_rows(plan, tensors.q, k, v, cache_of(pages), AttentionMask(window=window))
    got = run_step(step, tensors, device)
    assert error(got, want.view_as(got)) <= TOLERANCE[step.dtype]


@pytest.mark.parametrize("name", ANCHORED)
def test_an_anchored_window_is_told_from_one_that_moves_with_the_slot(name: str, device: torch.device) -> None:
    step = DRAFTS[name]
    tensors, block = draft_tensors(step)
    got = run_draft(step, tensors, block, device)
    assert step.options.window is not None
    for wrong in (
        replace(step.options, is_window_anchored=False),
        replace(step.options, window=step.options.window - 1),
        replace(step.options, window=step.options.window + 1),
        replace(step.options, is_causal=not step.options.is_causal),
    ):
        want = reference_attention.attend_draft(tensors.q, block, tensors.pages, tensors.requests, wrong)
        assert error(got, want) > 100 * TOLERANCE[step.dtype]


def test_the_tokens_of_a_step_have_no_anchor(device: torch.device) -> None:
    step = Step(rows=(2,), contexts=(9,), options=AttentionOptions(window=4, is_window_anchored=True))
    with pytest.raises(ValueError, match="is_window_anchored: expected False"):
        run_step(step, make_tensors(step), device)


def test_draft_blocks_have_no_chunks(device: torch.device) -> None:
    step = replace(DRAFTS["causal"], options=AttentionOptions(chunk=4))
    tensors, block = draft_tensors(step)
    with pytest.raises(ValueError, match="chunk: expected None, found 4"):
        run_draft(step, tensors, block, device)


@pytest.mark.parametrize(
    "name", ["all of the context and the block", "window on both sides", "causal window", *ANCHORED]
)
def test_kernels_agree_with_the_networks_draft_attention(device: torch.device, name: str) -> None:
    step = DRAFTS[name]
    tensors, block = draft_tensors(step)
    requests = tensors.requests
    plan = attention_plan.plan_blocks(
        requests.page_table, requests.context_lens, page_size=step.page_size, num_slots=DRAFT_WIDTH
    )
    names = ("window", "is_causal", "is_window_anchored")
    attention = AttentionMask(**{name: getattr(step.options, name) for name in names})
    pages = tensors.pages.nan_to_num(0.0)
    want = torch_attention.attend_blocks(plan, tensors.q, *block, cache_of(pages), attention)
    got = run_draft(step, tensors, block, device)
    assert error(got, want.view_as(got)) <= TOLERANCE[step.dtype]


def test_wrong_tensors_are_refused_with_what_was_expected(device: torch.device) -> None:
    step = Step(rows=(2, 2), contexts=(3, 3))
    tensors = make_tensors(step)
    requests = tensors.requests
    wrong = {
        r"token_offsets: expected torch\.int32, found torch\.int64": replace(
            tensors, requests=replace(requests, token_offsets=requests.token_offsets.long())
        ),
        r"page_table: expected shape \[2, any\], found \[1, 2\]": replace(
            tensors, requests=replace(requests, page_table=requests.page_table[:1])
        ),
        r"pages: expected torch\.float32 or torch\.float8_e4m3fn, found torch\.float16": replace(
            tensors, pages=tensors.pages.half()
        ),
        r"page_size: expected a power of two, found 15": replace(tensors, pages=tensors.pages[:, :, :15].contiguous()),
        "q: expected a multiple of 2 heads, found 3": replace(tensors, q=tensors.q[:, :3].contiguous()),
        "q: expected a dense row-major tensor": replace(
            tensors, q=tensors.q.transpose(0, 1).contiguous().transpose(0, 1)
        ),
    }
    for message, perturbed in wrong.items():
        with pytest.raises(ValueError, match=message):
            run_step(step, perturbed, device)


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    step = Step(rows=(1,), contexts=(3,))
    tensors = make_tensors(step).to(device)
    with pytest.raises(ValueError, match=r"workspace: expected at least .* elements, found 16"):
        attention_launch.attend_pages(
            tensors.q,
            tensors.pages,
            tensors.requests,
            step.options,
            workspace=torch.empty(16, device=device),
            num_verify_rows=VERIFY_ROWS,
        )


@pytest.mark.parametrize(
    "name", ["sinks", "4k context in many splits", "prefill chunk beside verify blocks", "float16"]
)
def test_codes_for_the_next_gemm_are_those_of_the_stored_result(name: str, device: torch.device) -> None:
    """Of tiles in one split and in several; the negative control is the scale."""
    step = STEPS[name]
    tensors, options = make_tensors(step).to(device), on(step.options, device)
    attended, scale = torch.zeros_like(tensors.q), torch.tensor([0.013], device=device)
    codes = RowCodes.allocate(CODES_FP8, scale, len(tensors.q), attended[0].numel())
    words = {
        "workspace": allocate_workspace(kv_heads=step.heads.num_kv_heads, head_dim=step.heads.head_dim, device=device),
        "num_verify_rows": VERIFY_ROWS,
        "attended": attended,
    }
    given = (tensors.q, tensors.pages, tensors.requests, options)
    attention_launch.attend_pages(*given, **words, codes=codes)
    finished = attention_launch.attend_pages(*given, **words).flatten(1)
    assert torch.equal(codes.values.float(), quantize_rows(finished, CODES_FP8, scale).values.float())
    assert not torch.equal(codes.values.float(), quantize_rows(finished, CODES_FP8, 2 * scale).values.float())


def test_codes_of_draft_blocks_are_those_of_the_stored_result(device: torch.device) -> None:
    step = DRAFTS["long context in splits"]
    tensors, block = draft_tensors(step)
    tensors, scale = tensors.to(device), torch.tensor([0.02], device=device)
    codes = RowCodes.allocate(CODES_FP8, scale, len(tensors.q), tensors.q[0].numel())
    given = (tensors.q, tuple(x.to(device) for x in block), tensors.pages, tensors.requests, step.options)
    heads = step.heads
    workspace = allocate_workspace(kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, device=device)
    attention_launch.attend_draft(*given, workspace=workspace, codes=codes)
    finished = attention_launch.attend_draft(*given, workspace=workspace).flatten(1)
    assert torch.equal(codes.values.float(), quantize_rows(finished, CODES_FP8, scale).values.float())
