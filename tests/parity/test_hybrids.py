"""Laws 1 and 4 for targets with gated delta nets: states advance by accepted tokens alone, whatever was drafted.

`generate` of transformers without drafts is the reference; its own cropping of caches loses recurrent states.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.backends.torch import gated_delta
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.request import Request
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import PAGE_SIZE, Decoding, decode, make_executor
from tests.executor.rank_engines import build
from tests.factories import make_target, make_zlab_drafter, read_json, write_json

NUM_NEW, VOCAB_SIZE, BLOCK_SIZE = 40, 12, 6
LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 70)  # the last one has several chunks
PROMPTS = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in LENGTHS]

TARGETS: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next", "mlp_only_layers": [1]},
    "next, one value head for each key head, wide filters": {
        "family": "qwen3_next",
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 6,
        "norm_topk_prob": False,
    },
    "next, delta nets alone at the end, all of a head rotated": {
        "family": "qwen3_next",
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "next, experts saved as they are computed": {"family": "qwen3_next", "save_original_format": False, "seed": 3},
    "3.5": {"family": "qwen3_5_text"},
    "3.5, six value heads, tied": {"family": "qwen3_5_text", "linear_num_value_heads": 6, "tie_word_embeddings": True},
    "3.5, short filters, biases": {"family": "qwen3_5_text", "linear_conv_kernel_dim": 2, "attention_bias": True},
    "3.5, one K/V head of whole panels, sharded": {
        "family": "qwen3_5_text",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_shard_size": "60KB",
    },
    "3.5 with experts": {"family": "qwen3_5_moe_text"},
}
SLOW_TARGETS: dict[str, dict[str, Any]] = {
    "3.5 with experts, heads of whole panels": {
        "family": "qwen3_5_moe_text",
        "head_dim": 32,
        "num_key_value_heads": 4,
        "seed": 5,
    },
    "3.5 with experts, one of them chosen, equally many heads": {
        "family": "qwen3_5_moe_text",
        "num_experts_per_tok": 1,
        "linear_num_value_heads": 2,
        "seed": 2,
    },
    "3.5 with experts, saved as they are computed, wide filters": {
        "family": "qwen3_5_moe_text",
        "save_original_format": False,
        "linear_conv_kernel_dim": 6,
        "shared_expert_intermediate_size": 24,
        "seed": 3,
    },
    "3.5 with experts, every layer a delta net but the first": {
        "family": "qwen3_5_moe_text",
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}
PAIRS = [pytest.param(fields, id=name) for name, fields in TARGETS.items()]
PAIRS += [pytest.param(fields, id=name, marks=pytest.mark.slow) for name, fields in SLOW_TARGETS.items()]


def make_pair(root: Path, **options: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False, **options)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE)


def expected_tokens(target: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def make_loop(executor: TorchExecutor, num_draft_tokens: int, *, overlaps: bool = False) -> EngineLoop:
    config = SchedulerConfig(enable_prefix_caching=False)
    policy = FixedDraftLength(num_draft_tokens)
    return EngineLoop(executor, Scheduler(executor.limits, config, policy), overlaps=overlaps)


def tokens_of(loop: EngineLoop, prompts: list[list[int]], *, preempts: bool = False) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    requests = [
        Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]
    streams = [loop.submit(request) for request in requests]
    for number in range(10_000):
        if preempts and number % 5 == 3:
            loop._scheduler.preempt(str(number % len(prompts)))
        if not loop.step():
            break
    return [list(stream.result(timeout_s=1).token_ids) for stream in streams]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), **request.param)


@pytest.fixture(scope="module")
def one_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), **TARGETS["next"])


@pytest.fixture(scope="module")
def expected(one_pair: tuple[Path, Path]) -> list[list[int]]:
    return expected_tokens(one_pair[0])


@pytest.fixture
def executor(one_pair: tuple[Path, Path]) -> Iterator[TorchExecutor]:
    executor = make_executor(*one_pair, max_batch_size=4)  # fewer than prompts: slots are used again
    yield executor
    executor.close()


def test_greedy_tokens_equal_those_of_transformers(pair: tuple[Path, Path]) -> None:
    expected = expected_tokens(pair[0])
    assert len({tuple(tokens) for tokens in expected}) > 1 and len(set(expected[0])) > 2
    executor = make_executor(*pair, max_batch_size=4)
    for num_draft_tokens in (0, 1, BLOCK_SIZE - 1):
        assert tokens_of(make_loop(executor, num_draft_tokens), PROMPTS) == expected
    alone = make_executor(pair[0])
    assert decode(alone, PROMPTS[-1], NUM_NEW, num_draft_tokens=0, chunk=7).tokens[:NUM_NEW] == expected[-1]


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_right"), [(1, 0), (1, 1), *((BLOCK_SIZE - 1, n) for n in range(BLOCK_SIZE))]
)
def test_a_rejection_at_any_place_leaves_the_state_of_the_accepted_tokens(
    executor: TorchExecutor, expected: list[list[int]], num_draft_tokens: int, num_right: int
) -> None:
    text = expected[-1]

    def propose(run: Decoding) -> tuple[int, ...]:
        drafts = (text + PROMPTS[0] * 8)[len(run.tokens) : len(run.tokens) + num_draft_tokens]
        return tuple((token + (i == num_right)) % VOCAB_SIZE for i, token in enumerate(drafts))

    run = decode(executor, PROMPTS[-1], NUM_NEW, num_draft_tokens=num_draft_tokens, propose=propose)
    assert run.tokens[:NUM_NEW] == text
    assert run.num_accepted[0] == num_right


def test_records_that_are_folded_wrongly_show(
    executor: TorchExecutor, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: all records are folded, rejected ones too."""
    fold = gated_delta.fold
    monkeypatch.setattr(gated_delta, "fold", lambda *args: fold(*args[:-1], torch.ones_like(args[-1])))
    assert tokens_of(make_loop(executor, BLOCK_SIZE - 1), PROMPTS) != expected


def test_tokens_survive_preemption_and_chained_steps(executor: TorchExecutor, expected: list[list[int]]) -> None:
    assert tokens_of(make_loop(executor, 3), PROMPTS, preempts=True) == expected
    loop = make_loop(executor, 3, overlaps=True)
    assert tokens_of(loop, PROMPTS) == expected
    assert tokens_of(loop, PROMPTS, preempts=True) == expected
    loop.close()


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_step_that_fails_is_run_again_from_the_same_states(
    executor: TorchExecutor, expected: list[list[int]], num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps of several requests raise when all their states were computed, and are run again in parts."""
    submit, number = TorchExecutor.submit, 0

    def fails_sometimes(self: TorchExecutor, plan: Any) -> Any:
        nonlocal number
        number += 1
        if number % 7 == 3 and plan.rows.num_requests > 1:
            with monkeypatch.context() as patch:
                patch.setattr("dflash_trt.backends.torch.ops.TorchOps.store_states", _raise)
                return submit(self, plan)
        return submit(self, plan)

    monkeypatch.setattr(TorchExecutor, "submit", fails_sometimes)
    assert tokens_of(make_loop(executor, num_draft_tokens), PROMPTS) == expected


def _raise(*_: Any) -> None:
    raise RuntimeError("a fault")


def test_bfloat16_is_as_close_to_float32_as_in_transformers(tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path, **TARGETS["3.5"])
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    )
    ids = torch.tensor([PROMPTS[-1]])
    with torch.no_grad():
        expected, theirs = (model(ids, use_cache=False).logits[0].float() for model in (exact, rounded))
    ours = make_executor(target, dtype=torch.bfloat16).target_logits(PROMPTS[-1]).float()
    assert (ours - expected).abs().mean() < 1.2 * (theirs - expected).abs().mean()


IN_TWO = ("next", "3.5, six value heads, tied")
ALL = TARGETS | SLOW_TARGETS


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_TWO)) for name in ALL])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    target, _ = make_pair(tmp_path, **ALL[name])
    expected = expected_tokens(target)
    engine = build(tmp_path, tp_size=2, max_seq_len=128)
    drafts_by_batch_size = {1: BLOCK_SIZE - 1, 2: 1, 3: 0}
    with LLM(engine.path, kv_cache_bytes=1 << 20, draft_length=drafts_by_batch_size) as llm:
        for first in (0, 3, 4):  # in later rounds states of prefixes are on both ranks
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[first:]]
            outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
            assert [list(output.token_ids) for output in outputs] == expected[first:]
        assert llm.statistics.scheduler.num_prefix_hit_tokens >= 68


def test_a_model_that_also_sees_is_read_for_its_language_model(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, **TARGETS["3.5"])
    text = read_json(target / "config.json")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 7}
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    write_json(seeing / "config.json", outer | {"text_config": text, "vision_config": {"depth": 2}})
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    tensors |= {name: torch.zeros(3) for name in ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight")}
    save_file(tensors, seeing / "model.safetensors")
    found, wanted = (decode(make_executor(path, drafter), [5], 8, num_draft_tokens=3) for path in (seeing, target))
    assert found.tokens == wanted.tokens and found.logprobs == wanted.logprobs
