"""Llama 4: greedy tokens are those of transformers, over chunks of positions, in batches, drafts or no drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.core.model.gqa import AttentionMask
from tests.checkpoint.refusals import edit_tensors
from tests.engines import PAGE_SIZE, Decoding, decode, make_executor
from tests.factories import Tensors, edit_json, make_target, make_zlab_drafter, read_json, write_json
from tests.parity.test_experts import together
from tests.parity.test_transformers import SMALL_VOCAB
from tests.parity.test_windows import make_loop, tokens_of

NUM_NEW = 40
CHUNK = 12  # of the factory; floor_scale is 8
LOGIT_TOLERANCE = 1e-4  # measured 1e-5, of logits up to 13
LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * CHUNK + 3)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
TARGETS: dict[str, dict[str, Any]] = {
    "every other layer with experts, as Maverick": {"use_qk_norm": False},
    "experts in every layer, llama3 scaling, as Scout": {
        "interleave_moe_layer_step": 1,
        "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64},
    },
    "no chunks, no temperature, one K/V head, two experts for each token": {
        "attention_chunk_size": 512,
        "attn_temperature_tuning": False,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 2,
        "no_rope_layers": [0, 1, 1, 0],
    },
    "RoPE everywhere, heads of 32, dense, sharded": {
        "head_dim": 32,
        "no_rope_layers": [1, 1, 1, 1],
        "moe_layers": [],
        "max_shard_size": "60KB",
    },
}


def prompt_of(length: int) -> list[int]:
    return [(7 * i + i // 5) % SMALL_VOCAB for i in range(length)]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int = NUM_NEW) -> list[int]:
    """By whole forward passes: transformers' caches of chunked layers are not the subject."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def model_of(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS.keys())
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    target = make_target(tmp_path / "target", family="llama4_text", vocab_size=SMALL_VOCAB, tokenizer=False, **options)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=8)
    model, executor, found = model_of(target), make_executor(target, drafter), set()
    for i, length in enumerate(LENGTHS):
        prompt = prompt_of(length)
        expected = greedy(model, prompt)
        found.update(expected)

        def nearly_right(run: Decoding, expected: list[int] = expected) -> tuple[int, ...]:
            """The true continuation with one token changed, at a place that moves from step to step."""
            drafts = (expected + prompt_of(8))[len(run.tokens) : len(run.tokens) + 7]
            wrong_at = len(run.blocks) % 8
            return tuple((token + (j == wrong_at)) % SMALL_VOCAB for j, token in enumerate(drafts))

        num_draft_tokens = (0, 1, 7)[i % 3]
        assert decode(executor, prompt, NUM_NEW, num_draft_tokens=num_draft_tokens).tokens[:NUM_NEW] == expected
        run = decode(executor, prompt, NUM_NEW, num_draft_tokens=7, propose=nearly_right)
        assert run.tokens[:NUM_NEW] == expected
        assert run.num_accepted[:8] == list(range(8))
    assert len(found) > 4


def test_tokens_do_not_depend_on_batch_mates(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", family="llama4_text", vocab_size=SMALL_VOCAB, tokenizer=False)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=6)
    executor, model = make_executor(target, drafter), model_of(target)
    runs = together(executor, 5)
    assert [run.tokens[:20] for run in runs] == [greedy(model, list(run.prompt), 20) for run in runs]


def test_pages_that_no_chunk_reads_are_freed_and_the_tokens_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "target", family="llama4_text", vocab_size=SMALL_VOCAB, tokenizer=False)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=6)
    prompts = [prompt_of(length) for length in (3 * CHUNK + 2, 1)]
    expected = [greedy(model_of(target), prompt) for prompt in prompts]

    def found() -> list[list[int]]:
        executor = make_executor(target, drafter, max_batch_size=2, max_num_tokens=20, has_page_groups=True)
        (window,) = executor.limits.page_windows
        assert window.window == AttentionMask(chunk=CHUNK).span
        return tokens_of(make_loop(executor, 5), prompts, together=True)

    assert found() == expected
    monkeypatch.setattr(AttentionMask, "span", property(lambda mask: mask.chunk and mask.chunk // 2))
    assert found() != expected, "the negative control: pages that the chunk still reads"


def test_logits_are_those_of_transformers_and_of_nothing_else(tmp_path: Path) -> None:
    """Each negative control leaves out one thing that Llama 4 alone has."""
    target = make_target(tmp_path / "target", family="llama4_text", tokenizer=False)
    tokens = prompt_of(3 * CHUNK + 5)
    with torch.no_grad():
        expected = model_of(target)(torch.tensor([tokens])).logits[0]
    found = make_executor(target).target_logits(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGIT_TOLERANCE)
    config = (target / "config.json").read_text()
    for changed in (
        {"attention_chunk_size": 512},
        {"attn_temperature_tuning": False},
        {"use_qk_norm": False},
        {"no_rope_layers": [1] * 4, "layer_types": ["chunked_attention"] * 4},
    ):
        edit_json(target / "config.json", **changed)
        other = make_executor(target).target_logits(tokens)
        assert (other - expected).abs().max() > 100 * LOGIT_TOLERANCE, changed
        (target / "config.json").write_text(config)


def test_the_language_model_of_one_that_sees_is_the_same(tmp_path: Path) -> None:
    """Names and sections of Llama4ForConditionalGeneration; and experts as linears of their own."""
    target = make_target(tmp_path / "target", family="llama4_text", tokenizer=False)
    tokens = prompt_of(20)
    expected = make_executor(target).target_logits(tokens)

    def separate(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("gate_up_proj")]:
            experts = name.removesuffix(".gate_up_proj")
            for i, (gate_up, down) in enumerate(
                zip(tensors.pop(name), tensors.pop(f"{experts}.down_proj"), strict=True)
            ):
                words = zip(("gate", "up", "down"), (*gate_up.t().chunk(2), down.t()), strict=True)
                tensors |= {f"{experts}.{i}.{word}_proj.weight": part.contiguous() for word, part in words}

    edit_tensors(target, separate)
    torch.testing.assert_close(make_executor(target).target_logits(tokens), expected, rtol=0, atol=0)
    tensors = load_file(target / "model.safetensors")
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        | {"vision_model.class_embedding": torch.ones(4)},
        target / "model.safetensors",
        {"format": "pt"},
    )
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    write_json(target / "config.json", {**outer, "text_config": read_json(target / "config.json")})
    torch.testing.assert_close(make_executor(target).target_logits(tokens), expected, rtol=0, atol=0)
