"""Laws 1, 4 and 5 for Gemma: transformers' tokens with and without drafts, on one rank and two."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError, ConfigError
from dflash_trt.core.request import Request
from dflash_trt.core.state_spec import paged
from dflash_trt.engine_dir import EngineDir
from dflash_trt.network.decoder import run_target
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import PAGE_SIZE, decode, make_executor
from tests.executor.rank_engines import PACKED, build, write_calibration_prompts
from tests.factories import edit_json, make_zlab_drafter, read_json, write_json
from tests.gemma_targets import EVERYTHING, EXPERTS, PER_LAYER, make_gemma, nest

NUM_NEW, VOCAB_SIZE, BLOCK_SIZE = 40, 12, 6
LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 70)  # the last one is longer than the windows
PROMPTS = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in LENGTHS]
SLIDING, FULL = "sliding_attention", "full_attention"

TARGETS: dict[str, dict[str, Any]] = {
    "3": {"family": "gemma3_text"},
    "3, all layers slide, one K/V head, other scale": {
        "family": "gemma3_text",
        "layer_types": [SLIDING] * 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 7,
    },
    "3, biases, its own head, heads of 32": {
        "family": "gemma3_text",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "head_dim": 32,
    },
    "3, capped logits, no windows": {
        "family": "gemma3_text",
        "layer_types": [FULL] * 4,
        "final_logit_softcapping": 0.1,
    },
    "4": {"family": "gemma4_text"},
    "4 unified, two global K/V heads, all of a head rotated": {
        "family": "gemma4_unified_text",
        "num_global_key_value_heads": 2,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 7000.0, "factor": 2.0},
        },
    },
    "4, projections of V, biases, its own head, full layers of the sliding ones' sizes": {
        "family": "gemma4_text",
        "attention_k_eq_v": False,
        "attention_bias": True,
        "global_head_dim": 16,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 10.0,
        "layer_types": [FULL, SLIDING, FULL, SLIDING],  # transformers makes the last one full
    },
    "4 with experts": {"family": "gemma4_text", **EXPERTS},
    "4 with experts, one chosen, projections of V": {
        "family": "gemma4_text",
        **EXPERTS,
        "top_k_experts": 1,
        "attention_k_eq_v": False,
        "layer_types": [SLIDING] * 3 + [FULL],
    },
    "4 with per-layer embeddings": {"family": "gemma4_text", **PER_LAYER},
    "4 with per-layer embeddings, K/V of one layer for all of its kind": {
        "family": "gemma4_text",
        **PER_LAYER,
        "hidden_size_per_layer_input": 4,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "layer_types": [SLIDING, FULL] * 3,
    },
    "4, K/V of the first layers for the last, of double width": {
        "family": "gemma4_text",
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
    },
}


def expected_tokens(target: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


def make_pair(root: Path, **options: Any) -> tuple[Path, Path]:
    target = make_gemma(root / "target", vocab_size=VOCAB_SIZE, **options)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE)


OTHER_CORNERS = ("3, all layers slide", "3, capped", "4 unified", "4 with experts, one", "4, K/V of the first")


def marked(names: Iterable[str]) -> list[Any]:
    """Each a parameter; corners whose parts others have, too, are slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(OTHER_CORNERS)) for name in names]


@pytest.fixture(scope="module", params=marked(TARGETS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), **TARGETS[request.param])


def tokens_of(executor: TorchExecutor, num_draft_tokens: int) -> list[list[int]]:
    """Of all prompts, in mixed batches."""
    scheduler = Scheduler(executor.limits, SchedulerConfig(), FixedDraftLength(num_draft_tokens))
    loop = EngineLoop(executor, scheduler, overlaps=False)
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    streams = [
        loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling))
        for i, prompt in enumerate(PROMPTS)
    ]
    while loop.step():
        pass
    return [list(stream.result(timeout_s=1).token_ids) for stream in streams]


def test_greedy_tokens_equal_those_of_transformers(pair: tuple[Path, Path]) -> None:
    expected = expected_tokens(pair[0])
    assert len({tuple(tokens) for tokens in expected}) > 1 and max(len(set(tokens)) for tokens in expected) > 3
    executor = make_executor(*pair, max_batch_size=4)
    for num_draft_tokens in (0, 1, BLOCK_SIZE - 1):
        assert tokens_of(executor, num_draft_tokens) == expected
    alone = make_executor(pair[0], has_kernels=False)
    assert decode(alone, PROMPTS[-1], NUM_NEW, num_draft_tokens=0, chunk=7).tokens[:NUM_NEW] == expected[-1]


@torch.inference_mode()
def test_taps_and_logits_equal_those_of_transformers(pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    theirs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: theirs.append(out if isinstance(out, torch.Tensor) else out[0]))
    logits = model(torch.tensor([PROMPTS[-1]]), use_cache=False).logits[0]
    executor = make_executor(pair[0])
    taps = taps_of(executor, PROMPTS[-1])
    for ours, tap in zip(taps, theirs, strict=True):
        assert difference(ours, tap[0]) < 1e-4  # measured 3e-5
    assert difference(executor.target_logits(PROMPTS[-1]), logits) < 1e-4  # measured 3e-5


def taps_of(executor: TorchExecutor, prompt: list[int]) -> list[torch.Tensor]:
    inputs = step_inputs(sequence_batch(prompt, page_size=PAGE_SIZE))
    ops, network = executor._ops(inputs, num_draft_tokens=0), executor.network
    weights, caches = network.target_weights, executor._state.target_kv
    return list(run_target(ops, network.target, weights, inputs.token_ids, ops.token_rows(), caches))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, in parts of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


CORRUPTED_TENSORS = {
    "3": ["self_attn.q_norm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"],
    "4": ["self_attn.k_norm", "layer_scalar"],
    "4 with experts": ["router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2", "experts.down_proj"],
    "4 with per-layer embeddings": ["per_layer_input_gate", "post_per_layer_input_norm"],
}
CORRUPTED_KEYS: dict[str, dict[str, Any]] = {
    "3": {"query_pre_attn_scalar": 21, "sliding_window": 7},
    "4": {"final_logit_softcapping": 0.31, "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 50000.0}}},
}


@pytest.mark.parametrize("name", CORRUPTED_TENSORS)
def test_a_changed_weight_and_a_changed_key_are_noticed(tmp_path: Path, name: str) -> None:
    """The negative controls of the two tests above."""
    target = make_gemma(tmp_path / "target", vocab_size=VOCAB_SIZE, **TARGETS[name])
    prompt = PROMPTS[-1]
    expected = make_executor(target).target_logits(prompt)
    stored = load_file(target / "model.safetensors")
    for part in CORRUPTED_TENSORS[name]:
        [changed] = [key for key in stored if key.startswith("model.layers.2.") and f".{part}" in key]
        tensors = stored | {changed: stored[changed].roll(1, 0) * 1.01}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        assert difference(make_executor(target).target_logits(prompt), expected) > 5e-4, part
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    for key, value in CORRUPTED_KEYS.get(name, {}).items():
        original = read_json(target / "config.json")[key]
        edit_json(target / "config.json", **{key: value})
        assert difference(make_executor(target).target_logits(prompt), expected) > 5e-4, key
        edit_json(target / "config.json", **{key: original})
    assert torch.equal(make_executor(target).target_logits(prompt), expected)


IN_TWO = ("3", "4 with experts", "4 with per-layer embeddings, K/V of one layer for all of its kind")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_TWO)) for name in TARGETS]
)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    expected = expected_tokens(make_pair(tmp_path, **TARGETS[name])[0])
    assert texts_of(build(tmp_path, tp_size=2, max_seq_len=128)) == expected


def texts_of(engine: EngineDir) -> list[list[int]]:
    with LLM(engine.path, kv_cache_bytes=1 << 20, draft_length=3) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]


def test_gemma_4_inside_a_model_that_also_sees(tmp_path: Path) -> None:
    target = make_gemma(tmp_path / "target", family="gemma4_text", final_logit_softcapping=None)
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_config": None}
    seeing = nest(target, tmp_path / "seeing", prefix="model.language_model.", **outer)
    found, wanted = (make_executor(path).target_logits(PROMPTS[-1]) for path in (seeing, target))
    assert torch.equal(found, wanted)


@pytest.mark.slow
def test_packed_weights_and_fp8_pages_of_both_geometries_give_one_text_on_one_rank_and_on_two(tmp_path: Path) -> None:
    target = make_gemma(tmp_path / "target", family="gemma4_text", **EVERYTHING)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK_SIZE, intermediate_size=96)
    write_calibration_prompts(tmp_path)
    plain = build(tmp_path, tp_size=1, max_seq_len=128)
    exact = texts_of(plain)
    quantization = PACKED | {"experts": "fp8"}
    engines = [build(tmp_path, tp_size=n, max_seq_len=128, overwrite=True, quantization=quantization) for n in (1, 2)]
    states = engines[0].manifest.pretrained_config.states()
    assert [type(state).__name__ for state in states.target] == ["PagedKv", "PagedKv", "SharedKv", "SharedKv"]
    assert {state.head_dim for state in paged(states.target)} == {16, 32}
    assert all(state.dtype == "float8_e4m3fn" for state in paged(states.target))
    one, two = (texts_of(engine) for engine in engines)
    assert one == two != exact


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("num_kv_shared_layers", 4),
        ("hidden_activation", "silu"),
        ("attn_logit_softcapping", 50.0),
        ("layer_types", ["chunked_attention"] * 4),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    target = make_gemma(tmp_path / "target", family="gemma4_text")
    edit_json(target / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=f"target config.json key '{key}': expected "):
        open_pair(target, None)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_model_that_also_sees_is_read_for_its_language_model(tmp_path: Path, prefix: str) -> None:
    """Published files leave out what transformers has as a default, and have a theta for each kind of layer."""
    target = make_gemma(tmp_path / "target", family="gemma3_text", rms_norm_eps=1e-6, num_key_value_heads=4)
    architecture = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
    }
    seeing = nest(target, tmp_path / "seeing", prefix=prefix, eos_token_id=[1, 6], **architecture)
    config = read_json(seeing / "config.json")
    text = config["text_config"]
    assert text.pop("rms_norm_eps") and text.pop("num_key_value_heads") and text.pop("tie_word_embeddings")
    scaling = text.pop("rope_parameters")["full_attention"]
    text |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "rope_local_base_freq": 10000.0}
    text.pop("eos_token_id")
    write_json(seeing / "config.json", config)
    found, wanted = (make_executor(path).target_logits(PROMPTS[-1]) for path in (seeing, target))
    assert torch.equal(found, wanted)


def test_the_scales_of_fp8_pages_are_read_where_a_layer_has_k_and_v_of_its_own(tmp_path: Path) -> None:
    types = [SLIDING, FULL] * 2
    target = make_gemma(
        tmp_path / "target", family="gemma4_text", **PER_LAYER, num_kv_shared_layers=2, layer_types=types
    )
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    seeing = nest(target, tmp_path / "seeing", prefix="model.language_model.", **outer)
    section = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    write_json(seeing / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": section})
    stored = load_file(seeing / "model.safetensors")
    for i in range(2):
        for letter, scale in (("k", 0.5), ("v", 0.25)):
            name = f"model.language_model.layers.{i}.self_attn.{letter}_proj.{letter}_scale"
            stored[name] = torch.tensor(scale + i)
    save_file(stored, seeing / "model.safetensors", {"format": "pt"})
    found = open_pair(seeing, None).quantization.target_kv
    assert found is not None and [(scales.k, scales.v) for scales in found] == [(0.5, 0.25), (1.5, 1.25)] * 2
    del stored["model.language_model.layers.1.self_attn.v_proj.v_scale"]
    save_file(stored, seeing / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="expected the K/V scales of every layer"):
        open_pair(seeing, None)


@torch.inference_mode()
def test_the_scale_of_the_embedding_is_rounded_to_bfloat16_as_in_transformers(tmp_path: Path) -> None:
    target = make_gemma(tmp_path / "target", family="gemma3_text", hidden_size=72)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    ids = torch.arange(VOCAB_SIZE, dtype=torch.int32)
    executor = make_executor(target, dtype=torch.bfloat16)
    ops = executor._ops(step_inputs(sequence_batch(ids.tolist(), page_size=PAGE_SIZE)), num_draft_tokens=0)
    weights = executor.network.target_weights
    found = ops.embedding(weights.embedding, ids, weights.embedding_scale)
    assert torch.equal(found, model.get_input_embeddings()(ids))
    assert not torch.equal(found, weights.embedding * 72**0.5)
