"""TensorRT engines whose layers with windows have pages of their own: torch's tokens, while freed pages hold NaN."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dflash_trt import SamplingParams
from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor, captured_shapes
from dflash_trt.cli.main import cli
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow, StepHandle, StepPlan
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.slot_windows import SlotWindows
from dflash_trt.scheduler.window_pages import WindowPages
from dflash_trt.serving.engine_loop import EngineLoop
from scripts.tensorrt_self_test import qualify
from tests.dflash2_files import make_dflash2_drafter
from tests.engines import PAGE_SIZE, make_executor
from tests.executor.rank_engines import build
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import make_gemma
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_SEQ_LEN, define_pair
from tests.trt.ranks import interpreted_engine
from tests.trt.test_trt_executor import CPU, HOST_STREAM, RecordedGraphs

K, NUM_NEW, MAX_BATCH_SIZE, MAX_NUM_TOKENS = 3, 24, 2, 24
NUM_PAGES, NUM_WINDOW_PAGES = 66, 17  # of two sequences of MAX_SEQ_LEN; of two windows and a chunk
PROMPTS = [[(5 * i * i + i) % 12 for i in range(50)], [7, 1, 4], [3] * 31]
FP8_PAGES = QuantizationSpec(
    target_kv=tuple(LayerKvScales(k=0.02 + 0.01 * i, v=0.01) for i in range(4)),
    draft_kv=(LayerKvScales(k=0.03, v=0.007), LayerKvScales()),
)


def make_gemma_pair(root: Path) -> tuple[Path, Path]:
    """Windows of 6 tokens and none in the target, of 9 in the drafter."""
    target = make_gemma(root / "target", family="gemma3_text")
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=K + 1, **windows)


def make_gpt_oss_pair(root: Path) -> tuple[Path, Path]:
    """Windows of 6 tokens and none in the target, of 5 in a DFlash2 drafter."""
    sizes: dict[str, Any] = {"vocab_size": 12, "num_hidden_layers": 2, "tokenizer": False}
    target = make_target(root / "target", family="gpt_oss", **sizes)
    taps = {"target_layer_ids": (0, 1), "block_size": K + 1}
    return target, make_dflash2_drafter(root / "drafter", target_dir=target, **taps)


PAIRS: dict[str, tuple[Callable[[Path], tuple[Path, Path]], tuple[int, ...]]] = {
    "Gemma 3": (make_gemma_pair, (6, 9)),
    "gpt-oss with DFlash2": (make_gpt_oss_pair, (5, 6)),
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gemma_pair(tmp_path_factory.mktemp("gemma"))


class Poisoned:
    """An executor, or all of its ranks. Pages that nobody owns, or a request since this step, are NaN before it.

    `drafts` are by request and position, `taken` counts the pages that requests were given of each group.
    """

    def __init__(self, executor: Any, pools: list[Any], *, poisons: bool = True) -> None:
        self.limits: ExecutorLimits = executor.limits
        self.has_queue, self.can_retry = False, False
        self.drafts: dict[tuple[str, int], list[int]] = {}
        self.taken = [0] * self.limits.num_page_groups
        self.scheduler: Scheduler | None = None
        self._executor, self._pools, self._poisons = executor, pools if poisons else [], poisons

    def submit(self, plan: StepPlan) -> StepHandle:
        new = self._new_pages(plan)
        for state in self._pools:
            for name, pages in state.pages.items():
                group = state.group_of(name)
                nan = torch.full_like(pages[:1], torch.nan).view(torch.uint8)
                pages.view(torch.uint8)[self._free_pages(group) + new[group]] = nan
        handle: StepHandle = self._executor.submit(plan)
        result = handle.result()
        rows = zip(plan.rows.request_ids, result.next_context_lens.tolist(), result.draft_tokens.tolist(), strict=True)
        self.drafts |= {(request_id, position): drafts for request_id, position, drafts in rows}
        return handle

    def _new_pages(self, plan: StepPlan) -> list[list[int]]:
        """By group."""
        blanks = [None, *(group.blank_page for group in self.limits.page_windows)]
        new: list[list[int]] = [[] for _ in blanks]
        for column, page_id in zip(plan.page_updates.columns, plan.page_updates.page_ids, strict=True):
            group = int(column) // self.limits.max_pages
            if page_id != blanks[group]:
                new[group].append(int(page_id))
        self.taken = [count + len(page_ids) for count, page_ids in zip(self.taken, new, strict=True)]
        return new

    def _free_pages(self, group: int) -> list[int]:
        assert self.scheduler is not None
        store = self.scheduler._request_pool.store
        pool = store._pool if group == 0 else store.windows[group - 1]._pool
        return [page_id for page_id in range(pool.num_pages) if pool.num_owners(page_id) == 0]


def serve(
    executor: Poisoned, prompts: list[list[int]] = PROMPTS, *, overlaps: bool = False, num_draft_tokens: int = K
) -> list[list[int]]:
    """Tokens of all prompts, served together."""
    scheduler = Scheduler(
        executor.limits, SchedulerConfig(enable_prefix_caching=False), FixedDraftLength(num_draft_tokens)
    )
    executor.scheduler = scheduler
    loop = EngineLoop(executor, scheduler, overlaps=overlaps)
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    requests = [Request(request_id=str(i), prompt_token_ids=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
    streams = [loop.submit(request) for request in requests]
    while loop.step():
        loop.check_integrity()
    tokens = [list(stream.result(timeout_s=1).token_ids) for stream in streams]
    loop.close()
    return tokens


def expected_of(pair: tuple[Path, Path], **options: Any) -> tuple[list[list[int]], dict[tuple[str, int], list[int]]]:
    """Tokens and drafts of the CPU backend, all of whose layers keep all positions."""
    sizes = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": MAX_BATCH_SIZE, "max_num_tokens": MAX_NUM_TOKENS}
    theirs = Poisoned(make_executor(*pair, **sizes, **options), [], poisons=False)
    return serve(theirs), theirs.drafts


def make_ours(
    trt: ModuleType,
    pair: tuple[Path, Path],
    *,
    pages: QuantizationSpec | None = None,
    max_draft_len: int = K,
    num_window_pages: int = NUM_WINDOW_PAGES,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> tuple[TensorRTExecutor, FakeEngine]:
    """The product's executor over an interpreted engine, whose decode steps are captured."""
    defined = define_pair(trt, *pair, pages=pages, has_page_groups=True)
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": MAX_SEQ_LEN, "page_size": PAGE_SIZE}
    built = EngineLimits(max_num_tokens=MAX_NUM_TOKENS, max_draft_len=K, **sizes)
    limits = ExecutorLimits(
        max_num_tokens=MAX_NUM_TOKENS,
        max_draft_len=max_draft_len,
        num_pages=NUM_PAGES,
        page_windows=tuple(PageWindow(window, num_window_pages) for window in defined.spec.page_windows),
        **sizes,
    )
    engine = FakeEngine(defined, built)
    captured = captured_shapes(defined.spec, limits, (K,))
    contexts = StepContexts(engine, USER_MANAGED, HOST_STREAM, captured=captured, device=CPU)
    graphs = RecordedGraphs(engine)  # type: ignore[no-untyped-call]
    ours = TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=graphs, device=CPU)
    ours.warm_up()
    assert ours.graphs.num_graphs == len(captured) > 0
    return ours, engine


def assert_same_drafts(found: dict[tuple[str, int], list[int]], expected: dict[tuple[str, int], list[int]]) -> None:
    shared = found.keys() & expected.keys()
    assert len(shared) > 15 and all(found[place] == expected[place] for place in shared)


@pytest.mark.parametrize(
    ("name", "pages", "overlaps"),
    [("Gemma 3", None, True), ("Gemma 3", FP8_PAGES, False), ("gpt-oss with DFlash2", None, False)],
    ids=["Gemma 3, chained graphs", "Gemma 3, FP8 pages", "gpt-oss with DFlash2"],
)
def test_tokens_and_drafts_are_torchs_while_pages_before_windows_are_freed_and_used_again(
    trt: ModuleType, tmp_path: Path, name: str, pages: QuantizationSpec | None, overlaps: bool
) -> None:
    make, windows = PAIRS[name]
    pair = make(tmp_path)
    ours, _ = make_ours(trt, pair, pages=pages)
    assert tuple(group.window for group in ours.limits.page_windows) == windows
    poisoned = Poisoned(ours, [ours.state])
    tokens, drafts = expected_of(pair, quantization=pages)
    assert serve(poisoned, overlaps=overlaps) == tokens
    assert_same_drafts(poisoned.drafts, drafts)
    num_needed = sum(-(-(len(prompt) + NUM_NEW) // PAGE_SIZE) for prompt in PROMPTS)
    assert min(poisoned.taken) >= num_needed > 2 * NUM_WINDOW_PAGES, "each page of a window is used twice and more"


def test_the_columns_of_page_tables_are_the_schedulers_when_it_drafts_nothing(
    trt: ModuleType, gemma: tuple[Path, Path]
) -> None:
    """An engine drafts in every step, also where no drafter is used and requests have fewer pages at most."""
    ours, _ = make_ours(trt, gemma, max_draft_len=0)
    assert ours.limits.max_pages < NUM_PAGES // MAX_BATCH_SIZE
    poisoned = Poisoned(ours, [ours.state])
    assert serve(poisoned, num_draft_tokens=0) == expected_of(gemma)[0]


def test_a_page_that_is_freed_too_early_is_noticed(
    trt: ModuleType, gemma: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the NaN in freed pages: of pages that the table goes on to name."""
    first_page = WindowPages.first_page
    monkeypatch.setattr(WindowPages, "first_page", lambda pages, num_tokens: first_page(pages, num_tokens + 4))
    monkeypatch.setattr(SlotWindows, "_blank", lambda windows, *place: None)
    ours, _ = make_ours(trt, gemma)
    first, *_ = serve(Poisoned(ours, [ours.state]))
    assert len(first) < NUM_NEW, "logits that are no numbers end a request"


def test_page_tables_exchanged_between_groups_give_other_tokens(trt: ModuleType, gemma: tuple[Path, Path]) -> None:
    ours, _ = make_ours(trt, gemma, num_window_pages=NUM_PAGES)  # every page is there in every group
    found, tables = Poisoned(ours, [], poisons=False), ours._buffers.tensors
    ours._contexts.bind({"page_table": tables["page_table.6"], "page_table.6": tables["page_table"]})
    assert serve(found) != expected_of(gemma)[0]


def test_two_ranks_free_the_same_pages(trt: ModuleType, gemma: tuple[Path, Path]) -> None:
    sizes = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": MAX_BATCH_SIZE, "max_num_tokens": MAX_NUM_TOKENS}
    two = build(gemma[0].parent, tp_size=2, **sizes)
    options = {"num_pages": NUM_PAGES, "num_window_pages": NUM_WINDOW_PAGES, "max_batch_size": MAX_BATCH_SIZE}
    ours = interpreted_engine(trt, two, **options)
    poisoned = Poisoned(ours, [rank._state for rank in ours.ranks])
    tokens, drafts = expected_of(gemma)
    assert serve(poisoned, PROMPTS[:1]) == tokens[:1]
    assert all(drafts[place] == found for place, found in poisoned.drafts.items())
    assert min(poisoned.taken) > NUM_WINDOW_PAGES


def test_the_checks_of_an_opened_engine_look_at_every_group(trt: ModuleType, gemma: tuple[Path, Path]) -> None:
    ours, engine = make_ours(trt, gemma)
    assert check_pages(ours) == "5 tokens in each of 6 pools, at 2 places"
    addresses = [engine.contexts[0].addresses[name] for name in ("page_table", "page_table.6", "page_table.9")]
    assert len(set(addresses)) == 3 and all((address - addresses[0]) % 256 == 0 for address in addresses)
    sizes = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 3, "max_num_tokens": MAX_NUM_TOKENS}
    theirs = make_executor(*gemma, has_page_groups=True, **sizes)
    ours, _ = make_ours(trt, gemma, max_batch_size=3)
    findings = list(qualify(theirs, ours, vocab_size=12))
    assert [finding.detail for finding in findings if not finding.has_passed] == []


def test_a_pair_with_groups_builds_through_tensorrt_rtx(trt: ModuleType, gemma: tuple[Path, Path]) -> None:
    """With a page table for each group."""
    words = ["--target", gemma[0], "--drafter", gemma[1], "--max-batch-size", 2, "--page-size", 4]
    words += ["--max-num-tokens", 24, "--max-seq-len", 64, "--json"]
    result = CliRunner().invoke(cli, [str(word) for word in ("build", "--check", *words)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    tables = [line for line in report["inputs"] if line.startswith("page_table")]
    assert tables == [f"page_table{group} INT32 [-1, -1]" for group in ("", ".6", ".9")]
