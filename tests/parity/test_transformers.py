"""Law 1: greedy speculative == greedy autoregressive == `transformers` generate, token for token, in fp32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.native.library import NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.backends.torch.ops import TorchOps
from tests.engines import Decoding, decode, make_executor
from tests.factories import LLAMA3, make_target, make_zlab_drafter

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 48
SMALL_VOCAB = 12  # small, so that even a random drafter is accepted now and then

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

TARGETS = {
    "qwen3": {"family": "qwen3"},
    "qwen3 tied, biases, odd head_dim": {
        "family": "qwen3",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "head_dim": 24,
    },
    "qwen3 yarn": {"family": "qwen3", "rope_parameters": YARN},
    "qwen3 windows": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "llama": {"family": "llama"},
    "llama3 rope": {"family": "llama", "rope_parameters": LLAMA3},
    "llama linear rope": {
        "family": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama tied, biases, one kv head": {
        "family": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "llama sharded": {"family": "llama", "max_shard_size": "60KB"},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.25, 3.0],
    "long_factor": [5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}
TARGETS |= {
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2 windows": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2 yarn, one kv head, sharded": {
        "family": "qwen2",
        "rope_parameters": YARN,
        "num_key_value_heads": 1,
        "max_shard_size": "60KB",
    },
    "mistral": {"family": "mistral", "head_dim": 24},
    "mistral, no window": {"family": "mistral", "sliding_window": None, "num_key_value_heads": 4},
    "phi3, half of a head rotated": {
        "family": "phi3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "phi3 longrope, tied": {
        "family": "phi3",
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "phi3, window, one kv head, sharded": {
        "family": "phi3",
        "sliding_window": 6,
        "num_key_value_heads": 1,
        "max_shard_size": "60KB",
    },
    "phi3, half of a head of 32 rotated": {
        "family": "phi3",
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
# Heads that the CPU kernels attend with; smaller ones take only their linear layers.
TARGETS |= {
    f"{name}, heads of 32": TARGETS[name] | {"head_dim": 32}
    for name in ("qwen3", "qwen3 windows", "qwen3 yarn", "llama tied, biases, one kv head")
}


def tiny_target(path: Path, **options) -> Path:
    return make_target(path, vocab_size=SMALL_VOCAB, tokenizer=False, **options)


def transformers_tokens(target: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS.keys())
def test_greedy_tokens_equal_those_of_transformers_with_and_without_drafts(tmp_path, options):
    target = tiny_target(tmp_path / "target", **options)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=8)
    expected = transformers_tokens(target)
    assert decode(make_executor(target), PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] == expected
    speculative = make_executor(target, drafter)
    for num_draft_tokens in (0, 1, 3, 7):
        assert decode(speculative, PROMPT, NUM_NEW, num_draft_tokens=num_draft_tokens).tokens[:NUM_NEW] == expected

    def nearly_right(run: Decoding) -> tuple[int, ...]:
        """The true continuation with one token changed, at a place that moves from step to step."""
        drafts = (expected + PROMPT)[len(run.tokens) : len(run.tokens) + 7]
        wrong_at = len(run.blocks) % 8
        return tuple((token + (i == wrong_at)) % SMALL_VOCAB for i, token in enumerate(drafts))

    run = decode(speculative, PROMPT, NUM_NEW, num_draft_tokens=7, propose=nearly_right)
    assert run.tokens[:NUM_NEW] == expected
    assert run.num_accepted[:8] == list(range(8))


@pytest.mark.parametrize(("head_dim", "ops"), [(16, TorchOps), (32, NativeOps)])
def test_the_size_of_heads_decides_who_attends(tmp_path, head_dim, ops):
    if isinstance(found := cpu_kernels(), NoKernels):
        pytest.skip(f"no CPU kernels: {found.reason}")
    target = tiny_target(tmp_path / "target", head_dim=head_dim)
    executor = make_executor(target)
    inputs = step_inputs(sequence_batch(PROMPT, page_size=4))
    assert type(executor._ops(inputs, num_draft_tokens=0)) is ops
    without = make_executor(target, has_kernels=False)
    assert type(without._ops(inputs, num_draft_tokens=0)) is TorchOps
    assert decode(without, PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] == transformers_tokens(target)


def test_the_logprobs_are_those_of_transformers(tmp_path):
    target = tiny_target(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=4)
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=3)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + run.tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(run.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(run.logprobs), expected, rtol=0, atol=2e-4)  # measured 2e-5


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "model.layers.2.self_attn.k_norm.weight"),
        ("qwen3", "model.layers.1.mlp.down_proj.weight"),
        ("qwen3", "model.norm.weight"),
        ("qwen2", "model.layers.1.self_attn.v_proj.bias"),
        ("mistral", "model.layers.1.self_attn.v_proj.weight"),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
    ],
)
def test_one_changed_weight_is_noticed(tmp_path, family, name):
    target = tiny_target(tmp_path / "target", family=family)
    expected = transformers_tokens(target)
    tensors = load_file(target / "model.safetensors")
    tensors[name] = tensors[name].roll(1, dims=0)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert decode(make_executor(target), PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] != expected


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_used_as_transformers_does(tmp_path, family):
    target = tiny_target(tmp_path / "target", family=family, tie_word_embeddings=True)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=4)
    tied = transformers_tokens(target)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    expected = transformers_tokens(target)
    assert expected != tied
    assert decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=3).tokens[:NUM_NEW] == expected
    del tensors["model.embed_tokens.weight"]  # transformers ties the embedding to a head that is alone
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert decode(make_executor(target), PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] == transformers_tokens(
        target
    )
