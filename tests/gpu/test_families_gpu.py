"""Every family through `LLM` on a GPU: in float32 the tokens of a CPU, in graphs, with drafts accepted."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.backends.graphs import Enqueue, GraphCache
from dflash_trt.core.request import GenerationOutput
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import build
from tests.gpu.family_pairs import PAIRS, VOCAB_SIZE, make_pair
from tests.kernels.test_step_on_kernels import LOGPROB_TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: an engine on it"),
]

# A chunk of the first is computed beside verify blocks; it is longer than every window, and its start is hit again.
PROMPTS = [[(5 * i * i + i) % VOCAB_SIZE for i in range(17)], [7, 3], [2, 9, 4, 4, 1, 8, 0, 6, 3]]
SAMPLINGS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True),
    SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=True),
    SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=True, temperature=0.9, top_k=9, top_p=0.95, seed=5),
]


def engine_of(name: str, root: Path) -> EngineDir:
    make_pair(name, root)
    return build(root, tp_size=1, max_batch_size=2, max_num_tokens=12)


def opened(engine: EngineDir, **options: Any) -> LLM:
    return LLM(engine.path, kv_cache_bytes=1 << 20, num_threads=1, **options)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """The shape of each graph that is launched, in their order."""
    found: list[Hashable] = []
    run = GraphCache.run

    def watch(cache: GraphCache, key: Hashable, *parts: Enqueue, **options: Any) -> None:
        if key is not None:  # a step that has a graph
            assert key in cache._graphs, "no step is captured while it serves"
            found.append(key)
        run(cache, key, *parts, **options)

    monkeypatch.setattr(GraphCache, "run", watch)
    return found


def assert_same(found: list[GenerationOutput], expected: list[GenerationOutput]) -> None:
    for output, other in zip(found, expected, strict=True):
        assert (output.token_ids, output.finish_reason) == (other.token_ids, "length")
        assert output.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("name", PAIRS)
def test_a_family_has_the_tokens_of_a_cpu(name: str, tmp_path: Path, replayed: list[Hashable]) -> None:
    engine = engine_of(name, tmp_path)
    options = {"deterministic": "deterministic" in name}
    with opened(engine, device="cpu") as llm:
        expected = llm.generate(PROMPTS, SAMPLINGS)
        assert not replayed
    with opened(engine, device="cuda", **options) as llm:
        assert llm.config.overlap_scheduling
        replayed.clear()  # by the warm-up
        found = llm.generate(PROMPTS, SAMPLINGS)
        assert_same(found, expected)
        assert_same(llm.generate(PROMPTS[:1], SAMPLINGS[0]), expected[:1])  # behind its own pages
        assert llm.statistics.scheduler.num_prefix_hit_tokens > 0
    assert {(shape.num_requests, shape.is_decode) for shape in replayed} >= {(1, True), (2, True), (2, False)}
    num_drafts, num_accepted = (
        sum(getattr(output, name) for output in found) for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 0 < num_accepted < num_drafts


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    """The negative control."""
    engine = engine_of("qwen3", tmp_path)
    with opened(engine, device="cpu") as llm:
        expected = llm.generate(PROMPTS[:1], SAMPLINGS[0])
    with opened(engine, device="cuda") as llm:
        llm._engine._executor.network.target_weights.layers[1].mlp_norm.mul_(1.01)
        torch.cuda.synchronize()  # steps have a stream of their own
        found = llm.generate(PROMPTS[:1], SAMPLINGS[0])
    assert found[0].logprobs != pytest.approx(expected[0].logprobs, abs=LOGPROB_TOLERANCE)
