"""Mistral 3, which also sees: its language model has the tokens and logits of transformers' whole model, given text."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError, ConfigError
from tests.checkpoint.refusals import edit_tensors
from tests.engines import decode, make_executor
from tests.factories import edit_json, make_target, make_zlab_drafter, randomize, read_json

VOCAB_SIZE, BLOCK_SIZE, NUM_NEW = 12, 6, 40
PROMPT = [(7 * i + i // 5) % VOCAB_SIZE for i in range(17)]
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(params=[False, True], ids=["a head of its own", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    plain = make_target(tmp_path / "plain", family="mistral", vocab_size=VOCAB_SIZE, tokenizer=False)
    text = read_json(plain / "config.json") | {"tie_word_embeddings": request.param}
    config = Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=request.param)
    model = Mistral3ForConditionalGeneration(config)
    randomize(dict(model.named_parameters()), seed=3)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=plain, block_size=BLOCK_SIZE)
    return tmp_path / "target", drafter


@torch.inference_mode()
def test_tokens_and_logits_are_those_of_transformers(pair: tuple[Path, Path]) -> None:
    model = Mistral3ForConditionalGeneration.from_pretrained(pair[0], dtype=torch.float32).eval()
    tokens = list(PROMPT)
    for _ in range(NUM_NEW):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = tokens[len(PROMPT) :]
    assert len(set(expected)) > 2
    executor = make_executor(*pair)
    for num_draft_tokens in (0, 1, BLOCK_SIZE - 1):
        assert decode(executor, PROMPT, NUM_NEW, num_draft_tokens=num_draft_tokens).tokens[:NUM_NEW] == expected
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(executor.target_logits(tokens), logits, rtol=0, atol=1e-4)  # measured 1e-5
    name = "language_model.model.layers.1.self_attn.v_proj.weight"  # the negative control
    edit_tensors(pair[0], lambda tensors: tensors.update({name: tensors[name].roll(1, dims=0)}))
    assert (make_executor(*pair).target_logits(tokens) - logits).abs().max() > 0.01


def test_a_part_that_no_one_knows_and_layers_of_ministral_3_are_refused(pair: tuple[Path, Path]) -> None:
    target, _ = pair
    stored = load_file(target / "model.safetensors")
    save_file(stored | {"hearing_tower.norm.weight": torch.ones(3)}, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"hearing_tower\.norm\.weight"):
        make_executor(target)
    text = read_json(target / "config.json")["text_config"]
    edit_json(target / "config.json", text_config=text | {"model_type": "ministral3"})
    with pytest.raises(ConfigError, match=r'expected "mistral", found "ministral3"\. Ministral 3 has a temperature'):
        open_pair(target, None)
