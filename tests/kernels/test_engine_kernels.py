"""The plugin library of one engine: every kernel that its steps launch, and none that they do not."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.errors import ConfigError
from dflash_trt.kernels.attention_plan import tile_rows
from plugins.aot.command_line import main
from plugins.aot.engine_kernels import (
    EngineKernels,
    LayerKernels,
    architecture_of,
    kernels_of_config,
    kernels_of_engine,
)
from plugins.aot.latent_variants import LatentKernels
from plugins.aot.variant import KernelVariant
from plugins.aot.variants import LibrarySpec, library_variants
from tests.factories import VOCAB_SIZE, make_target, make_zlab_drafter, write_json

TARGET = LayerKernels(is_drafter=False, head_dim=128, page_dtype="bfloat16", heads_per_kv=4, max_rows=2048)
DRAFTER = replace(TARGET, is_drafter=True, max_rows=16)
PAIR = EngineKernels(
    dtype="bfloat16", layers=(TARGET, DRAFTER), max_batch_size=256, max_draft_len=15, vocab_size=64 * 4096
)


def names(kernels: EngineKernels) -> list[str]:
    return [variant.name for variant in kernels.variants()]


def attention_tiles(kernels: EngineKernels, part: str) -> set[int]:
    found = (re.fullmatch(rf"attention_\w+_{part}_d\d+_t(\d+)_r\d+", name) for name in names(kernels))
    return {int(match[1]) for match in found if match}


def kinds(variants: tuple[KernelVariant, ...]) -> set[str]:
    return {variant.kernel.__name__ for variant in variants}


def test_an_engine_of_the_full_librarys_sizes_takes_its_kernels_from_there() -> None:
    full = {variant.name: variant for variant in library_variants(LibrarySpec())}
    ours = PAIR.variants()
    assert 30 <= len(ours) <= 40
    assert all(full[variant.name] == variant for variant in ours)
    assert kinds(ours) == kinds(tuple(full.values()))


@pytest.mark.parametrize("heads_per_kv", [1, 4, 5, 8, 64])
@pytest.mark.parametrize("max_rows", [1, 3, 16, 17, 2048])
def test_every_tile_that_the_launcher_chooses_is_there_and_no_other(heads_per_kv: int, max_rows: int) -> None:
    layers = tuple(replace(layer, heads_per_kv=heads_per_kv, max_rows=max_rows) for layer in PAIR.layers)
    chosen = {tile_rows(num_rows, heads_per_kv) for num_rows in range(1, max_rows + 1)}
    for part in ("step", "block"):
        assert attention_tiles(replace(PAIR, layers=layers), part) == chosen


def test_a_layer_with_a_soft_cap_has_attention_kernels_of_its_own_and_nothing_else() -> None:
    plain, capped = (set(names(replace(PAIR, layers=(replace(TARGET, has_softcap=cap),)))) for cap in (False, True))
    attention = {name for name in plain if name.startswith("attention_bfloat16_bfloat16_step")}
    assert len(attention) == 4
    assert plain - capped == attention
    assert capped - plain == {name.replace("_step_", "_softcap_step_") for name in attention}
    full = {variant.name for variant in library_variants(LibrarySpec(softcaps=("without", "with")))}
    assert capped <= full and not capped <= {variant.name for variant in library_variants(LibrarySpec())}


def test_a_layer_in_chunks_has_attention_kernels_of_its_own_and_nothing_else(tmp_path: Path) -> None:
    plain, chunked = (set(names(replace(PAIR, layers=(replace(TARGET, chunk=size),)))) for size in (0, 8192))
    attention = {name for name in plain if name.startswith("attention_")}
    assert len(attention) == 8  # with what joins their splits
    assert plain - chunked == attention
    assert chunked - plain == {name.replace("_step_", "_chunk8192_step_") for name in attention}
    target = make_target(tmp_path / "target", family="llama4_text", head_dim=32, tokenizer=False)
    config = build_config_from({"target": str(target), "dtype": "bfloat16"}, source="test")
    kernels = kernels_of_config(config, tmp_path)
    assert [layer.chunk for layer in kernels.layers] == [0, 12]  # without RoPE, and with it
    [experts] = kernels.experts
    assert experts.scales_inputs and all("_scaled_" in name for name in names(kernels) if "expert_gate_up" in name)


def test_layers_that_differ_in_head_dim_or_pages_have_kernels_of_their_own() -> None:
    fp8 = replace(TARGET, page_dtype="float8_e4m3fn")
    wide = replace(TARGET, head_dim=256)
    both = names(replace(PAIR, layers=(*PAIR.layers, fp8, wide)))
    assert "rotate_and_store_bfloat16_float8_e4m3fn_pages_d128_r256" in both
    assert any(name.startswith("attention_bfloat16_bfloat16_step_d256") for name in both)
    assert set(names(PAIR)) < set(both)


def test_an_engine_without_drafts_writes_the_context_and_reads_none() -> None:
    kernels = names(replace(PAIR, layers=(TARGET, replace(DRAFTER, max_rows=0)), max_draft_len=0))
    assert "rotate_and_store_bfloat16_bfloat16_pages_limits_d128_r256" in kernels
    assert not any("_block_" in name for name in kernels)


def test_a_deterministic_engine_has_kernels_with_one_tile_for_each_layer_of_a_rank(tmp_path: Path) -> None:
    make_target(tmp_path / "target", head_dim=32)
    make_zlab_drafter(tmp_path / "drafter", target_dir=tmp_path / "target", block_size=4, head_dim=32)
    fields = {"target": "target", "drafter": "drafter", "backend": "tensorrt", "tp_size": 2, "deterministic": True}
    config = build_config_from(fields, source="test")
    kernels = kernels_of_config(config, tmp_path)
    ours = names(kernels)
    linears = {name for name in ours if name.startswith("linear_")}
    ffn, hidden = 96, 64  # of which a rank has half, and half of four heads and two of K and V
    expected = {(hidden, 4 * 32), (2 * 32, hidden), (hidden, ffn), (ffn // 2, hidden), (hidden, VOCAB_SIZE // 2)}
    assert linears == {f"linear_bfloat16_plain_{a}x{b}_t64" for a, b in expected}
    step = {name for name in ours if "_step_" in name and name.startswith("attention")}
    assert step == {
        "attention_bfloat16_bfloat16_splits_step_d32_t64_r64",
        "attention_reduction_bfloat16_splits_step_d32_t64_r64",
        "attention_plan_step_t64_k128_r64",
    }
    plain = names(kernels_of_config(config.model_copy(update={"deterministic": False}), tmp_path))
    assert not [name for name in plain if name.startswith(("linear_", "rms_norm_")) or "splits" in name]


@pytest.mark.parametrize(("vocab_size", "mark"), [(151936, True), (151937, False)])
def test_the_sampler_is_compiled_for_the_vocabulary_and_k(vocab_size: int, mark: bool) -> None:
    kernels = replace(PAIR, vocab_size=vocab_size, max_draft_len=7).variants()
    assert {
        variant.signature["vocab_size"] == "i32:16" for variant in kernels if "vocab_size" in variant.signature
    } == {mark}
    assert {variant.constexprs["WIDTH"] for variant in kernels if "WIDTH" in variant.constexprs} == {8}
    assert {variant.constexprs["TILES"] for variant in kernels if "TILES" in variant.constexprs} == {64}


def test_a_hybrid_has_kernels_for_each_kind_of_its_delta_nets(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
    make_target(tmp_path / "target", family="qwen3_5_text", **sizes)
    make_zlab_drafter(
        tmp_path / "drafter", target_dir=tmp_path / "target", block_size=4, head_dim=32, target_layer_ids=(0,)
    )
    fields = {"target": "target", "drafter": "drafter", "dtype": "bfloat16", "max_batch_size": 40, "tp_size": 2}
    kernels = kernels_of_config(build_config_from(fields, source="test"), tmp_path)
    [deltas] = kernels.deltas  # of all three layers, a rank's half of the heads
    state = deltas.state("bfloat16")
    assert (state.num_key_heads, state.num_value_heads, state.num_records, deltas.max_requests) == (1, 2, 4, 40)
    ours = [variant for variant in kernels.variants() if "h1x2_d16x16" in variant.name]
    assert {variant.kernel.__name__ for variant in ours} == {
        "convolve_kernel",
        "delta_verify_kernel",
        "delta_prompt_kernel",
        "finish_kernel",
    }
    assert all(variant.constexprs["POOLED"] for variant in ours)
    assert {variant.constexprs["REQUESTS"] for variant in ours if "REQUESTS" in variant.constexprs} == {64}
    assert kernels.layers[0].head_dim == 16 and len(kernels.layers) == 2


def test_a_chain_has_attention_kernels_of_its_own_and_one_for_its_features() -> None:
    layers = (TARGET, replace(DRAFTER, first_key=1))
    plain, chained = (set(names(kernels)) for kernels in (PAIR, replace(PAIR, layers=layers, feature_size=4096)))
    attention = {name for name in plain if name.startswith("attention_bfloat16_bfloat16_block")}
    assert plain - chained == attention
    features = {"previous_rows_bfloat16_v16_b1024_r256"}
    assert chained - plain == {name.replace("_block_", "_chain_block_") for name in attention} | features
    full = {variant.name for variant in library_variants(LibrarySpec(chains=("without", "with")))}
    assert chained <= full and not chained <= {variant.name for variant in library_variants(LibrarySpec())}


def test_an_eagle3_head_names_its_kernels(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=4)
    head = tmp_path / "head"
    layer = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    layer |= {"head_dim": 32, "vocab_size": VOCAB_SIZE, "draft_vocab_size": 32, "num_hidden_layers": 1}
    layer |= {"max_position_embeddings": 256, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rms_norm_eps": 1e-6}
    head.mkdir()
    write_json(head / "config.json", fields | layer | {"rope_theta": 10000.0, "hidden_act": "silu"})
    config = build_config_from({"target": "target", "drafter": "head", "dtype": "float32"}, source="test")
    kernels = kernels_of_config(config, tmp_path)
    [drafter] = [layer for layer in kernels.layers if layer.is_drafter]
    assert (drafter.first_key, drafter.head_dim, drafter.heads_per_kv) == (1, 32, 2)
    assert (kernels.feature_size, kernels.draft_vocab_size) == (64, 32)


def test_an_mtp_head_names_its_kernels_and_those_of_its_experts(tmp_path: Path) -> None:
    from tests.mtp_files import make_mtp_target  # skips without `speculators`

    make_mtp_target(tmp_path / "target", family="qwen3_5_moe_text", mlp_only_layers=[])
    fields = {"target": "target", "drafter": "mtp", "dtype": "float32"}
    kernels = kernels_of_config(build_config_from(fields, source="test"), tmp_path)
    [drafter] = [layer for layer in kernels.layers if layer.is_drafter]
    assert (drafter.first_key, drafter.head_dim, drafter.heads_per_kv, kernels.feature_size) == (1, 16, 2, 64)
    quantized = fields | {"quantization": {"experts": "none", "overrides": {"draft.layers.0.experts.*": "fp8_w8a16"}}}
    forms = {
        experts.down.form
        for experts in kernels_of_config(build_config_from(quantized, source="test"), tmp_path).experts
    }
    assert len(kernels.experts) == 1 and len(forms) == 2


def test_kernels_of_latents_are_those_of_their_sizes_and_pages(tmp_path: Path) -> None:
    """Of every rank, which holds all of them."""
    make_target(tmp_path / "target", family="deepseek_v3")
    make_zlab_drafter(
        tmp_path / "drafter", target_dir=tmp_path / "target", block_size=4, head_dim=32, target_layer_ids=(0,)
    )
    fields = {"target": "target", "drafter": "drafter", "dtype": "bfloat16", "max_batch_size": 40, "tp_size": 2}
    kernels = kernels_of_config(build_config_from(fields | {"page_size": 8}, source="test"), tmp_path)
    [latents] = kernels.latents
    heads = {"nope_dim": 16, "value_dim": 12}
    assert latents == LatentKernels(
        latent_dim=32, rope_dim=8, page_dtype="bfloat16", page_size=8, max_requests=40, **heads
    )
    assert [layer.is_drafter for layer in kernels.layers] == [True]
    names = [variant.kernel.__name__ for variant in latents.variants("bfloat16")]
    assert names == [
        *("write_latents_kernel", "attention_plan_kernel", "latent_attention_kernel", "attention_reduction_kernel"),
        *("attention_plan_kernel", "latent_kv_kernel", "latent_chunk_kernel"),
    ]
    ours = {variant.kernel.__name__: variant.constexprs for variant in latents.variants("bfloat16")}
    assert all(variant in kernels.variants() for variant in latents.variants("bfloat16"))
    attention = ours["latent_attention_kernel"]
    assert (attention["LATENT"], attention["ROPE"], attention["TILE"], attention["POOLED"]) == (32, 8, 64, True)
    assert (attention["KEY_BLOCK"], attention["IS_IN_ONE_PAGE"]) == (16, False)  # two pages of 8
    assert all(
        (ours[f"latent_{name}_kernel"]["NOPE"], ours[f"latent_{name}_kernel"]["VALUE"]) == (16, 12)
        for name in ("kv", "chunk")
    )
    tiles = [variant.constexprs["TILE"] for variant in latents.variants("bfloat16") if "TILE" in variant.constexprs]
    assert tiles == [64, 64, 64, 128, 128, 128]  # each part behind a plan of its own


@pytest.mark.parametrize(("capability", "name"), [("9.0", "90a"), ("10.3", "103a"), ("12.0", "120a"), ("8.9", "89")])
def test_the_architecture_is_that_of_the_plans(capability: str, name: str) -> None:
    assert architecture_of(capability) == name


def configured(path: Path, *, head_dim: int) -> BuildConfig:
    target = make_target(path / "target")
    make_zlab_drafter(path / "drafter", target_dir=target, block_size=4, head_dim=head_dim)
    fields = {"target": "target", "drafter": "drafter", "dtype": "float32", "max_batch_size": 8, "max_seq_len": 128}
    return build_config_from(fields, source="test")


def test_an_engine_of_another_backend_and_its_build_configuration_name_the_same_kernels(tmp_path: Path) -> None:
    config = configured(tmp_path, head_dim=32)
    build_engine(config, tmp_path / "engine", base_dir=tmp_path, overwrite=False, command=(), progress=lambda _: None)
    kernels, architectures = kernels_of_engine(tmp_path / "engine")
    assert kernels == kernels_of_config(config, tmp_path)
    assert architectures == ()
    target = LayerKernels(is_drafter=False, head_dim=16, page_dtype="float32", heads_per_kv=2, max_rows=2048)
    drafter = replace(target, is_drafter=True, head_dim=32, max_rows=4)
    assert kernels == EngineKernels(
        dtype="float32", layers=(target, drafter), max_batch_size=8, max_draft_len=3, vocab_size=VOCAB_SIZE
    )


def test_config_files_alone_name_the_kernels(tmp_path: Path) -> None:
    config = configured(tmp_path, head_dim=32)
    kernels = kernels_of_config(config, tmp_path)
    tensors = [*tmp_path.rglob("*.safetensors")]
    assert len(tensors) == 2
    for path in tensors:
        path.unlink()
    assert kernels_of_config(config, tmp_path) == kernels


def test_an_engine_that_no_kernel_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head_dims: expected multiples of 16 from 16 to 512, found 8"):
        kernels_of_config(configured(tmp_path, head_dim=8), tmp_path)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "none of them"),
        (("--engine", "a", "--all"), "--engine and --all"),
        (("--config", "a", "--dtypes", "float16"), "--config and --dtypes"),
    ],
)
def test_what_to_compile_is_said_in_one_way(
    words: tuple[str, ...],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["plugins.aot", str(tmp_path), *words])
    assert main() == 2
    message = f"expected --engine DIR, --config FILE, or --all for every model, found {found}."
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
