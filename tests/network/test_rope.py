"""RoPE frequencies against `transformers`."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_trt.backends.torch.ops import make_rope_table
from dflash_trt.core.model.rope import RopeSpec, Rotary

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES = [
    (RopeSpec(theta=10000.0), {"rope_type": "default"}),
    (RopeSpec(theta=10000.0, scaling="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    (
        RopeSpec(
            theta=500000.0,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    (
        RopeSpec(theta=10000.0, scaling="yarn", factor=4.0, original_max_position_embeddings=64),
        {"rope_type": "yarn", **YARN},
    ),
    (
        RopeSpec(
            theta=50000.0,
            scaling="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncates_correction_range=False,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            **YARN,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    (
        RopeSpec(theta=10000.0, scaling="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.25),
        {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    ),
    (  # as in Kimi-K2
        RopeSpec(theta=10000.0, scaling="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=1.0),
        {"rope_type": "yarn", **YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), CASES, ids=lambda case: getattr(case, "scaling", ""))
def test_tables_equal_those_of_transformers(rope, parameters):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0} | parameters,
    )
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(200)[None])
    found = make_rope_table(Rotary(rope, 32), num_positions=200, dtype=torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs[0], rtol=0, atol=2e-5)  # angles up to 200: 1 ulp is 1.5e-5


def test_a_different_factor_is_noticed():
    rope = CASES[3][0]
    tables = [
        make_rope_table(Rotary(spec, 32), num_positions=200, dtype=torch.float32)[0]
        for spec in (rope, rope.model_copy(update={"factor": 4.1}))
    ]
    assert (tables[0] - tables[1]).abs().max() > 1e-2
