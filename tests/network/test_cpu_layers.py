"""Layers as a CPU runs them against the same layers in plain ops."""

from pathlib import Path

import pytest
import torch

from dflash_trt.backends.torch.layers import JoinedGqa, prepared
from dflash_trt.backends.torch.linear import HalfLinear
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.backends.torch.ops import TorchOps, make_rope_table
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from tests.factories import make_target, make_zlab_drafter

OPTIONS = {"qwen3": {"family": "qwen3"}, "llama, biases": {"family": "llama", "attention_bias": True, "mlp_bias": True}}


def layers(path: Path, **options):
    """(plain, prepared) layers of a pair whose weights bfloat16 holds, those of the drafter last."""
    target = make_target(path / "target", vocab_size=12, tokenizer=False, **options)
    pair = open_pair(target, make_zlab_drafter(path / "drafter", target_dir=target, block_size=4))
    weights = {name: w.float() for name, w in pair.iter_weights(dtype=torch.bfloat16, mapping=Mapping())}
    network = bind_tensors(pair.target, pair.draft, weights)
    ready = prepared(network)
    return list(
        zip(
            (*network.target_weights.layers, *network.drafter.layers),
            (*ready.target_weights.layers, *ready.drafter.layers),
            strict=True,
        )
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_joined_heads_and_scaled_norms_are_those_of_plain_ops(tmp_path, options):
    ops = object.__new__(TorchOps)  # no step: only the ops that need none
    for plain, ready in layers(tmp_path, **options):
        gqa = plain.mixer.spec
        ops._rope_tables = {gqa.rotary: make_rope_table(gqa.rotary, num_positions=64, dtype=torch.float32)}
        rope = ops.rope_table(gqa.rotary, torch.tensor([3, 60, 0], dtype=torch.int32))
        assert isinstance(ready.mixer, JoinedGqa)
        assert isinstance(ready.mixer.projections[0], HalfLinear)
        assert ready.mixer.projections[0].scale == 1.0 != ready.mixer.o.scale
        x = torch.randn(3, len(plain.attention_norm), generator=torch.Generator().manual_seed(0))

        def heads(layer, x=x, rope=rope):
            return layer.mixer.qkv(ops, ops.rms_norm(x, layer.attention_norm, 1e-6), rope, 1e-6)

        def gate_up(layer, x=x):
            return ops.linear(ops.rms_norm(x, layer.mlp_norm, 1e-6), layer.feed_forward.gate_up)

        for found, expected in zip((*heads(ready), gate_up(ready)), (*heads(plain), gate_up(plain)), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)  # measured 1e-6


def test_layers_in_bfloat16_stay_as_they_are(tmp_path):
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False, family="qwen3")
    pair = open_pair(target, None)
    network = bind_tensors(pair.target, None, dict(pair.iter_weights(dtype=torch.bfloat16, mapping=Mapping())))
    assert not any(isinstance(layer.mixer, JoinedGqa) for layer in prepared(network).target_weights.layers)
