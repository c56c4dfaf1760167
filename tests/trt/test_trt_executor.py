"""The TensorRT executor over a fake engine: buffers, profiles, padding, hand-over, and every refusal by name."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.backends.tensorrt.compatibility import mismatches
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.engine import check_engine_io, deserialize
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor, captured_shapes
from dflash_trt.backends.tensorrt.module import load_tensorrt
from dflash_trt.backends.tensorrt.plugin_library import load_plugin_library
from dflash_trt.core.batch import StepBatch, chained, plan_of, request_results, run_batch
from dflash_trt.core.errors import BuildError, EngineDirError
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineLimits
from dflash_trt.engine_dir.provenance import TensorRTRecord
from scripts.tensorrt_self_test import qualify
from tests.engines import PAGE_SIZE, Decoding, make_executor
from tests.parity.test_logit_rules import PROMPTS, make_loop, make_request, outputs_of
from tests.traces import GREEDY, SAMPLED, integers, trace
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_SEQ_LEN, define_pair
from tests.trt.test_step_tokens import FP8_PAGES, make_pair

LIMITS = EngineLimits(
    max_batch_size=8, max_seq_len=MAX_SEQ_LEN, max_num_tokens=64, max_draft_len=3, page_size=PAGE_SIZE
)
RECORD = TensorRTRecord(
    tensorrt_version="11.4.0.106",
    gpu_name="NVIDIA H200",
    compute_capability="9.0",
    plugin_library="libdflash_trt_plugins.so",
    flags=(),
    profiles=(),
    num_layers=1,
    build_time_s=1.0,
)


CPU, HOST_STREAM = torch.device("cpu"), SimpleNamespace(cuda_stream=0)


@pytest.fixture
def pair(tmp_path):
    return make_pair(tmp_path)


def make_engine(trt, pair, pages=None, perturb=lambda nodes: None):
    defined = define_pair(trt, *pair, pages=pages)
    perturb(defined.nodes)
    return FakeEngine(defined, LIMITS), defined.spec


def make_ours(trt, pair, pages=None, *, captured=lambda spec, limits: (), capture=None, perturb=lambda nodes: None):
    engine, spec = make_engine(trt, pair, pages, perturb)
    limits = ExecutorLimits(
        max_batch_size=8,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=64,
        max_draft_len=3,
        page_size=PAGE_SIZE,
        num_pages=256,
    )
    contexts = StepContexts(engine, USER_MANAGED, HOST_STREAM, captured=captured(spec, limits), device=CPU)
    ours = TensorRTExecutor(contexts, spec, limits, stream=HOST_STREAM, capture=capture, device=CPU)
    return ours, engine


@pytest.mark.parametrize("pages", [None, FP8_PAGES], ids=["pages of float32", "FP8 pages"])
def test_the_executor_gives_torchs_tokens(trt, pair, pages):
    ours, engine = make_ours(trt, pair, pages)
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN, quantization=pages)
    ks = (3, 3, 0, 2)
    for samplings in (GREEDY, SAMPLED):
        expected, _ = trace(theirs, samplings, num_draft_tokens=ks)
        found, _ = trace(ours, samplings, num_draft_tokens=ks)
        assert integers(found) == integers(expected)
    assert min(engine.contexts[0].num_runs, engine.contexts[1].num_runs) > 0


def test_a_closed_executor_gives_engine_and_pages_back_though_it_is_still_held(trt, pair):
    ours, engine = make_ours(trt, pair)
    trace(ours, GREEDY, num_draft_tokens=(3,))
    held = [*ours.pages().values(), ours._contexts, ours._contexts.activations, ours._buffers, engine]
    freed = [weakref.ref(item) for item in held]
    del engine, held
    ours.close()
    assert [item() for item in freed] == [None] * len(freed)
    ours.close()


def decoding_pair(executor):
    """Two requests after their prefills, ready to verify three drafts each."""
    runs = [Decoding(executor, [5, 9, 2], tuple(range(12))), Decoding(executor, [7, 1], tuple(range(12, 24)))]
    for run in runs:
        part = run.prefill_part(8)
        run.take(part, run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=3))[0])
    return runs


def test_a_step_fed_on_the_device_equals_one_fed_by_the_host(trt, pair):
    results = []
    for feeds_itself in (False, True):
        ours, _ = make_ours(trt, pair)
        runs = decoding_pair(ours)
        steps = []
        for step in range(3):
            parts = [run.verify_part(3) for run in runs]
            plan = plan_of(StepBatch(requests=tuple(parts), num_draft_tokens=3))
            if feeds_itself and step > 0:
                plan = chained(plan)
            rows = request_results(ours.submit(plan).result())
            for run, part, result in zip(runs, parts, rows, strict=True):
                run.take(part, result)
            steps.append(rows)
        results.append(integers(steps))
    assert results[0] == results[1]


class RecordedGraphs:
    """A Capture that says which contexts a graph ran in."""

    def __init__(self, engine):
        self.engine = engine
        self.contexts = []  # of each graph
        self.num_replays = 0

    def __call__(self, enqueue):
        before = [context.num_runs for context in self.engine.contexts]
        enqueue()
        ran = [c for c, n in zip(self.engine.contexts, before, strict=True) if c.num_runs > n]
        self.contexts.append(ran)

        def replay():
            self.num_replays += 1
            enqueue()

        return replay


def make_captured(trt, pair, draft_lens):
    graphs = RecordedGraphs(None)
    ours, graphs.engine = make_ours(
        trt, pair, captured=lambda spec, limits: captured_shapes(spec, limits, draft_lens), capture=graphs
    )
    return ours, graphs


def test_every_bucket_and_k_is_captured_ahead_in_a_context_of_its_own(trt, pair):
    ours, graphs = make_captured(trt, pair, (3, 9, 2))  # at most the engine's 3
    for pages in ours.pages().values():
        pages.fill_(42.0)
    ours.warm_up()
    assert all((pages == 42.0).all() for pages in ours.pages().values())  # padding writes nothing
    num_graphs = 3 * len([1, 2, 4, 8])  # K = 3, 2, and 1 for steps without drafts
    assert ours.graphs.num_graphs == num_graphs
    [*contexts] = [context for ran in graphs.contexts for context in ran]
    assert len({id(context) for context in contexts}) == len(contexts) == num_graphs
    sizes = [dict(next(iter(context.ran)))["token_ids"][0] for context in contexts]
    assert sizes == sorted(sizes, reverse=True)  # the largest first: they share a pool
    for pages in ours.pages().values():
        pages.zero_()
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    ks = (3, 3, 0, 2)
    expected = integers(trace(theirs, GREEDY, num_draft_tokens=ks)[0])
    assert integers(trace(ours, GREEDY, num_draft_tokens=ks)[0]) == expected
    assert ours.graphs.num_graphs == num_graphs and graphs.num_replays > 0
    assert {len(context.ran) for context in contexts} == {1}  # never another shape


def test_a_step_with_rules_runs_beside_the_graphs_and_the_others_know_nothing_of_it(trt, pair):
    ours, graphs = make_captured(trt, pair, (3,))
    ours.warm_up()
    captured = [context for ran in graphs.contexts for context in ran]
    eager = [context for context in graphs.engine.contexts if context not in captured]

    def rows_adjusted(contexts):
        return {dict(ran)["row_masks"][0] - 1 for context in contexts for ran in context.ran}

    answers_to(ours, {}, {})
    assert rows_adjusted(captured) == rows_adjusted(eager) == {0}  # one entry: nothing is launched for it
    replays = graphs.num_replays
    assert replays > 0
    answers_to(ours, {"repetition_penalty": 1.4}, {"repetition_penalty": 1.2})
    assert graphs.num_replays == replays
    assert rows_adjusted(captured) == {0} and {0, 2 * 4} <= rows_adjusted(eager)
    answers_to(ours, {}, {})
    assert graphs.num_replays == 2 * replays


def answers_to(executor, *samplings):
    """Of a request for each of them, which runs with all others."""
    loop = make_loop(executor, k=3)
    requests = [make_request(str(i), PROMPTS[i], max_new_tokens=6, **each) for i, each in enumerate(samplings)]
    return [output.token_ids for output in outputs_of(loop, requests)]


def test_contexts_share_one_block_of_the_size_tensorrt_asks_for(trt, pair):
    ours, graphs = make_captured(trt, pair, (3,))
    memories = {context.memory[0] for context in graphs.engine.contexts}
    assert len(memories) == 1
    assert {(c.profile, c.memory[1]) for c in graphs.engine.contexts} == {(0, 1 << 12), (1, 1 << 14)}
    assert ours._contexts.activations.num_bytes >= 1 << 14


def test_padding_requests_write_nothing(trt, pair):
    """Three verify blocks run as four; pages that belong to nobody keep their canary."""
    ours, engine = make_ours(trt, pair)
    run = Decoding(ours, [5, 9, 2], tuple(range(12)))
    part = run.prefill_part(8)
    run.take(part, run_batch(ours, StepBatch(requests=(part,), num_draft_tokens=3))[0])
    for pages in ours.pages().values():
        pages[12:] = 42.0
    block = run.verify_part(3)
    run_batch(ours, StepBatch(requests=(block, block, block), num_draft_tokens=3))
    assert engine.contexts[0].shapes["context_lens"] == (4,)
    assert all((pages[12:] == 42.0).all() for pages in ours.pages().values())


@pytest.mark.parametrize("pages", [None, FP8_PAGES], ids=["pages of float32", "FP8 pages"])
def test_qualification_passes_an_exact_engine(trt, pair, pages):
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN, quantization=pages)
    findings = list(qualify(theirs, make_ours(trt, pair, pages)[0], vocab_size=12))
    assert len(findings) == 6
    assert [finding.detail for finding in findings if not finding.has_passed] == []


def test_qualification_fails_an_engine_that_writes_into_the_pages_of_another_layer(trt, pair):
    def of_one_state_twice(nodes):
        first, second, *_ = (node for node in nodes if node.name == "AttendPages")
        second.fields["state"] = first.fields["state"]

    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    ours, _ = make_ours(trt, pair, perturb=of_one_state_twice)
    findings = {item.name: item for item in qualify(theirs, ours, vocab_size=12)}
    assert not findings["pages of others stay untouched (canary)"].has_passed


def test_qualification_fails_an_engine_whose_slots_lose_the_candidates_of_drafts(trt, pair, monkeypatch):
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    ours, _ = make_ours(trt, pair)
    draft_topk_probs, honest = ours._buffers.staging.slots.draft_topk_probs, ours.submit
    monkeypatch.setattr(ours, "submit", lambda plan: (draft_topk_probs.zero_(), honest(plan))[1])
    failed = [finding.name for finding in qualify(theirs, ours, vocab_size=12) if not finding.has_passed]
    assert failed == ["chained steps, rejection sampling"]


def _drop_tensor(engine):
    del engine.tensors["seed"]


def _rename_tensor(engine):
    engine.tensors["seeds"] = engine.tensors.pop("seed")
    engine.dtypes["seeds"], engine.shapes["seeds"] = "INT64", (-1,)


def _change_dtype(engine):
    engine.dtypes["state_pools"] = "INT32"


def _change_shape(engine):
    engine.shapes["state_pools"] = (5,)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (_drop_tensor, ["tensor seed: expected in the engine, found none"]),
        (_rename_tensor, ["tensor seed: expected in the engine", "tensor seeds: expected no such tensor, found one"]),
        (_change_dtype, ["tensor state_pools dtype: expected INT64, found INT32"]),
        (_change_shape, ["tensor state_pools shape: expected [6], found [5]"]),
    ],
)
def test_an_engine_of_another_contract_is_refused_with_the_mismatch_named(trt, pair, change, messages):
    engine, spec = make_engine(trt, pair)
    check_engine_io(engine, spec)
    change(engine)
    with pytest.raises(EngineDirError) as error:
        check_engine_io(engine, spec)
    for message in messages:
        assert message in str(error.value)


def test_an_engine_of_another_gpu_or_tensorrt_is_refused_with_both_named():
    same = {"tensorrt_version": "11.4.0.106", "compute_capability": "9.0", "gpu_name": "NVIDIA H200"}
    assert mismatches(RECORD, **same) == []
    [gpu] = mismatches(RECORD, **same | {"compute_capability": "10.3", "gpu_name": "NVIDIA B300"})
    assert "expected compute capability 9.0 (NVIDIA H200), found 10.3 (NVIDIA B300)" in gpu
    [version] = mismatches(RECORD, **same | {"tensorrt_version": "11.5.0.1"})
    assert "TensorRT: expected 11.4.0.106, found 11.5.0.1. Install it: pip install tensorrt==11.4.0.106" in version


class EmptyRegistry:
    """A registry that loads nothing, as TensorRT's does with a library that lacks an export."""

    def get_plugin_registry(self):
        return self

    def get_creator(self, name, version, namespace):
        return None

    def load_library(self, path):
        return None


def test_a_missing_or_hollow_plugin_library_is_named(tmp_path):
    with pytest.raises(BuildError, match=r"plugin library \(none given\).*none named AttendPages, AttendDraft"):
        load_plugin_library(EmptyRegistry(), None)
    with pytest.raises(BuildError, match="expected a file, found none"):
        load_plugin_library(EmptyRegistry(), tmp_path / "none.so")
    hollow = tmp_path / "hollow.so"
    hollow.write_bytes(b"")
    with pytest.raises(EngineDirError, match="must export getCreators and setLoggerFinder"):
        load_plugin_library(EmptyRegistry(), hollow, error=EngineDirError)


class FullRegistry(EmptyRegistry):
    """A registry that registers the plugins of the first library, and ignores those of others."""

    __name__ = "a module"
    loaded = False

    def get_creator(self, name, version, namespace):
        return "a creator" if self.loaded else None

    def load_library(self, path):
        self.loaded = True
        return "a handle"


def test_a_second_library_in_one_process_is_refused_unless_it_is_a_copy_of_the_first(tmp_path):
    first, copy, other = (tmp_path / name for name in ("first.so", "copy.so", "other.so"))
    for path, content in ((first, b"one"), (copy, b"one"), (other, b"another")):
        path.write_bytes(content)
    registry = FullRegistry()
    load_plugin_library(registry, first)
    load_plugin_library(registry, copy)
    with pytest.raises(EngineDirError, match=r"other.so: expected the library that this process has loaded"):
        load_plugin_library(registry, other, error=EngineDirError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so_and_what_to_do():
    with pytest.raises(EngineDirError, match=r"expected an NVIDIA GPU with a driver.*--backend torch"):
        deserialize(Path("rank0.engine"), plugin_library=Path("library.so"))


def test_a_missing_tensorrt_is_named_with_the_way_to_get_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BuildError, match=r"tensorrt: expected an importable Python package.*pip install tensorrt"):
        load_tensorrt("tensorrt")


def test_an_old_tensorrt_is_refused(monkeypatch):
    import sys
    from types import ModuleType

    old = ModuleType("tensorrt")
    old.__version__ = "10.9.0"
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(BuildError, match=r"expected 11.0 or newer, found 10.9.0"):
        load_tensorrt("tensorrt")
