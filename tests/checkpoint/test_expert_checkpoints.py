"""Experts as they are published: configs with the published key sets, every layout of the tensors, what is refused.

The configs are those of the repositories named; no weights of them are here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.formats.base import expert_of, segment_amax
from dflash_trt.formats.mxfp4 import Mxfp4, Mxfp4Weight
from tests.checkpoint.expert_files import GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B, QWEN3_CODER_30B_A3B, to_mxfp4
from tests.checkpoint.refusals import (
    edit_tensors,
    pair_refusal,
    read_draft_spec,
    read_target_spec,
    remove_keys,
    target_refusal,
    weights_of,
)
from tests.engines import decode, make_executor
from tests.factories import Tensors, edit_json, make_target, read_json, write_json
from tests.specs import Flat


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `qwen3_moe` and `gpt_oss`; not to be changed."""
    root = tmp_path_factory.mktemp("experts")
    make_target(root / "qwen3_moe", family="qwen3_moe", tokenizer=False, num_hidden_layers=2)
    make_target(root / "gpt_oss", family="gpt_oss", tokenizer=False, num_hidden_layers=2)
    return root


@pytest.fixture
def copy_of(targets: Path, tmp_path: Path) -> Any:
    def copy(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_bytes((targets / name / file).read_bytes())
        return tmp_path / name

    return copy


def spec_of(directory: Path, fields: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(fields))
    return read_target_spec(directory)


@pytest.mark.parametrize(
    ("fields", "theta", "positions"),
    [(QWEN3_30B_A3B, 1e6, 40960), (QWEN3_CODER_30B_A3B, 1e7, 262144)],
    ids=["Qwen3-30B-A3B", "Qwen3-Coder-30B-A3B"],
)
def test_a_published_qwen3_moe_config_is_read(tmp_path: Path, fields: Any, theta: float, positions: int) -> None:
    spec = spec_of(tmp_path, fields)
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("qwen3_moe", 48, 2048)
    flat = Flat(spec)
    assert (flat.num_heads, flat.num_kv_heads, flat.head_dim, flat.q_size) == (32, 4, 128, 4096)
    assert (flat.has_qk_norm, flat.has_qkv_bias, flat.has_sinks) == (True, False, False)
    assert not spec.is_embedding_tied
    assert Flat(spec).rope == RopeSpec(theta=theta) and spec.max_position_embeddings == positions
    assert Flat(spec).masks == (AttentionMask(),) * 48
    assert len(spec.moes) == 48
    assert Flat(spec).moe == Moe(
        num_experts=128, num_experts_per_token=8, intermediate_size=768, routing="softmax_top_k", normalizes_top_k=True
    )


@pytest.mark.parametrize(
    ("fields", "num_layers", "num_experts"),
    [(GPT_OSS_20B, 24, 32), (GPT_OSS_120B, 36, 128)],
    ids=["gpt-oss-20b", "gpt-oss-120b"],
)
def test_a_published_gpt_oss_config_is_read(tmp_path: Path, fields: Any, num_layers: int, num_experts: int) -> None:
    spec = spec_of(tmp_path, fields)
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("gpt_oss", num_layers, 2880)
    flat = Flat(spec)
    assert (flat.num_heads, flat.num_kv_heads, flat.head_dim, flat.q_size) == (64, 8, 64, 4096)
    assert (flat.has_qk_norm, flat.has_qkv_bias, flat.has_o_bias, flat.has_sinks) == (False, True, True, True)
    assert Flat(spec).masks == (AttentionMask(window=128), AttentionMask()) * (num_layers // 2)
    assert len(spec.moes) == num_layers
    assert Flat(spec).rope == RopeSpec(
        theta=150000.0,
        scaling="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncates_correction_range=False,
    )
    assert Flat(spec).moe == Moe(
        num_experts=num_experts,
        num_experts_per_token=4,
        intermediate_size=2880,
        routing="top_k_softmax",
        activation="clamped_swiglu",
        limit=7.0,
        alpha=1.702,
        has_bias=True,
    )
    without = {name: value for name, value in fields.items() if name not in ("layer_types", "swiglu_limit")}
    assert spec_of(tmp_path, without) == spec  # the defaults of transformers


def test_the_published_names_of_experts_are_asked_for(tmp_path: Path) -> None:
    names = target_names(spec_of(tmp_path, QWEN3_30B_A3B))
    parts = names["target.layers.47.experts.gate_up"].parts
    prefix = "model.layers.47.mlp.experts"
    assert len(parts) == 256
    assert parts[:3] == tuple(f"{prefix}.{x}_proj.weight" for x in ("0.gate", "0.up", "1.gate"))
    names = target_names(spec_of(tmp_path, GPT_OSS_20B))
    prefix = "model.layers.23.mlp"
    assert names["target.layers.23.experts.down"].parts == tuple(
        f"{prefix}.experts.down_proj_{x}" for x in ("blocks", "scales")
    )
    assert names["target.layers.23.router_bias"].parts == (f"{prefix}.router.bias",)
    assert names["target.layers.23.sinks"].parts == ("model.layers.23.self_attn.sinks",)


def test_the_published_drafter_of_gpt_oss_belongs_to_its_target_and_gets_its_rope(tmp_path: Path) -> None:
    published = Path(__file__).parents[1] / "data/drafter_configs/z-lab__gpt-oss-20b-DFlash.config.json"
    write_json(tmp_path / "config.json", read_json(published))
    (tmp_path / "target").mkdir()
    target = spec_of(tmp_path / "target", GPT_OSS_20B)
    spec = read_draft_spec(tmp_path, target=target)
    assert Flat(spec).rope == Flat(target).rope
    assert (spec.num_layers, Flat(spec).head_dim, spec.draft_block_size, spec.num_target_layers) == (8, 64, 8, None)
    flat = Flat(spec)
    assert (flat.has_qkv_bias, flat.has_o_bias, flat.rope.scaling) == (True, True, "yarn")
    assert Flat(spec).masks == (AttentionMask(is_causal=False),) * 8


def test_experts_lie_gate_above_up_whatever_the_layout(targets: Path, tmp_path: Path) -> None:
    fused = make_target(
        tmp_path / "fused", family="qwen3_moe", tokenizer=False, num_hidden_layers=2, save_original_format=False
    )
    weights = weights_of(open_pair(targets / "qwen3_moe", None))
    stored = load_file(targets / "qwen3_moe" / "model.safetensors")
    prefix = "model.layers.1.mlp.experts.5"
    gate_up = torch.cat([stored[f"{prefix}.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(weights["target.layers.1.experts.gate_up"][5], gate_up)
    assert torch.equal(weights["target.layers.1.experts.down"][5], stored[f"{prefix}.down_proj.weight"])
    assert weights.keys() == weights_of(open_pair(fused, None)).keys()
    for name, tensor in weights_of(open_pair(fused, None)).items():
        assert torch.equal(tensor, weights[name]), name

    weights = weights_of(open_pair(targets / "gpt_oss", None))
    stored = load_file(targets / "gpt_oss" / "model.safetensors")
    interleaved = stored["model.layers.1.mlp.experts.gate_up_proj"][5]  # [in, 2 * F]
    assert torch.equal(weights["target.layers.1.experts.gate_up"][5, :64], interleaved[:, 0::2].t())
    assert torch.equal(weights["target.layers.1.experts.gate_up"][5, 64:], interleaved[:, 1::2].t())
    biases = stored["model.layers.1.mlp.experts.gate_up_proj_bias"][5]
    assert torch.equal(weights["target.layers.1.experts.gate_up_bias"][5, 64:], biases[1::2])
    down = stored["model.layers.1.mlp.experts.down_proj"][5]
    assert torch.equal(weights["target.layers.1.experts.down"][5], down.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_dequantized_bit_for_bit_as_transformers_does(copy_of: Any, dtype: torch.dtype) -> None:
    directory = copy_of("gpt_oss")
    stored = to_mxfp4(directory)
    pair = open_pair(directory, None)
    assert set(pair.quantization.linears.values()) == {"mxfp4"}
    weights = weights_of(pair, dtype)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up", "down"):
            parts = [stored[f"{prefix}.{name}_proj_{kind}"] for kind in ("blocks", "scales")]
            expected = convert_moe_packed_tensors(*parts, dtype=dtype).transpose(1, 2)  # [experts, out, in]
            if name == "gate_up":
                expected = torch.cat((expected[:, 0::2], expected[:, 1::2]), dim=1)
            linear = f"target.layers.{layer}.experts.{name}"
            codes, scales = weights[linear], weights[f"{linear}.block_scale"]
            assert codes.dtype == scales.dtype == torch.uint8
            assert codes.nbytes + scales.nbytes == sum(part.nbytes for part in parts)
            packed = Mxfp4Weight(segments=(), input_scale=None, codes=codes, block_scale=scales)
            assert torch.equal(Mxfp4().unscaled(packed, dtype), expected)
            assert torch.equal(Mxfp4().unscaled(expert_of(packed, 3), dtype), expected[3])
            low_nibbles_last = parts[0] // 16 + parts[0] % 16 * 16
            assert not torch.equal(convert_moe_packed_tensors(low_nibbles_last, parts[1], dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mxfp4_code_and_scale_means_what_transformers_says(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(254, 16, 16).contiguous()
    scales = torch.arange(254, dtype=torch.uint8)[:, None].expand(254, 16).contiguous()
    expected = convert_moe_packed_tensors(codes[None], scales[None], dtype=dtype)[0].t()
    packed = Mxfp4Weight(segments=(254,), input_scale=None, codes=codes.flatten(1), block_scale=scales)
    assert torch.equal(Mxfp4().unscaled(packed, torch.float32).to(dtype), expected)
    if dtype == torch.bfloat16:
        assert torch.equal(Mxfp4().unscaled(packed, dtype), expected)


def test_mxfp4_quantization_gives_the_numbers_of_modelopt() -> None:
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp4_tensor")
    weight = torch.randn(3, 24, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, 3] = 0
    weight[1, :, ::7] *= 1e-20
    weight[2] = torch.arange(128) / 16  # among them ties of every kind
    known, segments = Mxfp4(), (8, 16)
    ours = known.quantize(weight, segments=segments, weight_amax=segment_amax(weight, segments) + 1, input_amax=None)
    theirs, scales = modelopt.MXFP4QTensor.quantize(weight, 32)
    expected = theirs.dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})
    assert torch.equal(known.dequantize(ours), expected)
    assert torch.equal(ours.block_scale.flatten(), scales.flatten())
    assert not torch.equal(known.dequantize(expert_of(ours, 0)), expected[1])


def test_an_mxfp4_checkpoint_gives_the_tokens_and_logits_of_transformers(copy_of: Any) -> None:
    """transformers reads the same files. It dequantizes to bfloat16, which holds every MXFP4 number exactly."""
    directory = copy_of("gpt_oss")
    to_mxfp4(directory)
    options = {"dtype": torch.float32, "quantization_config": Mxfp4Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval().float()
    tokens = list(range(4, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    executor = make_executor(directory)
    # measured 1e-5, of logits up to 12
    torch.testing.assert_close(executor.target_logits(tokens), expected, rtol=0, atol=1e-4)
    assert decode(executor, tokens, 20, num_draft_tokens=0).tokens == generated[0, 36:].tolist()

    def one_scale(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][:, 5] += 2

    edit_tensors(directory, one_scale)
    assert (make_executor(directory).target_logits(tokens) - expected).abs().max() > 0.01


def test_a_scale_that_is_no_number_is_refused(copy_of: Any) -> None:
    directory = copy_of("gpt_oss")
    to_mxfp4(directory)
    name = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(directory, lambda tensors: tensors[f"{name}_scales"][3, 2].fill_(255))
    with pytest.raises(CheckpointError, match=f"{name}_scales.*expected E8M0 scales, found NaN"):
        weights_of(open_pair(directory, None))


REFUSED = [
    ("qwen3_moe", "shared_expert_intermediate_size", 128),
    ("qwen3_moe", "n_shared_experts", 1),
    ("qwen3_moe", "n_group", 4),
    ("qwen3_moe", "scoring_func", "sigmoid"),
    ("qwen3_moe", "use_sliding_window", True),
    ("qwen3_moe", "use_qk_norm", False),
    ("qwen3_moe", "qkv_bias", True),
    ("qwen3_moe", "num_local_experts", "eight"),
    ("qwen3_moe", "num_experts_per_tok", 9),
    ("qwen3_moe", "num_experts_per_tok", None),
    ("qwen3_moe", "moe_intermediate_size", None),
    ("qwen3_moe", "mlp_only_layers", "none"),
    ("qwen3_moe", "decoder_sparse_step", 0),
    ("qwen3_moe", "norm_topk_prob", 1),
    ("qwen3_moe", "quantization_config", {"quant_method": "mxfp4"}),
    ("gpt_oss", "experts_per_token", 4),
    ("gpt_oss", "num_local_experts", 10**9),
    ("gpt_oss", "sliding_window", None),
    ("gpt_oss", "swiglu_limit", -1.0),
    ("gpt_oss", "hidden_act", "gelu"),
    ("gpt_oss", "mlp_bias", True),
    ("gpt_oss", "layer_types", ["chunked_attention", "full_attention"]),
    ("gpt_oss", "model_type", "qwen3_moe"),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(copy_of: Any, family: str, key: str, value: Any) -> None:
    target = copy_of(family)
    read_target_spec(target)
    edit_json(target / "config.json", **{key: value})
    assert f"target config.json key '{key}': expected " in target_refusal(target)


def test_two_spellings_of_a_key_must_agree(copy_of: Any) -> None:
    """Published files say num_experts; transformers 5 saves num_local_experts."""
    target = copy_of("qwen3_moe")
    before = read_target_spec(target)
    edit_json(target / "config.json", num_experts=8)
    assert read_target_spec(target) == before
    edit_json(target / "config.json", num_experts=9)
    assert "key 'num_local_experts': expected 9, as target config.json key 'num_experts'" in target_refusal(target)


def test_quantization_of_gpt_oss_by_another_tool_is_refused(copy_of: Any) -> None:
    target = copy_of("gpt_oss")
    edit_json(target / "config.json", quantization_config={"quant_method": "fp8"})
    assert "key 'quantization_config.quant_method': expected \"mxfp4\"" in target_refusal(target)
    edit_json(target / "config.json", quantization_config={"quant_method": "mxfp4", "group_size": 16})
    assert "key 'quantization_config.group_size'" in target_refusal(target)


def test_what_a_gpt_oss_target_leaves_out_is_what_transformers_assumes(copy_of: Any) -> None:
    target = copy_of("gpt_oss")
    remove_keys(target / "config.json", "rope_parameters", "layer_types", "sliding_window")
    edit_json(target / "config.json", rope_theta=150000)
    theirs, notes = GptOssConfig.from_pretrained(target), list[str]()
    spec = parse_target(target, [], notes=notes)
    assert spec is not None
    edit_json(target / "config.json", rope_parameters=theirs.rope_parameters)
    assert Flat(spec).rope == Flat(read_target_spec(target)).rope
    kinds = [
        "sliding_attention" if mask.window == theirs.sliding_window else "full_attention" for mask in Flat(spec).masks
    ]
    assert kinds == theirs.layer_types
    assert [note.partition(":")[0] for note in notes] == [
        f"target config.json key '{name}' is absent" for name in ("rope_scaling", "sliding_window")
    ]


def test_a_missing_expert_and_a_block_of_another_size_are_named(copy_of: Any) -> None:
    target = copy_of("qwen3_moe")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(target, lambda tensors: tensors.pop(name))
    assert f"1 missing: '{name}'" in pair_refusal(target, None)
    target = copy_of("gpt_oss")
    to_mxfp4(target)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    edit_tensors(target, lambda tensors: tensors.update({name: tensors[name].repeat(1, 1, 2)}))
    assert f"target tensor '{name}': expected shape [8, 64, 2], found [8, 64, 4]" in pair_refusal(target, None)
