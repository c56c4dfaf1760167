"""The demo recipe, stage by stage, on a corpus and sizes small enough for a test."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from scripts.train_demo import train_target
from scripts.train_demo.corpus import Corpus, train_tokenizer
from scripts.train_demo.responses import ResponseRecipe
from scripts.train_demo.train import Recipes, Stages, train_pair
from scripts.train_demo.train_drafter import DrafterRecipe
from scripts.train_demo.train_target import TargetRecipe, with_vocabulary
from scripts.train_demo.unlikelihood import UnlikelihoodRecipe, is_repetition, unlikelihood

TARGET = TargetRecipe(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    seq_len=64,
    batch_size=4,
    num_tokens=2560,
)
RECIPES = Recipes(
    target=TARGET,
    unlikelihood=UnlikelihoodRecipe(
        ngrams=(3, 4), num_steps=2, prompt_lens=(8,), continuation_len=24, num_prompts=4, num_rows=2
    ),
    responses=ResponseRecipe(num_sequences=8, seq_len=48, prompt_lens=(8,), batch_size=4, sampled_lens=(2, 4)),
    drafter=DrafterRecipe(
        num_layers=1,
        draft_block_size=4,
        target_layer_ids=(0, 1),
        batch_size=4,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=4,
        anchors_per_sequence=8,
        num_steps=3,
    ),
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    sources = tmp_path / "sources"
    sources.mkdir()
    for index in range(40):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(40)]
        (sources / f"{index}.py").write_text("\n".join(lines), encoding="utf-8")
    files = tuple(sorted(sources.iterdir()))
    return Corpus(train=files[:20], held_out=files[20:])


def test_a_pair_is_trained_resumed_and_trained_further(tmp_path: Path, corpus: Corpus) -> None:
    stages = Stages(tmp_path / "pair")
    lines: list[str] = []
    train_pair(stages, RECIPES, corpus, report=lines.append)
    assert any("acceptance_length" in line for line in lines)
    drafter = (stages.drafter / "model.safetensors").read_bytes()

    lines.clear()
    train_pair(stages, RECIPES, corpus, report=lines.append)
    assert sum("skipped" in line for line in lines) == 2
    assert (stages.drafter / "model.safetensors").read_bytes() == drafter

    further = Stages(tmp_path / "further")
    smaller = replace(RECIPES, target=replace(TARGET, vocab_size=280))
    train_pair(further, smaller, corpus, initial=stages.output, report=lines.append)
    assert Qwen3ForCausalLM.from_pretrained(further.target).config.vocab_size == 280
    assert (further.drafter / "model.safetensors").exists()


def test_a_smaller_vocabulary_keeps_the_embeddings_of_its_tokens(tmp_path: Path, corpus: Corpus) -> None:
    large, small = (train_tokenizer(corpus.train, vocab_size=size) for size in (300, 280))
    earlier = train_target._untrained(TARGET)
    train_target.save_target(earlier, large, tmp_path / "target")
    later = with_vocabulary(tmp_path / "target", small, replace(TARGET, vocab_size=280))
    for token, token_id in small.get_vocab().items():
        expected = earlier.get_input_embeddings().weight[large.token_to_id(token)].float()
        torch.testing.assert_close(later.get_input_embeddings().weight[token_id], expected, atol=0, rtol=0)
    torch.testing.assert_close(
        later.model.layers[0].mlp.up_proj.weight, earlier.model.layers[0].mlp.up_proj.weight.float()
    )


def test_unlikelihood_is_log_of_the_rest_and_never_flat() -> None:
    logits = torch.randn(2, 5, 7, requires_grad=True)
    tokens = torch.randint(0, 7, (2, 5))
    chosen = logits.softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(unlikelihood(logits, tokens), -torch.log1p(-chosen))

    certain = torch.tensor([[[60.0, 0.0, 0.0]]], requires_grad=True)
    unlikelihood(certain, torch.tensor([[0]])).sum().backward()
    assert certain.grad is not None and certain.grad[0, 0, 0] == pytest.approx(1.0)


def test_only_tokens_that_end_a_repeated_ngram_after_the_prompt_are_repetitions() -> None:
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 4], [1, 1, 1, 1, 5, 6, 7]])
    found = is_repetition(tokens, 2, start=3)
    assert found.tolist() == [[False, False, False, False, True, True, False], [False] * 3 + [True] + [False] * 3]
