"""The drafter in training is the drafter that others will run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.train_demo.block_drafter import BlockDrafter
from scripts.train_demo.corpus import standard_library
from scripts.train_demo.evaluate import evaluate_drafter
from scripts.train_demo.responses import CachedDecoder, ResponseRecipe, distinct_4gram_fraction, generate_responses
from scripts.train_demo.train_drafter import (
    DrafterRecipe,
    draft_logits,
    initial_drafter,
    load_drafter,
    save_drafter,
    target_taps,
    train_drafter,
)

dflash_model = pytest.importorskip("dflash.model", reason="needs PyPI dflash (pip install --no-deps dflash==0.1.0)")

RECIPE = DrafterRecipe(
    num_layers=2,
    target_layer_ids=(0, 2),
    draft_block_size=4,
    conv_group_size=8,
    selector_rank=6,
    selector_top_k=5,
    anchors_per_sequence=8,
    batch_size=4,
    num_steps=100,
    matrix_lr=2e-2,
)


def make_target(*, vocab_size: int = 64) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    build: Any = Qwen3ForCausalLM
    target: Qwen3ForCausalLM = build(config).eval().requires_grad_(False)
    return target


def make_drafter(target: Qwen3ForCausalLM) -> BlockDrafter:
    """Initial layers, but filters and codebooks away from the identity, as the file's bfloat16 holds them."""
    torch.manual_seed(3)
    drafter = initial_drafter(target, RECIPE)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "_conv" in name or "codebook" in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    return drafter.bfloat16().float()


def reference(path: Path) -> Any:
    model, loading = dflash_model.DFlash2DraftModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    return model


def reference_block(path: Path, target: Qwen3ForCausalLM, tokens: Tensor, anchor: int) -> Tensor:
    """What PyPI dflash computes for one block: [slots, hidden]."""
    block = torch.full((1, RECIPE.draft_block_size), RECIPE.mask_token_id)
    block[0, 0] = tokens[0, anchor]
    hidden = reference(path)(
        position_ids=torch.arange(anchor + RECIPE.draft_block_size)[None],
        noise_embedding=target.get_input_embeddings()(block),
        target_hidden=target_taps(target, tokens[:, :anchor], RECIPE.target_layer_ids)[0],
    )
    assert isinstance(hidden, Tensor)
    return hidden[0]


def trained_blocks(drafter: BlockDrafter, target: Qwen3ForCausalLM, tokens: Tensor, anchors: Tensor) -> Tensor:
    """What training computes for all anchors at once: [anchors, slots, hidden]."""
    blocks = torch.full((1, anchors.shape[1], RECIPE.draft_block_size), RECIPE.mask_token_id)
    blocks[0, :, 0] = tokens[0, anchors[0]]
    taps, _ = target_taps(target, tokens, RECIPE.target_layer_ids)
    hidden = drafter(taps, target.get_input_embeddings()(blocks), anchors)
    assert isinstance(hidden, Tensor)
    return hidden[0]


@pytest.mark.parametrize("anchor_index", [0, 3, 15])
@torch.inference_mode()
def test_training_forward_equals_the_reference_drafter(tmp_path: Path, anchor_index: int) -> None:
    target = make_target()
    drafter = make_drafter(target)
    save_drafter(drafter, target.config, RECIPE, tmp_path)
    tokens = torch.randint(4, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    anchors = torch.arange(3, 35, 2)[None]  # 16 anchors: two groups
    expected = reference_block(tmp_path, target, tokens, int(anchors[0, anchor_index]))
    torch.testing.assert_close(
        trained_blocks(drafter, target, tokens, anchors)[anchor_index], expected, atol=1e-5, rtol=0
    )

    shifted = trained_blocks(drafter, target, tokens, anchors + 1)[anchor_index]
    assert (shifted - expected).abs().max() > 1e-2
    drafter.layers[0].get_parameter("self_attn.k_norm.weight").mul_(1.05)
    perturbed = trained_blocks(drafter, target, tokens, anchors)[anchor_index]
    assert (perturbed - expected).abs().max() > 1e-4


@torch.inference_mode()
def test_the_selector_in_training_scores_as_the_reference_walks(tmp_path: Path) -> None:
    """Given the walk's own tokens as those before each slot, training's best candidates are the walk."""
    target = make_target()
    drafter = make_drafter(target)
    save_drafter(drafter, target.config, RECIPE, tmp_path)
    hidden, anchors = torch.randn(3, RECIPE.draft_block_size - 1, 32), torch.tensor([5, 17, 40])
    path, *_ = reference(tmp_path).propose(hidden, anchors, target.lm_head, 0.0)
    logits, previous = target.lm_head(hidden), torch.cat([anchors[:, None], path[:, :-1]], dim=1)
    scores = logits + drafter.candidate_selector(hidden, previous)
    kept = logits.topk(RECIPE.selector_top_k).indices
    best = kept.gather(-1, scores.gather(-1, kept).argmax(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(best, path)
    assert not torch.equal(logits.argmax(-1), path), "the selector changes nothing"


def test_a_dflash_drafter_is_trained_further_as_it_is(tmp_path: Path) -> None:
    target = make_target()
    earlier = initial_drafter(target, RECIPE).bfloat16().float()
    save_drafter(earlier, target.config, RECIPE, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if "_conv" not in name and "candidate_selector" not in name}
    assert len(tensors) - len(kept) == 4 * RECIPE.num_layers + 3
    save_file(kept, tmp_path / "model.safetensors")
    loaded = load_drafter(tmp_path, target, RECIPE)
    tokens, anchors = torch.randint(4, 64, (1, 40)), torch.arange(3, 19, 2)[None]
    with torch.inference_mode():
        before, _, _ = draft_logits(earlier, target, tokens, anchors, RECIPE)
        after, _, _ = draft_logits(loaded, target, tokens, anchors, RECIPE)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_a_block_neither_sees_its_anchor_row_nor_later_rows() -> None:
    target = make_target()
    drafter = initial_drafter(target, RECIPE)
    taps = torch.randn(1, 20, 64)
    embeddings, anchors = torch.randn(1, 1, 4, 32), torch.tensor([[9]])
    hidden = drafter(taps, embeddings, anchors)
    for row, is_visible in ((8, True), (9, False), (19, False)):
        changed = taps.clone()
        changed[0, row] += 1
        assert torch.equal(drafter(changed, embeddings, anchors), hidden) is not is_visible


def test_responses_are_the_targets_own_greedy_text() -> None:
    target = make_target()
    rows = np.random.default_rng(0).integers(4, 64, size=(12, 32))
    recipe = ResponseRecipe(num_sequences=12, seq_len=48, prompt_lens=(8, 16), batch_size=4, sampled_lens=(2, 5))
    responses = generate_responses(target, rows, recipe, end_id=0, report=lambda line: None)
    assert responses.tokens.shape == (12, 48)
    assert set(responses.greedy_from) - {8, 16}, "no sequence starts with sampled tokens"
    argmax = target(torch.from_numpy(responses.tokens)).logits.argmax(-1).numpy()
    for row, start in enumerate(responses.greedy_from):
        np.testing.assert_array_equal(responses.tokens[row, start:], argmax[row, start - 1 : -1])


@torch.inference_mode()
def test_cached_decoder_equals_transformers() -> None:
    target = make_target()
    tokens = torch.randint(4, 64, (3, 12), generator=torch.Generator().manual_seed(2))
    decoder = CachedDecoder(target, batch_size=3, max_seq_len=12)
    rows = [decoder.next_logits(tokens[:, :9])] + [decoder.next_logits(tokens[:, i : i + 1]) for i in range(9, 12)]
    torch.testing.assert_close(torch.stack(rows, 1), target(tokens).logits[:, 8:], atol=1e-5, rtol=0)


def test_training_teaches_the_drafter_its_own_text() -> None:
    target = make_target()
    rows = np.random.default_rng(0).integers(4, 64, size=(8, 40))
    response_recipe = ResponseRecipe(num_sequences=8, seq_len=40, prompt_lens=(8,), sampled_fraction=0.0)
    responses = generate_responses(target, rows, response_recipe, end_id=0, report=lambda line: None)
    untrained = initial_drafter(target, RECIPE)
    trained = train_drafter(target, responses, RECIPE, report=lambda line: None)
    before = evaluate_drafter(untrained, target, responses, RECIPE)
    after = evaluate_drafter(trained, target, responses, RECIPE)
    assert after.acceptance_length > before.acceptance_length + 1.0


def test_corpus_split_is_stable_and_disjoint() -> None:
    corpus = standard_library()
    assert corpus == standard_library()
    assert not set(corpus.train) & set(corpus.held_out)
    assert 0.02 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.08
    assert "zipimport.py" in {path.name for path in corpus.held_out}, "files have changed sides"


def test_distinct_4grams_tell_a_loop_from_text() -> None:
    assert distinct_4gram_fraction(np.arange(100)) == 1.0
    assert distinct_4gram_fraction(np.tile(np.arange(4), 25)) < 0.05
