"""Law 6: drafts and the whole loop equal those of z-lab's reference implementation, PyPI `dflash`, used as it is.

Every draft block of a run is compared with one pass of the reference drafter over the same context. The reference
loop is run too, where its cache allows (transformers' sliding cache cannot be cropped); it hands its blocks to the
target, so the drafts are read off the target's inputs. It narrows its last blocks to what is still wanted, which
changes a non-causal draft, so only full-width blocks of the loop are compared.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.checkpoint.pair import open_pair
from tests.engines import decode, make_executor
from tests.factories import edit_json, make_target, make_zlab_drafter, read_json, write_json
from tests.gemma_targets import EXPERTS, PER_LAYER, make_gemma

dflash = pytest.importorskip("dflash.model", reason="PyPI dflash is not installed: scripts/test installs it")

PUBLISHED = Path(__file__).parent.parent / "data" / "drafter_configs"
PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 40
BLOCK = 6

DRAFTERS = {
    "full attention": {},
    "new schema": {"schema": "new"},
    "three taps for two layers, out of order": {"target_layer_ids": (2, 0, 1)},
    "biases": {"attention_bias": True},
    "causal sliding and full layers": {
        "num_layers": 3,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 5,
    },
    "non-causal sliding layers": {
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal full layers": {"is_causal": True},
    "scaled input embedding": {"input_embedding_scale": 0.5},
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", vocab_size=12, tokenizer=False)


def reference_models(target: Path, drafter: Path):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return model, dflash.DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()


def reference_drafts(model, draft, context: list[int], anchor: int) -> list[int]:
    """What the reference drafter proposes after `context` and `anchor`, without any cache."""
    return reference_logits(model, draft, context, anchor).argmax(-1).tolist()


@torch.inference_mode()
def reference_logits(model, draft, context: list[int], anchor: int) -> torch.Tensor:  # [BLOCK - 1, V]
    hidden_states = model(torch.tensor([context]), output_hidden_states=True).hidden_states
    block = torch.tensor([[anchor] + [draft.mask_token_id] * (BLOCK - 1)])
    scale = float(getattr(draft.config, "input_embedding_scale", 1.0))
    hidden = draft(
        target_hidden=dflash.extract_context_feature(hidden_states, draft.target_layer_ids),
        noise_embedding=model.get_input_embeddings()(block) * scale,
        position_ids=torch.arange(len(context) + BLOCK)[None],
    )
    return draft.compute_logits(hidden[:, 1:], model.lm_head)[0]


def expected_blocks(target: Path, drafter: Path, tokens: list[int], our_blocks: list[list[int]]) -> list[list[int]]:
    """The reference's block at every anchor of our run; `tokens` are those of the run."""
    model, draft = reference_models(target, drafter)
    blocks, num_emitted = [], 1
    sequence = PROMPT + tokens
    for block in our_blocks:
        start = len(PROMPT) + num_emitted - 1
        anchor = sequence[start]
        blocks.append([anchor, *reference_drafts(model, draft, sequence[:start], anchor)])
        agreed = [a == b for a, b in zip(block[1:], sequence[start + 1 :], strict=False)]
        num_emitted += 1 + [*agreed, False].index(False)
    return blocks


def reference_run(target: Path, drafter: Path) -> tuple[list[int], list[list[int]]]:
    """Tokens and verify blocks of the reference loop."""
    model, draft = reference_models(target, drafter)
    calls: list[list[int]] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0][0].tolist()))
    ids = dflash.dflash_generate(draft, model, torch.tensor([PROMPT]), NUM_NEW, None)
    return ids[0, len(PROMPT) :].tolist(), calls[1:]


def our_run(target: Path, drafter: Path) -> tuple[list[int], list[list[int]]]:
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    return run.tokens[:NUM_NEW], run.blocks


def full_width(blocks: list[list[int]]) -> list[list[int]]:
    return [block for block in blocks if len(block) == BLOCK]


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_every_draft_block_equals_that_of_the_reference(tmp_path, target, options):
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert len(run.blocks) > 8
    assert run.blocks == expected_blocks(target, drafter, run.tokens, run.blocks)


HYBRIDS = [("qwen3_next", 0), ("qwen3_5_text", 0), ("qwen3_5_moe_text", 2)]


@pytest.mark.parametrize(("family", "seed"), [("qwen3_moe", 7), ("gpt_oss", 1), *HYBRIDS])
def test_every_draft_block_for_a_target_of_another_family_equals_that_of_the_reference(tmp_path, family, seed):
    """The drafter for gpt_oss is like z-lab's: its config says model_type gpt_oss, biases and no layer_types."""
    target = make_target(tmp_path / "target", family=family, seed=seed, vocab_size=12, tokenizer=False)
    like_gpt_oss = {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "initial_context_length": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    }
    options = like_gpt_oss if family == "gpt_oss" else {}
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    if family == "gpt_oss":
        window_keys = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
        fields = read_json(drafter / "config.json")
        write_json(drafter / "config.json", {name: value for name, value in fields.items() if name not in window_keys})
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert len(run.blocks) > 8
    expected = expected_blocks(target, drafter, run.tokens, run.blocks)
    assert run.blocks == expected
    _change_weight(drafter)
    changed = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert changed.tokens[:NUM_NEW] == run.tokens[:NUM_NEW]
    assert changed.blocks != expected


def test_the_published_gpt_oss_config_drafts_with_the_yarn_that_it_leaves_out(tmp_path):
    """Its file as it is, but for sizes; the reference is told the YaRN that transformers' GptOssConfig assumes."""
    target = make_target(tmp_path / "target", family="gpt_oss", seed=1, vocab_size=12, tokenizer=False)
    sized = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, attention_bias=True)
    sizes = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_hidden_layers", "vocab_size")
    tiny = {name: read_json(sized / "config.json")[name] for name in (*sizes, "num_key_value_heads", "dflash_config")}
    fields = read_json(PUBLISHED / "z-lab__gpt-oss-20b-DFlash.config.json") | tiny | {"block_size": BLOCK}
    assert "rope_scaling" not in fields and fields["model_type"] == "gpt_oss"
    write_json(sized / "config.json", fields)
    pair = open_pair(target, sized)
    assert len(pair.notes) == 2
    run = decode(make_executor(target, sized), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert len(run.blocks) > 8
    edit_json(sized / "config.json", num_target_layers=4)  # the reference asks for it
    assert run.blocks != expected_blocks(target, sized, run.tokens, run.blocks), "it reads the file without YaRN"
    edit_json(sized / "config.json", rope_scaling=GptOssConfig().rope_parameters | {"rope_theta": 150000.0})
    assert run.blocks == expected_blocks(target, sized, run.tokens, run.blocks)


@pytest.mark.parametrize("name", [name for name, options in DRAFTERS.items() if "sliding_window" not in options])
def test_the_whole_loop_equals_that_of_the_reference(tmp_path, target, name):
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **DRAFTERS[name])
    tokens, blocks = reference_run(target, drafter)
    our_tokens, our_blocks = our_run(target, drafter)
    assert our_tokens == tokens
    compared = full_width(blocks)
    assert len(compared) > 8
    assert our_blocks[: len(compared)] == compared


def _change_weight(drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    tensors["layers.1.self_attn.v_proj.weight"] *= 1.5
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})


def _move_tap(drafter: Path) -> None:
    fields = read_json(drafter / "config.json")["dflash_config"]
    edit_json(drafter / "config.json", dflash_config=fields | {"target_layer_ids": [0, 1]})


def _make_causal(drafter: Path) -> None:
    edit_json(drafter / "config.json", is_causal=True)


def _change_mask_token(drafter: Path) -> None:
    fields = read_json(drafter / "config.json")["dflash_config"]
    edit_json(drafter / "config.json", dflash_config=fields | {"mask_token_id": 3})


@pytest.mark.parametrize("perturb", [_change_weight, _move_tap, _make_causal, _change_mask_token])
def test_a_perturbed_drafter_drafts_something_else(tmp_path, target, perturb):
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK)
    tokens, blocks = reference_run(target, drafter)
    perturb(drafter)
    our_tokens, our_blocks = our_run(target, drafter)
    assert our_tokens == tokens  # a wrong draft never changes the text
    compared = full_width(blocks)
    assert our_blocks[: len(compared)] != compared


GEMMAS = {
    "3": {"family": "gemma3_text"},
    "4": {"family": "gemma4_text"},
    "4 with experts": {"family": "gemma4_text", **EXPERTS},
    "4 with per-layer embeddings": {"family": "gemma4_text", **PER_LAYER},
    "4 unified": {"family": "gemma4_unified_text"},
}


@pytest.mark.parametrize("options", GEMMAS.values(), ids=GEMMAS.keys())
def test_drafts_for_gemma_see_its_scaled_embedding(tmp_path, options):
    """transformers' module of Gemma's embedding scales its rows, and so the reference drafts from scaled ones."""
    target = make_gemma(tmp_path / "target", **options)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, final_logit_softcapping=5.0)
    executor = make_executor(target, drafter)
    run = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert len(run.blocks) > 8
    expected = expected_blocks(target, drafter, run.tokens, run.blocks)
    assert run.blocks == expected
    unscaled = replace(executor.network.drafter, embedding_scale=1.0)
    executor.network = replace(executor.network, drafter=unscaled)
    assert decode(executor, PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1).blocks != expected


def test_the_logits_of_a_drafter_are_capped_as_the_reference_caps_them(tmp_path, target, monkeypatch):
    """Greedy drafts do not show a cap, and sampled ones hardly."""
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, final_logit_softcapping=2.0)
    seen = []
    draft_tokens = TorchOps.draft_tokens
    monkeypatch.setattr(
        TorchOps, "draft_tokens", lambda *args, **options: seen.append(args[1]) or draft_tokens(*args, **options)
    )
    run = decode(make_executor(target, drafter), PROMPT, 1, num_draft_tokens=BLOCK - 1)
    expected = reference_logits(*reference_models(target, drafter), PROMPT, run.tokens[0])
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=2e-5)  # measured 2e-6
    assert 1.5 < expected.abs().max() < 2
