"""Targets quantized by compressed-tensors: read as they are, bit for bit, in every layout that is supported."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.names import target_names
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.core.errors import CheckpointError, ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.formats.base import QuantizedWeight, segment_amax
from dflash_trt.formats.registry import dequantize, split_quantized, weight_format
from tests.checkpoint.compressed_target import INPUT_RANGE, NVFP4_MAX, PUBLISHED, TOKENS, compress
from tests.checkpoint.refusals import edit_tensors, pair_refusal, weights_of
from tests.engines import decode, make_executor
from tests.factories import Tensors, edit_json, make_target, make_zlab_drafter, read_json

WEIGHT_ONLY = [name for name, (ours, _, _) in PUBLISHED.items() if weight_format(ours).is_weight_only]
DOWN = "model.layers.1.mlp.down_proj"
# Rounding of a global scale's reciprocal, of its product with the block scale, and of the product with the code.
NVFP4_TOLERANCE = 2.0**-22


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes with blocks of 128 x 128 that are cut off, k and v of half a block, and whole groups of 128."""
    sizes = {"hidden_size": 384, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = tmp_path_factory.mktemp("source") / "target"
    return make_target(directory, head_dim=32, dtype=torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def odd_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that leave parts of blocks."""
    sizes = {"hidden_size": 160, "intermediate_size": 288}
    return make_target(tmp_path_factory.mktemp("odd") / "target", dtype=torch.bfloat16, **sizes)


def quantized_of(pair: CheckpointPair, mapping: Mapping | None = None) -> dict[str, QuantizedWeight[torch.Tensor]]:
    mapping = mapping or Mapping()
    tensors = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
    table = engine_weights(pair.target, None, pair.quantization)
    shares = {name: rank_shard(spec, mapping) for name, spec in table.items()}
    return split_quantized(tensors, shares, pair.quantization.linears)[1]


def assert_is_read(pair: CheckpointPair, decompressed: Tensors, *, tolerance: float = 0.0) -> None:
    names = target_names(pair.target)
    weights = quantized_of(pair)
    assert {part for name in weights for part in names[name].parts} == decompressed.keys()
    for name, weight in weights.items():
        expected = torch.cat([decompressed[part] for part in names[name].parts])
        if tolerance:
            assert bool(((dequantize(weight) - expected).abs() <= expected.abs() * tolerance).all()), name
        else:
            assert torch.equal(dequantize(weight), expected), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_weight_is_what_compressed_tensors_decompresses(source: Path, tmp_path: Path, name: str) -> None:
    decompressed = compress(source, tmp_path / "target", name)
    pair = open_pair(tmp_path / "target", None)
    ours = PUBLISHED[name][0]
    assert set(pair.quantization.linears.values()) == {ours}
    assert "target.layers.3.o" in pair.quantization.linears and "target.layers.3.down" not in pair.quantization.linears
    tolerance = NVFP4_TOLERANCE if "nvfp4" in ours else 0.0
    assert_is_read(pair, decompressed, tolerance=tolerance)

    def one_bit(tensors: Tensors) -> None:
        codes = tensors[next(key for key in (f"{DOWN}.weight", f"{DOWN}.weight_packed") if key in tensors)]
        codes.view(torch.uint8)[5, 7] ^= 0x10

    edit_tensors(tmp_path / "target", one_bit)
    with pytest.raises(AssertionError):
        assert_is_read(open_pair(tmp_path / "target", None), decompressed, tolerance=tolerance)


def test_blocks_at_the_edge_of_a_weight_may_be_smaller(odd_source: Path, tmp_path: Path) -> None:
    decompressed = compress(odd_source, tmp_path / "target", "FP8_BLOCK")
    assert_is_read(open_pair(tmp_path / "target", None), decompressed)


def test_scales_of_nvfp4_divide_there_and_multiply_here(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "target", "NVFP4")
    stored = load_file(tmp_path / "target" / "model.safetensors")
    weight = quantized_of(open_pair(tmp_path / "target", None))["target.layers.1.down"]
    assert torch.equal(weight.weight_scale, 1 / stored[f"{DOWN}.weight_global_scale"])  # both in float32
    assert weight.input_scale.tolist() == pytest.approx([INPUT_RANGE / NVFP4_MAX], rel=1e-7)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_an_engine_gives_the_tokens_of_the_decompressed_checkpoint(source: Path, tmp_path: Path, name: str) -> None:
    """transformers generates from the decompressed weights, in float32."""
    decompressed = compress(source, tmp_path / "target", name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(decompressed, strict=False)
    tokens = list(range(4, 40))
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    executor = make_executor(tmp_path / "target")
    torch.testing.assert_close(executor.target_logits(tokens), expected, rtol=0, atol=1e-4)
    assert decode(executor, tokens, 16, num_draft_tokens=0).tokens == generated[0, 36:].tolist()


def test_an_engine_of_int8_rounds_each_token_as_vllm_does(source: Path, tmp_path: Path) -> None:
    """transformers computes with the decompressed weights, and with inputs rounded to 127 steps of their largest."""
    decompressed = compress(source, tmp_path / "target", "W8A8")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(decompressed, strict=False)
    tokens = torch.tensor([list(range(4, 40))])

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale,)

    with torch.no_grad():
        unrounded = model(tokens).logits[0]
        for name in decompressed:
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(rounded)
        expected = model(tokens).logits[0]
    found = make_executor(tmp_path / "target").target_logits(tokens[0].tolist())

    def error(other: torch.Tensor) -> float:
        """Of most logits: an input between two codes goes to either, and changes the tokens after it."""
        return float((found - other).abs().median())

    assert error(expected) < 1e-4  # measured 2.6e-6
    assert error(unrounded) > 1e-2  # the negative control: 0.063


def test_a_drafter_of_int8_drafts_and_changes_no_text(source: Path, tmp_path: Path) -> None:
    drafter = make_zlab_drafter(tmp_path / "source", target_dir=source)
    compress(drafter, tmp_path / "drafter", "W8A8", ignored=("fc",))
    pair = open_pair(source, tmp_path / "drafter")
    assert set(pair.quantization.linears.values()) == {"int8"} and "draft.layers.0.down" in pair.quantization.linears
    prompt = list(range(4, 40))
    drafted = decode(make_executor(source, tmp_path / "drafter"), prompt, 16, num_draft_tokens=3)
    assert drafted.tokens[:16] == decode(make_executor(source), prompt, 16, num_draft_tokens=0).tokens[:16]


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "INT4 g32", "NVFP4"])
def test_two_ranks_hold_the_two_halves_of_a_weight(source: Path, tmp_path: Path, name: str) -> None:
    compress(source, tmp_path / "target", name)
    pair = open_pair(tmp_path / "target", None)
    whole = quantized_of(pair)
    halves = [quantized_of(pair, Mapping(world_size=2, tp_size=2, rank=rank)) for rank in range(2)]
    names = ("gate_up", "down") if name == "FP8_BLOCK" else ("qkv", "gate_up", "down")
    for linear in (f"target.layers.0.{item}" for item in names):
        first, second = (dequantize(half[linear]) for half in halves)
        if linear.endswith("down"):
            assert torch.equal(torch.cat((first, second), dim=1), dequantize(whole[linear]))
            continue
        segments = [rows // 2 for rows in whole[linear].segments]
        pieces = zip(first.split(segments), second.split(segments), strict=True)
        joined = torch.cat([piece for both in pieces for piece in both])
        assert torch.equal(joined, dequantize(whole[linear]))


def test_a_note_says_what_becomes_of_the_activations(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "dynamic", "FP8_DYNAMIC")
    [note] = open_pair(tmp_path / "dynamic", None).notes
    assert note.startswith("target: 14 linear layers are stored in fp8_w8a16; their activations are left in the engine")
    compress(source, tmp_path / "static", "FP8")
    [note] = open_pair(tmp_path / "static", None).notes
    assert note.endswith("stored in fp8; their activations are quantized with the stored scales")
    compress(source, tmp_path / "tokens", "W8A8")
    [note] = open_pair(tmp_path / "tokens", None).notes
    assert note.endswith("stored in int8; their activations are quantized with a scale per token")


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def with_kv_scales(source: Path, output: Path, layers: Sequence[int]) -> Path:
    """FP8 with scales of K and V, of these layers."""
    compress(source, output, "FP8")
    edit_json(output / "config.json", quantization_config=section_of(output) | {"kv_cache_scheme": KV_SCHEME})
    scales = {
        f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.01 * (i + 1) + 0.001 * (x == "v")])
        for i in layers
        for x in "kv"
    }
    edit_tensors(output, lambda tensors: tensors.update(scales))
    return output


def section_of(path: Path) -> dict[str, Any]:
    return read_json(path / "config.json")["quantization_config"]


def test_scales_of_k_and_v_are_those_of_their_layer(source: Path, tmp_path: Path) -> None:
    num_layers = open_pair(source, None).target.num_layers
    found = open_pair(with_kv_scales(source, tmp_path / "all", range(num_layers)), None).quantization
    assert found is not None and found.target_kv is not None
    assert [scale.k for scale in found.target_kv] == pytest.approx([0.01 * (i + 1) for i in range(num_layers)])
    assert [scale.v for scale in found.target_kv] == pytest.approx([0.01 * (i + 1) + 0.001 for i in range(num_layers)])
    assert "model.layers.1.self_attn.k_scale" in pair_refusal(with_kv_scales(source, tmp_path / "one", [0]), None)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(1, 1), torch.ones(1, dtype=torch.int32)])
def test_a_scale_of_k_that_is_no_single_float_is_refused(source: Path, tmp_path: Path, scale: torch.Tensor) -> None:
    path, name = with_kv_scales(source, tmp_path / "all", range(4)), "model.layers.1.self_attn.k_scale"
    edit_tensors(path, lambda tensors: tensors.update({name: scale}))
    assert f"tensor '{name}': expected F32 [], found " in pair_refusal(path, None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "weights",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
        "symmetric int 8 per tensor or ",
    ),
    ("weights", {"num_bits": 8, "type": "int", "strategy": "channel"}, "format: expected int-quantized or naive"),
    ("weights", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 48}, "expected float 8 per tensor"),
    ("weights", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, "expected"),
    ("weights", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}, "expected"),
    ("weights", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}, "expected float 8"),
    ("weights", {"num_bits": 8, "type": "float", "strategy": "channel"}, "format: expected float-quantized"),
    ("output_activations", {"num_bits": 8}, "Quantized outputs are not implemented"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_groups_that_are_not_implemented_are_refused(
    source: Path, tmp_path: Path, key: str, value: dict[str, Any], words: str
) -> None:
    path = compress_int4(source, tmp_path)
    section = read_json(path / "config.json")["quantization_config"]
    section["config_groups"]["group_0"][key] = value
    edit_json(path / "config.json", quantization_config=section)
    with pytest.raises(ConfigError, match=re.escape(words)):
        open_pair(path, None)


@pytest.mark.parametrize(
    "activations",
    [
        None,
        TOKENS | {"dynamic": False},
        TOKENS | {"symmetric": False},
        TOKENS | {"strategy": "tensor"},
        TOKENS | {"num_bits": 4},
        TOKENS | {"type": "float"},
    ],
)
def test_int8_with_other_activations_than_dynamic_tokens_is_refused(
    source: Path, tmp_path: Path, activations: dict[str, Any] | None
) -> None:
    compress(source, tmp_path / "target", "W8A8")
    section = section_of(tmp_path / "target")
    section["config_groups"]["group_0"]["input_activations"] = activations
    edit_json(tmp_path / "target" / "config.json", quantization_config=section)
    with pytest.raises(
        ConfigError, match=r"input_activations.*: expected symmetric int 8 with a dynamic scale per tok"
    ):
        open_pair(tmp_path / "target", None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("quantization_status", "calibration"),
        ("kv_cache_scheme", {"num_bits": 4, "type": "float"}),
        ("config_groups", {}),
        ("ignore", ["re:("]),
        ("something_new", 1),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(source: Path, tmp_path: Path, key: str, value: Any) -> None:
    path = compress_int4(source, tmp_path)
    section = read_json(path / "config.json")["quantization_config"]
    edit_json(path / "config.json", quantization_config=section | {key: value})
    with pytest.raises(ConfigError, match=r"config\.json key 'quantization_config"):
        open_pair(path, None)


def test_an_unlisted_linear_without_scales_is_refused(source: Path, tmp_path: Path) -> None:
    path = compress_int4(source, tmp_path)
    section = read_json(path / "config.json")["quantization_config"]
    edit_json(path / "config.json", quantization_config=section | {"ignore": ["lm_head"]})
    message = pair_refusal(path, None)
    name = "model.layers.3.mlp.down_proj.weight"
    assert f"target tensor '{name}': expected a weight in int4 with its scales" in message
    assert "found an unquantized weight in BF16" in message


def test_names_of_a_multimodal_checkpoint_are_those_of_its_decoder(source: Path, tmp_path: Path) -> None:
    path = compress_int4(source, tmp_path)
    section = read_json(path / "config.json")["quantization_config"]
    section["ignore"] = [r"re:^language_model\.model\.layers\.3\.mlp\..*", "language_model.lm_head"]
    section["config_groups"]["group_0"]["targets"] = ["re:model\\.language_model\\.layers\\..*_proj"]
    edit_json(path / "config.json", quantization_config=section)
    assert len(open_pair(path, None).quantization.linears) == 14


def test_scales_that_bfloat16_rounds_are_refused(source: Path, tmp_path: Path) -> None:
    path = compress_int4(source, tmp_path)

    def widen(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"].float() * 1.001

    edit_tensors(path, widen)
    with pytest.raises(CheckpointError, match="expected scales that bfloat16 holds exactly, found scales in F32"):
        weights_of(open_pair(path, None))


def compress_int4(source: Path, tmp_path: Path) -> Path:
    compress(source, tmp_path / "target", "INT4 g32")
    return tmp_path / "target"


def test_our_int4_is_what_its_compressor_writes(source: Path, tmp_path: Path) -> None:
    path = compress_int4(source, tmp_path)
    stored, plain = load_file(path / "model.safetensors"), load_file(source / "model.safetensors")[f"{DOWN}.weight"]
    segments = (len(plain),)
    ranges = segment_amax(plain, segments)
    ours = weight_format("int4").quantize(plain, segments=segments, weight_amax=ranges, input_amax=None)
    assert torch.equal(ours.block_scale, stored[f"{DOWN}.weight_scale"])
    assert torch.equal(ours.codes.view(torch.int32), stored[f"{DOWN}.weight_packed"])
