"""What is not a request's own changes no bit of it: free memory holds NaN, infinity or garbage, a mate overflows.

The law takes the tensors from the executor itself and the kinds of state from `core/state_spec.py`: a new one fails
`test_every_kind...` until somebody has decided what is foreign in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dflash_trt import SamplingParams
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.torch import attention_plan, gated_delta
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core import state_spec
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.request import GenerationOutput, Request
from dflash_trt.core.step_plan import StepHandle, StepPlan, StepResult, StepRows
from dflash_trt.network.state import Cache, LatentCache, RecurrentCache, RowCache
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.dflash2_files import make_dflash2_drafter
from tests.engines import make_executor, make_gpu_executor
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma

VOCAB_SIZE, NUM_NEW, NUM_SLOTS = 12, 14, 3
SHARED = [(5 * i * i + i) % VOCAB_SIZE for i in range(26)]
PROMPTS = [[*SHARED, 8, 4], [7], SHARED + [3] * 5, [2, 9, 4], SHARED[:20], [*SHARED, 8, 4, 4], [3] * 11]
BAD = "1"  # the request whose own state is spoilt

_target = partial(make_target, vocab_size=VOCAB_SIZE, tokenizer=False)
_small = {"num_hidden_layers": 2}
_windowed = partial(
    make_zlab_drafter, block_size=4, head_dim=16, layer_types=["sliding_attention", "full_attention"], sliding_window=9
)
_taps = {"target_layer_ids": (0, 1)}


AnyExecutor = Any  # TorchExecutor, TorchGpuExecutor or TensorRTExecutor


@dataclass(frozen=True, kw_only=True)
class Pair:
    target: Callable[[Path], Path]
    drafter: Callable[..., Path]
    options: dict[str, Any]  # of the executor


def _eagle3(path: Path, *, target_dir: Path) -> Path:
    from tests.eagle3_files import save_eagle3_head  # skips without `speculators`

    return save_eagle3_head(path, target_dir=target_dir)


def _mtp_target(path: Path) -> Path:
    from tests.mtp_files import make_mtp_target  # skips without `speculators`

    return make_mtp_target(path, family="qwen3_5_text", vocab_size=VOCAB_SIZE, tokenizer=False)


def _own_head(path: Path, *, target_dir: Path) -> Path:
    return target_dir


FP8 = QuantizationSpec(
    target_kv=(LayerKvScales(k=0.02, v=0.01),) * 2, draft_kv=(LayerKvScales(k=0.03, v=0.007), LayerKvScales())
)
PAIRS = {
    "windows, CPU kernels": Pair(
        target=partial(make_gemma, family="gemma3_text", vocab_size=VOCAB_SIZE, head_dim=32),
        drafter=partial(_windowed, head_dim=32),
        options={"has_page_groups": True},
    ),
    "FP8 pages": Pair(
        target=partial(_target, **_small), drafter=partial(_windowed, **_taps), options={"quantization": FP8}
    ),
    "experts": Pair(
        target=partial(_target, family="qwen3_moe", **_small), drafter=partial(_windowed, **_taps), options={}
    ),
    "latents": Pair(
        target=partial(_target, family="deepseek_v3", **_small), drafter=partial(_windowed, **_taps), options={}
    ),
    "sinks, DFlash2": Pair(
        target=partial(_target, family="gpt_oss", **_small),
        drafter=partial(make_dflash2_drafter, block_size=4, head_dim=16, **_taps),
        options={"has_page_groups": True},
    ),
    "delta nets": Pair(
        target=partial(_target, family="qwen3_5_text"),
        drafter=partial(_windowed, target_layer_ids=(0, 2)),
        options={"num_snapshots": 3},
    ),
    "Gemma 4": Pair(
        target=partial(make_gemma, family="gemma4_text", vocab_size=VOCAB_SIZE, **EVERYTHING),
        drafter=partial(make_zlab_drafter, block_size=4, head_dim=16),
        options={"has_page_groups": True},
    ),
    "EAGLE-3": Pair(target=_target, drafter=_eagle3, options={}),
    "MTP head, delta nets": Pair(target=_mtp_target, drafter=_own_head, options={"num_snapshots": 3}),
}


class Foreign:
    """An executor with foreign content in what no request owns, or one since this step alone; None: as it is.

    `spoils_at` is a step before which all that request BAD owns gets the content instead.
    """

    can_retry = False

    def __init__(self, executor: AnyExecutor, value: float | None, *, spoils_at: int | None = None) -> None:
        self.limits, self._executor, self._value, self._spoils_at = executor.limits, executor, value, spoils_at
        self.has_queue = executor.has_queue
        self.scheduler: Scheduler
        self.drafts: list[Any] = []
        self.num_accepted = self.num_rejected = self._num_submitted = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        if self._value is not None and self._spoils_at is None:
            self._fill(*self._unowned(plan))
        elif self._value is not None and self._num_submitted == self._spoils_at:
            self._fill(*self._owned_by_bad(), fills_integers=False)
        self._num_submitted += 1
        return _Recorded(self._executor.submit(plan), partial(self._record, plan.rows))

    def _record(self, rows: StepRows, result: StepResult) -> None:
        self.drafts.append(list(zip(rows.request_ids, result.draft_tokens.tolist(), strict=True)))
        self.num_accepted += int(result.num_accepted.sum())
        self.num_rejected += int((rows.num_candidates - result.num_accepted).sum())

    def _unowned(self, plan: StepPlan) -> tuple[list[list[int]], list[int]]:
        """Pages by group, with those that padding writes to and that nobody reads; and slots, snapshots among them."""
        limits, pool = self.limits, self.scheduler._request_pool
        pools = [pool.store._pool, *(window._pool for window in pool.store.windows)]
        pages = [[i for i in range(one.num_pages) if one.num_owners(i) == 0] for one in pools]
        for group, tensor in paged_tensors(self._executor):
            if not group or not keeps_blank_pages(self._executor):
                pages[group] += range(pools[group].num_pages, len(tensor))
        updates = plan.page_updates
        entries = zip(updates.slots.tolist(), updates.columns.tolist(), strict=True)
        for (slot, column), page_id in dict(zip(entries, updates.page_ids.tolist(), strict=True)).items():  # the last
            group, index = divmod(column, limits.max_pages)
            stop = pool.windows._stop[group - 1, slot] if group else pool.table.num_pages[slot]
            if pool.table.context_len[slot] <= index * limits.page_size and index < stop:  # nothing is computed there
                pages[group].append(page_id)
        begins = plan.rows.slot_ids[plan.rows.context_lens == 0].tolist()
        padding = limits.max_batch_size  # its slot; snapshots are behind it
        slots = [slot for slot in range(padding) if pool.table.sequences[slot] is None] + begins + [padding]
        return pages, slots + [padding + 1 + i for i in pool.store.snapshots._free]

    def _owned_by_bad(self) -> tuple[list[list[int]], list[int]]:
        pool = self.scheduler._request_pool
        [sequence] = [sequence for sequence in pool.running if sequence.request_id == BAD]
        slot = sequence.slot
        assert slot is not None and len(pool.running) > 1, "it has mates"
        windows = [pool.windows._page_ids(g, slot) for g in range(len(self.limits.page_windows))]
        return [pool.page_ids(sequence), *windows], [slot]

    @torch.inference_mode()
    def _fill(self, pages: list[list[int]], slots: list[int], *, fills_integers: bool = True) -> None:
        assert self._value is not None
        with getattr(self._executor, "on_stream", nullcontext)():
            for group, tensor in paged_tensors(self._executor):
                _overwrite(tensor, pages[group], self._value)
            for tensor in slot_tensors(self._executor):
                if tensor.dtype.is_floating_point or fills_integers:
                    _overwrite(tensor, [slot for slot in slots if slot < len(tensor)], self._value)
            for tensor in scratch_tensors(self._executor) if fills_integers else ():
                _overwrite(tensor, range(len(tensor)), self._value)


def keeps_blank_pages(executor: AnyExecutor) -> bool:
    """The GPU's kernels load the blank page beside the keys of a window, and it stays zeros."""
    return not isinstance(executor, TorchExecutor | TensorRTExecutor)


class _Recorded:
    """A StepHandle that passes its result on."""

    def __init__(self, handle: StepHandle, record: Callable[[StepResult], None]) -> None:
        self._handle, self._record = handle, record

    def result(self) -> StepResult:
        result = self._handle.result()
        self._record(result)
        return result

    @property
    def elapsed_s(self) -> float:
        return self._handle.elapsed_s


def paged_tensors(executor: AnyExecutor) -> Iterator[tuple[int, Tensor]]:
    """Page group and pages of every state that is kept by token position."""
    if isinstance(executor, TensorRTExecutor):
        yield from ((executor.state.group_of(name), pages) for name, pages in executor.state.pages.items())
        return
    state = executor._state
    for cache in (*state.target_kv, *state.draft_kv, *([state.draft_features] if state.draft_features else ())):
        if isinstance(cache, Cache):
            yield cache.group, cache.tensor
        elif isinstance(cache, LatentCache | RowCache):
            yield 0, cache.tensor


def slot_tensors(executor: AnyExecutor) -> Iterator[Tensor]:
    """What is kept by slot; page tables hold ids, and are left as requests leave them."""
    if isinstance(executor, TensorRTExecutor):
        yield from executor.state.slots.values()
        slots = executor._buffers.staging.slots
    else:
        for cache in executor._state.target_kv:
            if isinstance(cache, RecurrentCache):
                yield from cache.tensors.values()
        slots = executor._slots if isinstance(executor, TorchExecutor) else executor._staging.slots
    yield from (slots.token_ids, slots.draft_topk_ids, slots.draft_topk_probs, slots.context_lens)
    rules = None if isinstance(executor, TorchExecutor | TensorRTExecutor) else executor._rules._tensors
    if rules is not None:  # `has_rules` is the host's word on the others
        yield from (getattr(rules, item.name) for item in fields(rules) if item.name != "has_rules")


def scratch_tensors(executor: AnyExecutor) -> Iterator[Tensor]:
    """What a step writes before it reads it: the GPU executor's."""
    if isinstance(executor, TorchExecutor | TensorRTExecutor):
        return
    resources = executor._resources
    yield from (resources.attention_workspace, resources.attended, resources.attended_codes)
    yield from resources.sampling_workspace.values()
    yield from (executor._tables._memory, executor._results._device.memory, executor._staging._assembled.memory)
    if resources.latents is not None:
        yield from (resources.latents.queries, resources.latents.attended)


def _overwrite(tensor: Tensor, rows: Sequence[int], value: float) -> None:
    if not rows or not tensor.numel():
        return
    if tensor.dtype == torch.float8_e4m3fn:  # which has no infinity
        content = torch.full_like(tensor[:1], max(value, -448.0) if abs(value) < torch.inf else torch.nan)
        tensor.view(torch.uint8)[rows] = content.view(torch.uint8)
    else:
        tensor[rows] = value if tensor.dtype.is_floating_point else min(1_000_003, torch.iinfo(tensor.dtype).max)


def serve(
    executor: Foreign,
    *,
    prompts: list[list[int]] = PROMPTS,
    num_new: int = NUM_NEW,
    reuses: bool = True,
    cancels_after: int | None = None,
    overlaps: bool = False,
    options: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> list[GenerationOutput]:
    """All prompts on few slots: chunks beside verify blocks, hits, preemptions, another K by batch size.

    `options` are more of SamplingParams, by the number of a prompt.
    """
    most = executor.limits.max_draft_len
    policy = BatchSizeDraftLength({1: most, 2: most, NUM_SLOTS: 1})
    scheduler = Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=reuses), policy)
    executor.scheduler, loop = scheduler, EngineLoop(executor, scheduler, overlaps=overlaps)
    streams = []
    for i, prompt in enumerate(prompts):
        given = {"temperature": 0.8, "seed": i} if i % 3 == 2 else {}
        given |= options.get(i, {})
        sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=True, **given)
        streams.append(loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)))
    number = 0
    while loop.step():
        number += 1
        loop.check_integrity()
        if number == cancels_after:
            loop.cancel(BAD)
        if reuses and number % 5 == 3:
            scheduler.preempt(str(number % len(prompts)))
    return [stream.result(timeout_s=1) for stream in streams]


def contents(outputs: list[GenerationOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module", params=PAIRS)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchExecutor]:
    executor = open_pair(request.param, tmp_path_factory.mktemp("pair"))
    yield executor
    executor.close()


def open_pair(name: str, root: Path, device: torch.device | None = None, **more: Any) -> AnyExecutor:
    """On the GPU's kernels with a device, else on the CPU. `more` are sizes of `tests/engines.py`."""
    pair = PAIRS[name]
    target, drafter = open_files(pair, root)
    sizes = {"max_batch_size": NUM_SLOTS, "max_num_tokens": 20, "max_seq_len": 64, "budget_bytes": 1 << 20, **more}
    if device is not None:
        return make_gpu_executor(target, drafter, device=device, **{"quantization": None} | sizes | pair.options)
    return make_executor(target, drafter, has_kernels="kernels" in name or "DFlash2" in name, **sizes | pair.options)


def open_files(pair: Pair, root: Path) -> tuple[Path, Path]:
    """Target and drafter, made where they are not yet."""
    if not (root / "target").exists():
        pair.drafter(root / "drafter", target_dir=pair.target(root / "target"))
    has_files = (root / "drafter").exists()
    return root / "target", root / ("drafter" if has_files else "target")


CONTENTS = [torch.nan, torch.inf, -3e4]


def test_what_nobody_owns_changes_no_bit_of_texts_log_probabilities_and_drafts(executor: AnyExecutor) -> None:
    serve(Foreign(executor, None))  # memory that was used
    statistics = check_free_memory(executor).statistics()
    assert statistics.num_prefix_hit_tokens > 0 and statistics.num_preemptions > 0


def test_a_request_whose_state_is_not_finite_fails_alone(executor: AnyExecutor) -> None:
    check_mates(executor)


def check_free_memory(executor: AnyExecutor, contents_of: Sequence[float] = CONTENTS, **given: Any) -> Scheduler:
    """What is free holds each of these, and everything is as in a clean run, whose scheduler is returned."""
    clean = Foreign(executor, None)
    expected = contents(serve(clean, **given))
    assert clean.num_rejected > 0
    for value in contents_of:
        foreign = Foreign(executor, value)
        assert contents(serve(foreign, **given)) == expected
        assert foreign.drafts == clean.drafts
    return clean.scheduler


def check_mates(executor: AnyExecutor, *, spoils_at: int = 3, **given: Any) -> None:
    """Mates and successors of a request whose state holds NaN are those of a run in which it is cancelled at the step
    that ends it.
    """
    spoilt = Foreign(executor, torch.nan, spoils_at=spoils_at)
    found = serve(spoilt, reuses=False, **given)
    assert [output.request_id for output in found if output.finish_reason == "error"] == [BAD]
    last = max(i for i, rows in enumerate(spoilt.drafts) if any(name == BAD for name, _ in rows))
    expected = serve(Foreign(executor, None), reuses=False, cancels_after=last + 1, **given)
    bad = int(BAD)
    assert contents(found[:bad] + found[bad + 1 :]) == contents(expected[:bad] + expected[bad + 1 :])


def test_every_kind_of_state_and_every_tensor_of_an_executor_is_decided(executor: AnyExecutor) -> None:
    kinds = set(get_args(state_spec.LayerState))
    assert kinds == {
        state_spec.PagedKv,
        state_spec.PagedLatent,
        state_spec.SharedKv,
        state_spec.Recurrent,
        state_spec.PagedRows,
    }, "decide in paged_tensors or slot_tensors what is foreign in it"
    decided = [tensor for _, tensor in paged_tensors(executor)] + list(slot_tensors(executor))
    decided += [executor._slots.page_table, *executor._slots._tables]
    # Weights, also for steps without rows, tables, and what each plan overwrites.
    constant = ("network", "_idle", "_rope_tables", "_inputs")
    found = _tensors({name: value for name, value in vars(executor).items() if name not in constant})
    known = {tensor.data_ptr() for tensor in decided}
    assert {tensor.data_ptr() for tensor in found} <= known, "a tensor that the law does not fill"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, item.name) for item in fields(value)])
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("dflash_trt."):
        yield from _tensors(vars(value))


def _multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale records, hidden by a weight of 0."""

    def fold(state: Tensor, keys: Tensor, deltas: Tensor, decays: Tensor, is_folded: Tensor) -> Tensor:
        kept = is_folded[:, None].float()
        return honest(state, keys * kept[..., None], deltas * kept[..., None], decays * kept, is_folded | True)

    honest = gated_delta.fold
    monkeypatch.setattr(gated_delta, "fold", fold)


def _keep_foreign_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_foreign_rows", lambda *args: None)


@pytest.mark.parametrize(
    ("name", "perturb"), [("delta nets", _multiply), ("experts", _keep_foreign_rows), ("latents", _keep_foreign_rows)]
)
def test_what_a_weight_of_0_hides_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, perturb: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The negative control."""
    executor = open_pair(name, tmp_path)
    expected = contents(serve(Foreign(executor, None)))
    perturb(monkeypatch)
    assert contents(serve(Foreign(executor, torch.nan))) != expected
