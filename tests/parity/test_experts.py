"""Law 1 for targets with experts and sinks: greedy tokens are those of `transformers`, in fp32, drafts or no drafts.

No published checkpoint is at hand: the models are tiny and random, of transformers' own classes, saved by it.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.core.batch import StepBatch, run_batch
from tests.engines import Decoding, decode, make_executor
from tests.factories import edit_json, make_target, make_zlab_drafter, read_json, write_json
from tests.parity.test_transformers import NUM_NEW, PROMPT, SMALL_VOCAB, YARN, tiny_target, transformers_tokens

PROMPTS = [PROMPT, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [7], [2, 7, 1, 8, 2, 8, 1]]

LOGIT_TOLERANCE = 1e-4  # measured 6e-6, of logits up to 9

# Seeds whose greedy tokens are varied, so that a wrong target would show.
QWEN3_MOE = {"family": "qwen3_moe", "seed": 7}
GPT_OSS = {"family": "gpt_oss", "seed": 1}
GLM = {"family": "glm4_moe"}
MINIMAX = {"family": "minimax_m2"}
DEEPSEEK = {"family": "deepseek_v3"}
MSCALE_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}

TARGETS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, experts saved as they are computed": {**QWEN3_MOE, "save_original_format": False},
    "qwen3_moe, weights not normalized": {**QWEN3_MOE, "norm_topk_prob": False, "seed": 2},
    "qwen3_moe, dense layers between": {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe, biases, sharded": {**QWEN3_MOE, "attention_bias": True, "max_shard_size": "60KB"},
    "gpt_oss": GPT_OSS,
    "gpt_oss, all layers full, no attention biases": {
        **GPT_OSS,
        "layer_types": ["full_attention"] * 4,
        "attention_bias": False,
    },
    "gpt_oss, one K/V head, one expert for each token": {**GPT_OSS, "num_key_value_heads": 1, "num_experts_per_tok": 1},
    "glm4_moe": GLM,
    "glm4_moe, groups of experts, weights not normalized, two dense layers, heads of 32": {
        **GLM,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "first_k_dense_replace": 2,
        "head_dim": 32,
    },
    "glm4_moe, no norms, no biases, two shared experts": {
        **GLM,
        "use_qk_norm": False,
        "attention_bias": False,
        "n_shared_experts": 2,
    },
    "glm4_moe, experts saved as they are computed, one K/V head": {
        **GLM,
        "save_original_format": False,
        "num_key_value_heads": 1,
        "first_k_dense_replace": 0,
    },
    "minimax_m2": MINIMAX,
    "minimax_m2, heads of 32, one expert for each token, sharded": {
        **MINIMAX,
        "head_dim": 32,
        "num_experts_per_tok": 1,
        "max_shard_size": "60KB",
    },
    "minimax_m2, all of a head rotated, one K/V head": {
        **MINIMAX,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "minimax_m2, experts saved as they are computed": {**MINIMAX, "save_original_format": False},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, q without a latent, halves rotated, one group, no dense layer": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3, yarn that scales scores": {**DEEPSEEK, "rope_parameters": MSCALE_YARN, "seed": 2},
    "deepseek_v3, small heads, so that blocks of 8 attend directly": {
        **DEEPSEEK,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "kv_lora_rank": 40,
        "n_shared_experts": 2,
    },
    "deepseek_v32, while its indexer names all": {"family": "deepseek_v32", "seed": 1},
    "glm_moe_dsa, layers that share an indexer": {
        "family": "glm_moe_dsa",
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "deepseek_v3, values wider than keys, experts saved as they are computed": {
        **DEEPSEEK,
        "v_head_dim": 28,
        "seed": 3,
        "save_original_format": False,
    },
}


def together(executor, num_draft_tokens: int) -> list[Decoding]:
    """All prompts at once, each entering one step after the last, with prefill chunks beside verify blocks."""
    pages = iter(range(executor.limits.num_pages))
    runs = [Decoding(executor, prompt, tuple(itertools.islice(pages, 20))) for prompt in PROMPTS]
    for step in itertools.count():
        live = [run for i, run in enumerate(runs) if i <= step and len(run.tokens) < NUM_NEW]
        if not live:
            break
        parts = [run.verify_part(num_draft_tokens) if run.tokens else run.prefill_part(5) for run in live]
        results = run_batch(executor, StepBatch(requests=tuple(parts), num_draft_tokens=num_draft_tokens))
        for run, part, result in zip(live, parts, results, strict=True):
            run.take(part, result)
    return runs


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS.keys())
def test_greedy_tokens_equal_those_of_transformers_with_and_without_drafts(tmp_path, options):
    target = tiny_target(tmp_path / "target", **options)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=8)
    expected = transformers_tokens(target)
    assert len(set(expected)) > 3
    assert decode(make_executor(target), PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] == expected
    speculative = make_executor(target, drafter)
    for num_draft_tokens in (0, 3, 7):
        assert decode(speculative, PROMPT, NUM_NEW, num_draft_tokens=num_draft_tokens).tokens[:NUM_NEW] == expected

    def nearly_right(run: Decoding) -> tuple[int, ...]:
        """The true continuation with one token changed, at a place that moves from step to step."""
        drafts = (expected + PROMPT)[len(run.tokens) : len(run.tokens) + 7]
        wrong_at = len(run.blocks) % 8
        return tuple((token + (i == wrong_at)) % SMALL_VOCAB for i, token in enumerate(drafts))

    run = decode(speculative, PROMPT, NUM_NEW, num_draft_tokens=7, propose=nearly_right)
    assert run.tokens[:NUM_NEW] == expected
    assert run.num_accepted[:8] == list(range(8))


@pytest.mark.parametrize("options", [QWEN3_MOE, GPT_OSS, GLM, MINIMAX, DEEPSEEK], ids=lambda x: x["family"])
def test_tokens_do_not_depend_on_batch_mates_that_share_experts(tmp_path, options):
    target = tiny_target(tmp_path / "target", **options)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=6)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
        expected.append(ids[0, len(prompt) :].tolist())
    executor = make_executor(target, drafter)
    for num_draft_tokens in (0, 2, 5):
        runs = together(executor, num_draft_tokens)
        assert [run.tokens[:NUM_NEW] for run in runs] == expected
    assert sum(sum(run.num_accepted) for run in runs) > 0


@pytest.mark.parametrize("options", [QWEN3_MOE, GPT_OSS, GLM, MINIMAX, DEEPSEEK], ids=lambda x: x["family"])
def test_the_logits_are_those_of_transformers(tmp_path, options):
    target = tiny_target(tmp_path / "target", **options)
    tokens = PROMPTS[1] * 3
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    found = make_executor(target).target_logits(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGIT_TOLERANCE)


def change_tensor(target: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = {key: tensor.clone() for key, tensor in load_file(target / "model.safetensors").items()}
    tensors[name] = change(tensors[name])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    """The first expert, head or feature alone is another."""
    changed = tensor.clone()
    changed[0] = changed[0] + 1.0
    return changed


EXPERTS = "model.layers.1.mlp.experts"
PERTURBED = [
    (QWEN3_MOE, f"{EXPERTS}.2.down_proj.weight", lambda x: x.roll(1, dims=0)),
    (QWEN3_MOE, f"{EXPERTS}.2.gate_proj.weight", lambda x: x.roll(1, dims=0)),
    (QWEN3_MOE, "model.layers.1.mlp.gate.weight", lambda x: x.roll(1, dims=0)),
    (GPT_OSS, f"{EXPERTS}.gate_up_proj", lambda x: torch.cat((x[:1].roll(1, dims=1), x[1:]))),
    (GPT_OSS, f"{EXPERTS}.gate_up_proj", lambda x: x.unflatten(2, (-1, 2)).flip(3).flatten(2)),  # gate is up
    (GPT_OSS, f"{EXPERTS}.down_proj_bias", one_row),
    (GPT_OSS, f"{EXPERTS}.gate_up_proj_bias", one_row),
    (GPT_OSS, "model.layers.1.mlp.router.bias", one_row),
    (GPT_OSS, "model.layers.0.self_attn.sinks", one_row),
    (GPT_OSS, "model.layers.1.self_attn.sinks", one_row),
    (GLM, "model.layers.1.mlp.gate.e_score_correction_bias", lambda x: x.roll(1)),
    (GLM, "model.layers.1.mlp.shared_experts.up_proj.weight", lambda x: x.roll(1, dims=0)),
    (MINIMAX, "model.layers.1.block_sparse_moe.e_score_correction_bias", lambda x: x.roll(1)),
    (MINIMAX, "model.layers.1.block_sparse_moe.experts.2.w3.weight", lambda x: x.roll(1, dims=0)),
    (MINIMAX, "model.layers.1.self_attn.q_norm.weight", lambda x: x.roll(1)),
    (DEEPSEEK, "model.layers.1.self_attn.kv_b_proj.weight", lambda x: x.roll(1, dims=0)),
    (DEEPSEEK, "model.layers.1.self_attn.kv_a_layernorm.weight", one_row),
]


@pytest.mark.parametrize(("options", "name", "change"), PERTURBED, ids=[f"{x[1]}-{i}" for i, x in enumerate(PERTURBED)])
def test_one_changed_weight_is_noticed(tmp_path, options, name, change):
    """The negative controls of the tokens and of the logits."""
    target = tiny_target(tmp_path / "target", **options)
    expected, logits = transformers_tokens(target), make_executor(target).target_logits(PROMPTS[1] * 3)
    change_tensor(target, name, change)
    executor = make_executor(target)
    assert decode(executor, PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] != expected
    assert (executor.target_logits(PROMPTS[1] * 3) - logits).abs().max() > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (QWEN3_MOE, {"norm_topk_prob": False}),
        (QWEN3_MOE, {"num_experts_per_tok": 2}),
        (GPT_OSS, {"num_experts_per_tok": 2}),
        (GPT_OSS, {"swiglu_limit": 0.5}),
        (GPT_OSS, {"sliding_window": 5}),
        (GPT_OSS, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (GLM, {"routed_scaling_factor": 2.5}),
        (GLM, {"n_group": 4, "topk_group": 2}),
        (DEEPSEEK, {"rope_interleave": False}),
        (DEEPSEEK, {"rope_scaling": MSCALE_YARN, "rope_parameters": None}),
        (MINIMAX, {"rotary_dim": 4, "rope_parameters": None, "rope_theta": 10000.0}),
    ],
)
def test_one_changed_number_of_the_config_is_noticed(tmp_path, options, changes):
    target = tiny_target(tmp_path / "target", **options)
    expected = transformers_tokens(target)
    edit_json(target / "config.json", **changes)
    assert decode(make_executor(target), PROMPT, NUM_NEW, num_draft_tokens=0).tokens[:NUM_NEW] != expected


def test_a_drafter_like_that_of_gpt_oss_drafts_for_it(tmp_path):
    """The keys of z-lab/gpt-oss-20b-DFlash: model_type gpt_oss, biases, no layer_types, no num_target_layers.

    With the target's RoPE scaling; tests/parity/test_dflash.py reads the published file, which has none.
    """
    target = make_target(tmp_path / "target", tokenizer=False, vocab_size=SMALL_VOCAB, **GPT_OSS)
    drafter = make_zlab_drafter(
        tmp_path / "drafter",
        target_dir=target,
        model_type="gpt_oss",
        attention_bias=True,
        block_size=8,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        initial_context_length=64,
        rms_norm_eps=1e-5,
    )
    absent = ("layer_types", "num_target_layers", "sliding_window", "use_sliding_window", "max_window_layers")
    fields = read_json(drafter / "config.json")
    write_json(drafter / "config.json", {name: value for name, value in fields.items() if name not in absent})
    expected = transformers_tokens(target)
    executor = make_executor(target, drafter)
    for num_draft_tokens in (0, 7):
        assert decode(executor, PROMPT, NUM_NEW, num_draft_tokens=num_draft_tokens).tokens[:NUM_NEW] == expected
