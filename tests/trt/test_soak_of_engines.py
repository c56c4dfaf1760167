"""The soak test of `scripts/soak.py` over an engine in PyTorch and the same one in TensorRT, interpreted."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_trt import LLM
from dflash_trt.core.request import GenerationOutput, SamplingParams
from scripts.soak import Traffic, soak
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter
from tests.trt.engines import interpreted_engines

VOCAB_SIZE = 40
# More than either computes, so that requests wait, run together and run out of pages.
TRAFFIC = Traffic(duration_s=3.0, mean_gap_s=0.02, max_prompt_tokens=40, max_new_tokens=16)
LIMITS = {"max_seq_len": 96, "max_batch_size": 4, "max_num_tokens": 64, "page_size": 4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    make_zlab_drafter(root / "drafter", target_dir=target, block_size=4)
    return build(root, root / "engine", drafter="drafter", **LIMITS).path


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_random_traffic_loses_no_page_and_no_request(trt: ModuleType, engine: Path, is_interpreted: bool) -> None:
    options = {"device": "cpu", "kv_cache_bytes": 1 << 18, "num_threads": 1, "max_queue_len": 16}
    with interpreted_engines() if is_interpreted else nullcontext(), LLM(engine, **options) as llm:
        report = soak(llm, VOCAB_SIZE, TRAFFIC)
    assert report.num_leaked_pages == 0
    assert sum(report.num_by_outcome.values()) == report.num_sent > 20
    assert report.num_by_outcome["cancelled"] > 0 and report.num_by_outcome["length"] > 0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
# Every request of a round is of another kind; those of a prefix find it in the cache.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-z]{3,9}(-[0-9]{1,4}){2}", "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biases": {"logit_bias": {7: 5.0}, "bad_words": ("a",), "min_tokens": 4},
    "log probabilities": {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2},
    "samples": {"n": 3, "temperature": 0.8},
    "prefix": {},
    "cancelled": {"max_new_tokens": 96},
}
NUM_ROUNDS = 3
PREFIX = list(range(100, 132))


@pytest.fixture(scope="module")
def texts_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    target = make_target(root / "target", num_hidden_layers=2)
    make_zlab_drafter(root / "drafter", target_dir=target, target_layer_ids=(0, 1), block_size=4)
    return build(root, root / "engine", drafter="drafter", **LIMITS | {"max_seq_len": 128}).path


def mixed_traffic(engine: Path, *, is_interpreted: bool) -> dict[tuple[int, str], Sequence[GenerationOutput]]:
    """The outputs of all samples of every request, of which some end early; all run together."""
    options = {"device": "cpu", "kv_cache_bytes": 1 << 19, "num_threads": 1, "max_queue_len": 100}
    with interpreted_engines() if is_interpreted else nullcontext(), LLM(engine, **options) as llm:
        streams = {}
        for i in range(NUM_ROUNDS):
            for j, (kind, fields) in enumerate(KINDS.items()):
                prompt = [*(PREFIX if kind == "prefix" else ()), *(5 + (i * 29 + j * 7 + k) % 200 for k in range(9))]
                sampling = SamplingParams(**{"max_new_tokens": 16, "seed": i * 100 + j} | fields)
                streams[i, kind] = llm.submit_samples(prompt, sampling)
        outputs = {}
        for (i, kind), group in streams.items():
            if kind == "cancelled":
                group.cancel()
            outputs[i, kind] = group.result().samples
        llm.check_integrity()
        counts = llm.statistics.scheduler
    assert counts is not None and counts.num_pages_in_use_now == 0 and counts.num_running_now == 0
    assert counts.prefix_hit_fraction and sum(counts.num_finished.values()) == counts.num_arrivals
    assert counts.num_arrivals == NUM_ROUNDS * (len(KINDS) + 2)
    return outputs


def test_mixed_requests_get_the_same_answers_from_both_and_leave_nothing(trt: ModuleType, texts_engine: Path) -> None:
    ours, theirs = (mixed_traffic(texts_engine, is_interpreted=flag) for flag in (True, False))
    for (i, kind), samples in ours.items():
        for one, other in zip(samples, theirs[i, kind], strict=True):
            if kind == "cancelled":
                length = min(len(one.token_ids), len(other.token_ids))
                assert one.token_ids[:length] == other.token_ids[:length]
                continue
            assert one.error is None and one.finish_reason == other.finish_reason in ("length", "stop")
            assert (one.token_ids, one.text) == (other.token_ids, other.text), (i, kind)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert any(samples[0].finish_reason == "cancelled" for samples in ours.values())
