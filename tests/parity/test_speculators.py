"""Drafters of Speculators against PyPI `speculators`, in the files that it writes itself.

The reference trains on anchored blocks; one anchor of its training forward is one draft block. Windows are shorter than
the contexts, and than the block.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.drafters import speculators as speculators_config
from dflash_trt.checkpoint.pair import open_pair
from tests.engines import decode, make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.speculators_files import convert_zlab_drafter, open_speculators_drafter, save_speculators_drafter

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 30
BLOCK = 5
SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)  # of twelve tokens

CAUSAL: dict[str, Any] = {"full_layers": (1,), "sliding_window": 3}
NON_CAUSAL: dict[str, Any] = {"full_layers": (), "sliding_window": 3, "sliding_window_non_causal": True}
SECOND: dict[str, Any] = {
    "algorithm": "dflash2",
    "full_layers": (),
    "sliding_window": 4,
    "conv_group_size": 8,
    "selector_rank": 6,
    "selector_top_k": 3,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full vocabulary, the target's head": {},
    "reduced vocabulary": {"draft_tokens": SOME},
    "three taps, out of order": {"aux_hidden_state_layer_ids": (3, 1, 2)},
    "a tap on the last layer": {"aux_hidden_state_layer_ids": (2, 4)},
    "Llama's layer config": {"architecture": "llama", "draft_tokens": SOME},
    "causal sliding and full layers": CAUSAL | {"draft_tokens": SOME},
    "causal sliding layers": {"full_layers": (), "sliding_window": 7},
    "non-causal sliding layers": NON_CAUSAL,
    "DFlash2": SECOND,
    "DFlash2, causal sliding layers": SECOND | {"sliding_window_non_causal": False},
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", vocab_size=12, tokenizer=False)


@torch.no_grad()
def layer_outputs(target_model: Any, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """After the embedding and after every layer, before the final norm, as vLLM hands them to Speculators."""
    outputs = []
    for module in (target_model.model.embed_tokens, *target_model.model.layers):
        module.register_forward_hook(lambda module, given, output: outputs.append(_first(output)))
    hidden_states = target_model(token_ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(*pair) for pair in zip(outputs[:-1], hidden_states[:-1], strict=True))
    assert torch.equal(target_model.model.norm(outputs[-1]), hidden_states[-1])
    return outputs


def _first(output: Any) -> torch.Tensor:
    """Layers with an indexer of keys, as GLM-5's, give its choice as well."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@torch.no_grad()
def reference_drafts(model: Any, states: list[torch.Tensor], token_ids: torch.Tensor, anchor: int) -> list[int]:
    """Slots 1 .. B-1 of the block at this position, as target tokens."""
    taps = torch.cat([states[i] for i in model.target_layer_ids], dim=-1)
    is_anchor = torch.zeros(token_ids.shape)
    is_anchor[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        taps, token_ids, is_anchor, states[-1], torch.zeros_like(token_ids), max_anchors=1
    )
    if hasattr(model, "candidate_selector"):
        return _selected(model.candidate_selector, hidden[0, 1:], logits[0, 1:], int(token_ids[0, anchor]))
    tokens = logits[0, 1:].argmax(-1)
    return (tokens if model.d2t is None else tokens + model.d2t[tokens]).tolist()


def _selected(selector: Any, hidden: torch.Tensor, logits: torch.Tensor, token: int) -> list[int]:
    """A greedy walk of DFlash2's selector."""
    path = []
    for h, row in zip(hidden, logits, strict=True):
        candidates, scores = selector.select(row[None], h[None], torch.tensor([token]))
        token = int(candidates[0, scores[0].argmax()])
        path.append(token)
    return path


def run_and_expected(target: Path, drafter: Path, reference_dir: Path | None = None, *, norms_last: bool = False):
    """Our verify blocks, and those of the reference at the same anchors; `norms_last` is a wrong reading."""
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model = open_speculators_drafter(reference_dir or drafter)
    sequence, start, expected = PROMPT + run.tokens, len(PROMPT), []
    token_ids = torch.tensor([sequence + [0] * (BLOCK + 1)])
    states = layer_outputs(target_model, token_ids)
    if norms_last:
        states[-1] = target_model.model.norm(states[-1])
    for num_accepted in run.num_accepted:
        expected.append([sequence[start], *reference_drafts(model, states, token_ids, start)])
        start += num_accepted + 1
    assert len(run.blocks) > 5
    return run.blocks, expected


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_every_draft_block_equals_that_of_speculators(tmp_path, target, options):
    drafter = save_speculators_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    blocks, expected = run_and_expected(target, drafter)
    assert blocks == expected


@pytest.mark.parametrize(
    "options", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}], ids=["full", "SWA"]
)
def test_a_drafter_converted_from_z_lab_drafts_as_speculators_does(tmp_path, target, options):
    drafter = make_zlab_drafter(tmp_path / "z-lab", target_dir=target, block_size=BLOCK, schema="new", **options)
    converted = convert_zlab_drafter(drafter, tmp_path / "converted", target_dir=target)
    blocks, expected = run_and_expected(target, converted)
    assert blocks == expected


@pytest.mark.parametrize("options", [CAUSAL, NON_CAUSAL], ids=["causal", "non-causal"])
@pytest.mark.parametrize("change", [{"is_window_anchored": False}, {"window": 2}, {"window": 4}], ids=str)
def test_a_window_from_each_slot_or_of_another_length_is_noticed(tmp_path, target, monkeypatch, options, change):
    honest = speculators_config.speculators_masks

    def wrong(*given, **named):
        layers = honest(*given, **named)
        return [mask | change if mask.get("window") else mask for mask in layers]

    monkeypatch.setattr(speculators_config, "speculators_masks", wrong)
    drafter = save_speculators_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    blocks, expected = run_and_expected(target, drafter)
    assert blocks != expected


def test_the_last_layer_tapped_after_the_final_norm_is_noticed(tmp_path, target):
    options = DRAFTERS["a tap on the last layer"]
    drafter = save_speculators_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    assert open_pair(target, drafter).draft.target_layer_ids == (1, 3)
    blocks, expected = run_and_expected(target, drafter, norms_last=True)
    assert blocks != expected


def test_d2t_taken_as_an_index_instead_of_an_offset_is_noticed(tmp_path, target):
    options = {"target_dir": target, "block_size": BLOCK, "draft_tokens": SOME}
    drafter = save_speculators_drafter(tmp_path / "drafter", **options)
    wrong = save_speculators_drafter(tmp_path / "wrong", **options)
    tensors = load_file(wrong / "model.safetensors")
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(12) < len(SOME)
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    blocks, expected = run_and_expected(target, wrong, drafter)
    assert blocks != expected
