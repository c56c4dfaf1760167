"""Speculators drafters (reduced vocabulary, own head, d2t) against PyPI `speculators`, used as it is.

The reference trains on anchored blocks; one anchor of its training forward is one draft block. Windows are chosen
longer than the context: past its left edge Speculators counts the window from the anchor, engines from each slot.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines import decode, make_executor
from tests.factories import make_speculators_drafter, make_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies deprecate things at import
    reference = pytest.importorskip(
        "speculators.models.dflash", reason="PyPI speculators is not installed: scripts/test installs it"
    )

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 30
BLOCK = 5

DRAFTERS = {
    "reduced vocabulary": {"draft_vocab_size": 9},
    "full vocabulary, the target's head": {"draft_vocab_size": None},
    "causal sliding and full layers": {
        "draft_vocab_size": 9,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 60,
    },
    "non-causal sliding layers": {
        "draft_vocab_size": 9,
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 60,
        "sliding_window_non_causal": True,
    },
    "three taps, out of order": {"draft_vocab_size": 9, "target_layer_ids": (2, 0, 1)},
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", vocab_size=12, tokenizer=False)


def reference_drafter(drafter: Path, target_model):
    """The Speculators model with its own weights, and the target's where the format says they are shared."""
    fields = json.loads((drafter / "config.json").read_text())
    config = reference.DFlashSpeculatorConfig(**fields)
    config.transformer_layer_config._attn_implementation = "eager"
    model = reference.DFlashDraftModel(config=config).eval()
    tensors = load_file(drafter / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
        "t2d",
        "d2t",
    }
    model.embed_tokens.weight.data = target_model.get_input_embeddings().weight.data
    if "lm_head.weight" not in tensors:
        model.lm_head.weight.data = target_model.lm_head.weight.data
    return model, tensors.get("d2t")


@torch.no_grad()
def reference_drafts(target_model, model, offsets, context: list[int], anchor: int) -> list[int]:
    """Slots 1 .. B-1 of one block, as target tokens."""
    padded = torch.tensor([context + [anchor] + [0] * (BLOCK + 1)])
    hidden_states = target_model(padded, output_hidden_states=True).hidden_states
    taps = torch.cat([hidden_states[i] for i in model.target_layer_ids], dim=-1)
    is_anchor = torch.zeros(padded.shape)
    is_anchor[0, len(context)] = 1
    _, logits, *_ = model._backbone_forward(
        taps, padded, is_anchor, hidden_states[-1], torch.zeros_like(padded), max_anchors=1
    )
    tokens = logits[0, 1:].argmax(-1)
    return (tokens if offsets is None else tokens + offsets[tokens]).tolist()


def run_and_expected(target: Path, drafter: Path, reference_dir: Path):
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model, offsets = reference_drafter(reference_dir, target_model)
    sequence, start, expected = PROMPT + run.tokens, len(PROMPT), []
    for num_accepted in run.num_accepted:
        anchor = sequence[start]
        expected.append([anchor, *reference_drafts(target_model, model, offsets, sequence[:start], anchor)])
        start += num_accepted + 1
    return run.blocks, expected


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_every_draft_block_equals_that_of_speculators(tmp_path, target, options):
    drafter = make_speculators_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    blocks, expected = run_and_expected(target, drafter, drafter)
    assert len(blocks) > 5
    assert blocks == expected


def test_d2t_taken_as_an_index_instead_of_an_offset_is_noticed(tmp_path, target):
    drafter = make_speculators_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, draft_vocab_size=9)
    wrong = make_speculators_drafter(tmp_path / "wrong", target_dir=target, block_size=BLOCK, draft_vocab_size=9)
    tensors = load_file(wrong / "model.safetensors")
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(12) < 9
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    blocks, expected = run_and_expected(target, wrong, drafter)
    assert blocks != expected
