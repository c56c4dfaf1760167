"""The EAGLE-3 head in training is the head that the engine runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from scripts.train_demo.chain_head import ChainHead, ChainKeys
from scripts.train_demo.responses import Responses
from scripts.train_demo.train_drafter import target_taps
from scripts.train_demo.train_eagle3 import ChainRecipe, head_shape, initial_head, save_head, train_head
from tests.engines import decode, make_executor
from tests.factories import make_target

RECIPE = ChainRecipe(
    target_layer_ids=(0, 1, 2), seq_len=24, batch_size=4, num_corpus_rows=2, chain_steps=3, num_steps=4, matrix_lr=2e-2
)
PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("head") / "target", vocab_size=12, tokenizer=False)


def opened(target_dir: Path) -> Qwen3ForCausalLM:
    untyped: Any = Qwen3ForCausalLM
    model: Qwen3ForCausalLM = untyped.from_pretrained(target_dir, dtype=torch.float32).eval().requires_grad_(False)
    return model


@torch.inference_mode()
def chain(head: ChainHead, target: Qwen3ForCausalLM, tokens: list[int], num_drafts: int) -> list[int]:
    """What training computes in the last row of `tokens`, with its own drafts behind the last one."""
    ids = torch.tensor([tokens])
    taps, _ = target_taps(target, ids, RECIPE.target_layer_ids)
    embed: Any = target.get_input_embeddings()
    features, keys, drafts = head.features(taps[:, :-1]), ChainKeys(), list[int]()
    for step in range(num_drafts):
        following = torch.tensor([[*tokens[1 + step :], *drafts]])
        logits, features = head.step(embed(following), features, keys)
        drafts.append(int(logits[0, -1].argmax()))
    return drafts


def test_a_trained_head_drafts_in_the_engine_what_it_drafted_in_training(tmp_path: Path, target_dir: Path) -> None:
    target, random = opened(target_dir), np.random.default_rng(0)
    rows = random.integers(0, 12, (8, RECIPE.seq_len))
    responses = Responses(tokens=rows[:4], greedy_from=np.zeros(4, np.int64))
    lines: list[str] = []
    head = train_head(target, responses, rows, RECIPE, report=lines.append)
    assert len(lines) == 1 and "right by step" in lines[0]
    untrained = initial_head(target, RECIPE)
    assert not torch.equal(head.fc.weight, untrained.fc.weight)
    save_head(head, target.config, RECIPE, tmp_path / "head")
    stored = {name: tensor.float() for name, tensor in load_file(tmp_path / "head" / "model.safetensors").items()}
    rounded = ChainHead(head_shape(target.config, RECIPE), 12)  # the file is in bfloat16
    rounded.load_state_dict(stored)
    run = decode(make_executor(target_dir, tmp_path / "head"), PROMPT, 20, num_draft_tokens=3)
    sequence, start = PROMPT + run.tokens, len(PROMPT)
    for block, num_accepted in zip(run.blocks, run.num_accepted, strict=True):
        assert block[1:] == chain(rounded, target, sequence[: start + 1], 3)
        start += num_accepted + 1
    assert len(run.blocks) > 5
    stored["midlayer.hidden_norm.weight"] = stored["midlayer.hidden_norm.weight"].flip(0).contiguous() * 2
    save_file(stored, tmp_path / "head" / "model.safetensors", {"format": "pt"})
    changed = decode(make_executor(target_dir, tmp_path / "head"), PROMPT, 20, num_draft_tokens=3)
    assert changed.tokens[:20] == run.tokens[:20] and changed.blocks != run.blocks
