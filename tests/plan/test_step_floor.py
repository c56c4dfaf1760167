"""Floors of a step against sums written out by hand, for models of published size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import GPUS, gpu_of
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.plan.remedies import _fewer_step_tokens, _formats, _fp8_pages, _more_ranks
from dflash_trt.plan.step_floor import Step, chosen_fraction
from dflash_trt.plan.step_work import EngineWork
from scripts.published_shapes import write_config

H, FFN, V, LAYERS = 4096, 12288, 151936, 36  # Qwen3-8B
KV_BYTES, DRAFT_KV_BYTES = LAYERS * 2 * 1024 * 2, 5 * 2 * 1024 * 2  # per token
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": V,
    "eos_token_id": 151645,
}
DRAFTER: dict[str, Any] = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": LAYERS,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
}
ATTENTION = (4096 + 2 * 1024) * H + H * 4096  # weights of q, k, v and o
NORMS = 2 * H + 2 * 128
TARGET_WEIGHTS = LAYERS * (ATTENTION + 3 * FFN * H + NORMS) + H + V * H  # without the embedding
DRAFT_KV = 5 * 2048 * H
DRAFT_WEIGHTS = 5 * (ATTENTION + 3 * FFN * H + NORMS) + 5 * H * H + 2 * H + DRAFT_KV + V * H  # K and V twice, the head


def write(root: Path, name: str, fields: dict[str, Any]) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    root = tmp_path_factory.mktemp("published")
    return read_specs(write(root, "target", QWEN3_8B), write(root, "drafter", DRAFTER))


def planned(pair: PairSpecs, gpu: str = "h200", **fields: Any) -> EnginePlan:
    return plan_engine(BuildConfig(target="t", drafter="d", **fields), pair, gpu_of(gpu))


ONE = Step(num_requests=1, context_len=8192, num_draft_tokens=15)


def test_a_verify_step_reads_every_weight_and_the_context(pair: PairSpecs) -> None:
    floor = planned(pair).floor(ONE, has_drafter=True)
    assert floor.weights_bytes == 2 * (TARGET_WEIGHTS + DRAFT_WEIGHTS)
    assert floor.kv_bytes == (KV_BYTES + DRAFT_KV_BYTES) * (8192 + 16)
    assert floor.memory_s == pytest.approx((floor.weights_bytes + floor.kv_bytes) / 4.8e12)
    assert floor.total_s == floor.memory_s > floor.compute_s > 0
    assert floor.exchange_bytes == 0


def test_autoregressive_decoding_reads_the_target_alone(pair: PairSpecs) -> None:
    plain = Step(num_requests=1, context_len=8192, num_draft_tokens=0)
    floor = planned(pair).floor(plain, has_drafter=False)
    assert floor.weights_bytes == 2 * TARGET_WEIGHTS
    assert floor.kv_bytes == KV_BYTES * (8192 + 1)


def test_flops_are_two_for_each_weight_and_row(pair: PairSpecs) -> None:
    """Vectors multiply nothing; scores and their products with V take four per query feature and key."""
    plain = Step(num_requests=4, context_len=1000, num_draft_tokens=0)
    matrices = TARGET_WEIGHTS - LAYERS * NORMS - H
    attention = LAYERS * 4 * 4096 * 1001 * 4
    floor = planned(pair).floor(plain, has_drafter=False)
    assert floor.flops == 2 * 4 * matrices + attention
    assert floor.compute_s == pytest.approx(floor.flops / 989e12)


def test_fp8_halves_what_is_read_and_doubles_the_peak(pair: PairSpecs) -> None:
    plain, fp8 = planned(pair), planned(pair, quantization=QuantizationConfig(target="fp8", kv_cache="fp8"))
    floors = [plan.floor(ONE, has_drafter=True) for plan in (plain, fp8)]
    heads = 2 * 2 * V * H  # which keep bfloat16
    assert floors[1].weights_bytes - heads == pytest.approx((floors[0].weights_bytes - heads) / 2, rel=1e-3)
    assert floors[1].kv_bytes * 2 == floors[0].kv_bytes
    causal = 8192 * 16 + 16 * 17 / 2  # keys that the rows of a block see: those before them, or the whole block
    attention = 4 * 4096 * (LAYERS * causal + 5 * (8192 + 16) * 16)
    unchanged = 2 * V * H * (16 + 15) + attention
    assert floors[1].compute_s == pytest.approx(unchanged / 989e12 + (floors[1].flops - unchanged) / 1979e12)
    weight_only = planned(pair, quantization=QuantizationConfig(target="nvfp4_w4a16")).floor(ONE, has_drafter=True)
    assert weight_only.compute_s == pytest.approx(floors[0].compute_s)


def test_ranks_divide_the_bytes_and_exchange_the_sums(pair: PairSpecs) -> None:
    one, four = (planned(pair, tp_size=n).floor(ONE, has_drafter=True) for n in (1, 4))
    replicated = 2 * (LAYERS * NORMS + 5 * NORMS + H + 2 * H + 5 * H * H)  # norms, and fc
    assert four.weights_bytes == (one.weights_bytes - replicated) // 4 + replicated
    assert four.kv_bytes * 4 == one.kv_bytes
    sums, logits = 2 * 2 * (LAYERS + 5) * 16 * H, (16 + 15) * V
    assert four.exchange_bytes == round((sums + logits) * 3 / 4) * 2
    assert four.exchange_s == pytest.approx(four.exchange_bytes / 450e9)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("num_draft_tokens", [0, 15])
def test_ranks_wait_for_each_other_twice_a_layer_and_for_the_logits_of_each_model(
    pair: PairSpecs, tp_size: int, num_draft_tokens: int
) -> None:
    work = EngineWork(planned(pair, tp_size=tp_size).pretrained_config, has_drafter=True)
    rows = ComputedRows(num_tokens=np.array([16]), context_lens=np.array([100]), num_draft_tokens=num_draft_tokens)
    num_models, num_layers = (2, LAYERS + 5) if num_draft_tokens else (1, LAYERS)
    assert sum(item.count for item in work.of(rows).exchanges) == (2 * num_layers + num_models if tp_size > 1 else 0)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_remedy_of_ranks_has_more_of_them(tp_size: int) -> None:
    config = BuildConfig(target="t", tp_size=tp_size)
    found = [changed.tp_size for _, changed in _more_ranks(config)]
    assert found and min(found) > tp_size and len(set(found)) < len(found)  # with whole experts on a rank, too


@pytest.mark.parametrize(("batch_size", "fewest"), [(4, 256), (500, 512), (512, 512), (513, 1024), (2048, None)])
def test_a_remedy_of_fewer_step_tokens_leaves_one_to_each_request(batch_size: int, fewest: int | None) -> None:
    config = BuildConfig(target="t", max_batch_size=batch_size, max_num_tokens=2048)
    found = [changed.max_num_tokens for _, changed in _fewer_step_tokens(config)]
    assert found == [num_tokens for num_tokens in (1024, 512, 256) if fewest is not None and num_tokens >= fewest]


def test_a_remedy_of_a_format_leaves_the_others_as_they_are() -> None:
    found = {}
    for choices in ({}, {"target": "int4"}, {"kv_cache": "fp8", "lm_head": "fp8"}):
        config = BuildConfig(target="t", quantization=QuantizationConfig(**choices))
        changed = [other.quantization for kind in (_formats, _fp8_pages) for _, other in kind(config)]
        found[tuple(choices)] = [(each.target, each.kv_cache, each.lm_head) for each in changed]
    formats = ("fp8", "nvfp4", "nvfp4_w4a16")
    assert found[()] == [*((name, "none", "none") for name in formats), ("none", "fp8", "none")]
    assert found["target",] == [("int4", "fp8", "none")]
    assert found["kv_cache", "lm_head"] == [(name, "fp8", "fp8") for name in formats]


def test_a_chain_reads_its_layer_and_its_head_for_every_draft(tmp_path: Path) -> None:
    """EAGLE-3's Llama layer on the embedding and the feature; the context takes K and V and the features once more."""
    head = QWEN3_8B | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 19, 34]},
    }
    pair = read_specs(write(tmp_path, "target", QWEN3_8B), write(tmp_path, "head", head))
    plan = planned(pair)
    floor = plan.floor(Step(num_requests=1, context_len=8192, num_draft_tokens=5), has_drafter=True)
    context_kv = 2 * 1024 * 2 * H
    a_pass = 4096 * 2 * H + context_kv + H * 4096 + 3 * FFN * H + 3 * H + 32000 * H
    assert floor.weights_bytes == 2 * (TARGET_WEIGHTS + 3 * H * H + H + context_kv + 5 * a_pass)
    assert floor.kv_bytes == KV_BYTES * (8192 + 6) + 2 * 1024 * 2 * (5 * 8192 + 6) + 2 * H * (6 + 1)
    target = plan.floor(Step(num_requests=1, context_len=8192, num_draft_tokens=5), has_drafter=False)
    of_tokens = 6 * (3 * H * H + context_kv)
    of_pass = 3 * (4096 * 2 * H + context_kv + H * 4096) + 3 * FFN * H + 32000 * H  # 1 to 5 slots, and the last of them
    scores = 4 * 4096 * (5 * 3) * (8192 + 6)
    assert floor.flops - target.flops == pytest.approx(2 * (of_tokens + 5 * of_pass) + scores)
    rows = Step(num_requests=2, context_len=8192, num_draft_tokens=5).rows
    config = planned(pair, tp_size=4).pretrained_config
    found, alone = (EngineWork(config, has_drafter=has).of(rows) for has in (True, False))
    logits = 12 * V + 10 * 32000
    sums = 4 * LAYERS * 12 * H + 4 * 5 * 2 * H  # of the chain a row of each request
    assert (found.num_logits, found.exchange_bytes) == (logits, (sums + logits) * 3 / 4 * 2)
    features = 2 * H + 3 * FFN // 4
    assert found.activation_bytes - alone.activation_bytes == 2 * 2 * 5 * 2 * features
    assert [mixed.times for mixed in found.mixings if mixed.mixer is not None] == [LAYERS, 5], "once a pass"


def test_an_mtp_head_reads_its_layer_its_projection_and_the_target_s_head_for_every_draft(tmp_path: Path) -> None:
    """Qwen3.5-27B: 24 heads of 256 with a gate each, 4 K/V heads, norms in float32."""
    target = write_config(tmp_path, "Qwen/Qwen3.5-27B")
    plan = planned(read_specs(target, target))
    step = Step(num_requests=1, context_len=8192, num_draft_tokens=5)
    with_head, alone = (plan.floor(step, has_drafter=has) for has in (True, False))
    hidden, ffn, q, kv, vocab_size = 5120, 17408, 24 * 256, 2 * 4 * 256, 248320
    projection = 2 * hidden * hidden
    a_pass = projection + (2 * q + kv + q) * hidden + 3 * ffn * hidden + vocab_size * hidden
    norms = 5 * hidden + 2 * 256  # embeddings, features, before attention and MLP, before the head; q and k
    weights = 2 * (projection + kv * hidden + 5 * a_pass) + 4 * (2 * hidden + 5 * norms)
    assert with_head.weights_bytes - alone.weights_bytes == weights
    pages = 2 * kv * (5 * 8192 + 6) + 2 * hidden * (6 + 1)
    assert with_head.kv_bytes - alone.kv_bytes == pages
    of_tokens = 6 * (projection + kv * hidden)
    of_pass = 3 * (projection + (3 * q + kv) * hidden) + 3 * ffn * hidden + vocab_size * hidden
    scores = 4 * q * (5 * 3) * (8192 + 6)
    assert with_head.flops - alone.flops == pytest.approx(2 * (of_tokens + 5 * of_pass) + scores)


def test_the_experts_of_an_mtp_head_are_read_as_its_rows_choose(tmp_path: Path) -> None:
    """Qwen3.5-35B-A3B: 8 of 256 experts a row, and a pass has one row of a request that reaches them."""
    target = write_config(tmp_path, "Qwen/Qwen3.5-35B-A3B")
    config = planned(read_specs(target, target)).pretrained_config
    rows = Step(num_requests=4, context_len=1024, num_draft_tokens=3).rows
    found, alone = (EngineWork(config, has_drafter=has).of(rows) for has in (True, False))
    of_layers, of_head = (sum(p.num_bytes for p in work.products if p.experts is not None) for work in (alone, found))
    moe = config.target.layers[0].feed_forward
    read = 3 * 2048 * 512 * 2 * 256 * chosen_fraction(moe, 4)
    assert of_head - of_layers == pytest.approx(3 * read)
    assert sum(spec.num_experts > 0 for spec in config.draft.weights().values()) == 2


def test_of_experts_a_step_reads_those_that_its_rows_choose(tmp_path: Path) -> None:
    configs = Path(__file__).parents[2] / "scripts" / "full_size"
    target, drafter = (
        write(tmp_path, name, json.loads((configs / f"{name}.json").read_text()))
        for name in ("gpt-oss-20b", "gpt-oss-20b-DFlash")
    )
    plan = planned(read_specs(target, drafter))
    moe = plan.pretrained_config.target.layers[0].feed_forward
    assert chosen_fraction(moe, 1) == pytest.approx(4 / 32)
    assert chosen_fraction(moe, 8) == pytest.approx(1 - (7 / 8) ** 8)
    plain = Step(num_requests=1, context_len=1024, num_draft_tokens=0)
    matrices = 24 * 3 * 2880 * 2880 * 17 / 32  # of an expert of each layer: 4-bit codes and a byte for 32 of them
    attention = 24 * (64 * 64 + 2 * 8 * 64 + 64 * 64) * 2880 * 2
    head = 201088 * 2880 * 2
    floor = plan.floor(plain, has_drafter=False)
    assert floor.weights_bytes == pytest.approx(4 * matrices + attention + head, rel=0.01)
    windows = 12 * (128 + 1024) + 24  # of the 1024 tokens half of the layers see 128
    assert floor.kv_bytes == windows * 2 * 8 * 64 * 2


def test_recurrent_states_of_all_slots_are_counted(tmp_path: Path) -> None:
    """Sizes of Qwen3.5-27B: 48 layers of 48 heads, whose states take 144 MiB a request."""
    delta = {"num_key_heads": 16, "num_value_heads": 48, "key_head_dim": 128, "value_head_dim": 128}
    fields = QWEN3_8B | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    fields |= {f"linear_{name}": size for name, size in delta.items()}
    pair = read_specs(write(tmp_path, "target", fields), None)
    made = plan_engine(BuildConfig(target="t", max_batch_size=63), pair, gpu_of("h200"))
    assert made.pages is not None and made.fits
    state_bytes = 48 * 48 * 128 * 128 * 4
    assert 64 * state_bytes < made.slot_bytes == made.pages.slot_bytes < 1.05 * 64 * state_bytes
    assert made.pages.snapshot_bytes == 63 * (made.slot_bytes // 64), "a snapshot for each request"
    taken = made.pages.total_bytes + made.slot_bytes + made.pages.snapshot_bytes + made.memory.after_pages_bytes
    assert made.left_bytes == made.free_bytes - taken
    crowded = plan_engine(BuildConfig(target="t", max_batch_size=1023), pair, gpu_of("h200"))
    assert crowded.pages is None and not crowded.fits
    assert crowded.missing_bytes > 1024 * state_bytes - crowded.free_bytes


def test_gpus_have_ascending_memory_and_every_peak() -> None:
    assert [gpu.name for gpu in sorted(GPUS, key=lambda gpu: gpu.memory_bytes)] == ["h100", "h200", "b200", "b300"]
    for gpu in GPUS:
        assert gpu_of(gpu.name) is gpu_of(gpu.name.upper()) is gpu
        assert gpu.bytes_per_s and gpu.link_bytes_per_s and gpu.capability
        assert gpu.flops_of(16) < gpu.flops_of(8) <= gpu.flops_of(4)
        assert (4 in gpu.peak_flops) == (gpu.capability >= (10, 0))
