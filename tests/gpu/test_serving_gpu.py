"""What requests may ask for, served together on a GPU with few pages: everything is as on a CPU, in float32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.request import GenerationOutput
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import build
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import LOGPROB_TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: an engine on it"),
]

FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SYSTEM = "You are a tiny model. "
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (SYSTEM + "Hello.", {"max_new_tokens": 30}),
    "sampled": ("1 2 3", {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_new_tokens": 36}),
    "the same beginning, more likely tokens": (
        SYSTEM + "Hello, who are you?",
        {"top_logprobs": 3, "max_new_tokens": 24},
    ),
    "repetition": ("aa", {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 2}),
    "a long prompt": (SYSTEM + "0123456789" * 3, {"min_p": 0.01, "temperature": 1.0, "top_k": 30, "seed": 3}),
    "presence, frequency": ("Zz", {"presence_penalty": 0.6, "frequency_penalty": 0.9}),
    "biases": ("def f(x):", {"logit_bias": {70: 4.0, 71: -100.0}}),
    "an expression": ("phone: ", {"regex": r"\d{3}-\d{4}"}),
    "a schema": ("json: ", {"json_schema": SCHEMA, "temperature": 0.8, "seed": 9}),
    "a choice": ("yes? ", {"choice": ("yes", "no", "perhaps")}),
    "log probabilities of the prompt": ("prompt tokens", {"prompt_logprobs": 2}),
    "no end yet": (SYSTEM, {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": tuple(range(4, 130))}),
}
MAX_NEW_TOKENS = 14
STOPPED = "a stop string"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", num_hidden_layers=2, **FEW_HEADS)
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
    make_zlab_drafter(root / "drafter", target_dir=target, target_layer_ids=(0, 1), head_dim=16, **FEW_HEADS, **windows)
    return build(root, tp_size=1, max_batch_size=3, max_num_tokens=20, max_seq_len=80)


def opened(engine: EngineDir, **options: Any) -> LLM:
    """Pages for one of the longest requests, and a few; K by the number of requests."""
    return LLM(engine.path, kv_cache_bytes=3 << 14, num_threads=1, draft_length={1: 3, 2: 2, 3: 1}, **options)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True, "logprobs": True} | options)


@pytest.fixture(scope="module")
def expected(engine: EngineDir) -> dict[str, GenerationOutput]:
    """On the CPU, one by one."""
    with opened(engine, device="cpu") as llm:
        found = {name: llm.generate(prompt, sampling(**options)) for name, (prompt, options) in REQUESTS.items()}
        stop = found["greedy"].text[5:8]
        found[STOPPED] = llm.generate(REQUESTS["greedy"][0], sampling(stop=(stop,)))
    assert found[STOPPED].finish_reason == "stop"
    return found


@pytest.fixture(scope="module")
def llm(engine: EngineDir) -> Iterator[LLM]:
    with opened(engine, device="cuda") as llm:
        yield llm


def numbers(value: Any) -> list[float]:
    """Of nested tuples; none for None."""
    if isinstance(value, tuple):
        return [number for item in value for number in numbers(item)]
    return [] if value is None else [value]


def assert_same(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert (found.token_ids, found.text, found.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    )
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        ours, theirs = (numbers(getattr(output, name)) for output in (found, expected))
        assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


def test_requests_together_are_those_of_a_cpu_alone(llm: LLM, expected: dict[str, GenerationOutput]) -> None:
    """In chunks, behind prefixes, preempted, with K by the load."""
    prompts, options = zip(*REQUESTS.values(), strict=True)
    found = llm.generate(list(prompts), [sampling(**given) for given in options])
    for output, name in zip(found, REQUESTS, strict=True):
        assert_same(output, expected[name])
    statistics = llm.statistics.scheduler
    assert statistics is not None
    assert statistics.num_prefix_hit_tokens > 0 and statistics.num_preemptions > 0
    assert {output.finish_reason for output in found} == {"length", "stop"}
    llm.check_integrity()


def test_a_stop_string_and_a_cancelled_request_end_alone(llm: LLM, expected: dict[str, GenerationOutput]) -> None:
    stop = expected["greedy"].text[5:8]
    streams = [
        llm.submit(*request)
        for request in (
            (REQUESTS["sampled"][0], sampling(**REQUESTS["sampled"][1])),
            (REQUESTS["greedy"][0], sampling(max_new_tokens=40)),
            (REQUESTS["greedy"][0], sampling(stop=(stop,))),
        )
    ]
    first = streams[1].take()
    assert first is not None
    streams[1].cancel()
    outputs = [stream.result(timeout_s=200) for stream in streams]
    assert_same(outputs[0], expected["sampled"])
    assert outputs[1].finish_reason == "cancelled"
    assert 0 < len(outputs[1].token_ids) < 40
    both = min(len(outputs[1].token_ids), MAX_NEW_TOKENS)
    assert outputs[1].token_ids[:both] == expected["greedy"].token_ids[:both]
    assert_same(outputs[2], expected[STOPPED])
    llm.check_integrity()
