"""`python -m scripts.train_demo.train_eagle3`: an EAGLE-3 head for the demo target, to compare DFlash with.

Recipe: arXiv 2503.01840. The target is frozen; every row of a sequence begins a chain, whose later steps read the
features that the head itself made ("training-time test"). Labels are the target's own greedy tokens.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.train_demo.block_drafter import DrafterShape
from scripts.train_demo.chain_head import ChainHead, ChainKeys, shifted
from scripts.train_demo.corpus import END_OF_TEXT, standard_library, token_rows
from scripts.train_demo.responses import ResponseRecipe, Responses, generate_responses
from scripts.train_demo.train_drafter import decoder_shape, target_taps
from scripts.train_demo.train_target import descend, lr_factor, optimizers_for, set_lr


@dataclass(frozen=True, kw_only=True)
class ChainRecipe:
    """Shape and schedule; learning rates at their peak."""

    target_layer_ids: tuple[int, ...] = (1, 4, 6)
    seq_len: int = 256
    batch_size: int = 8  # sequences
    num_corpus_rows: int = 4  # of them; the others are responses
    chain_steps: int = 4
    step_decay: float = 0.8  # what a step's loss weighs beside that of the step before
    num_steps: int = 250
    num_responses: int = 128
    matrix_lr: float = 8e-3
    vector_lr: float = 4e-3
    warmup_fraction: float = 0.05
    seed: int = 0


def train_head(
    target: Qwen3ForCausalLM,
    responses: Responses,
    rows: NDArray[np.int64],  # [num_rows, seq_len] of the corpus
    recipe: ChainRecipe,
    *,
    max_s: float = math.inf,
    report: Callable[[str], None],
) -> ChainHead:
    """Training ends after `num_steps`, or so that its last step ends by `max_s`; the schedule follows whichever."""
    torch.manual_seed(recipe.seed)
    head = initial_head(target, recipe)
    optimizers = optimizers_for(head, matrix_lr=recipe.matrix_lr, vector_lr=recipe.vector_lr)
    start_s, accuracy = time.monotonic(), torch.zeros(recipe.chain_steps)
    for step, tokens in enumerate(_batches(responses, rows, recipe)):
        progress = max(step / recipe.num_steps, (time.monotonic() - start_s) / max_s)
        if progress >= 1:
            break
        set_lr(optimizers, lr_factor(int(1000 * progress), 1000, recipe.warmup_fraction))
        loss, hits = chain_loss(head, target, tokens, recipe)
        descend(loss, head, optimizers)
        accuracy = hits if step == 0 else 0.9 * accuracy + 0.1 * hits
        if step % 20 == 0:
            right = " ".join(f"{each:.3f}" for each in accuracy.tolist())
            report(f"head step {step + 1}  {100 * progress:.0f} %  loss {loss.item():.3f}  right by step {right}")
    return head


def chain_loss(
    head: ChainHead,
    target: Qwen3ForCausalLM,
    tokens: Tensor,  # int64 [sequences, seq_len]
    recipe: ChainRecipe,
) -> tuple[Tensor, Tensor]:  # the loss, and how often each step is right [chain_steps]
    """Row i joins the feature of token i and the embedding of token i + 1.

    Step s of its chain reads token i + 1 + s of the text in the place of its own draft, and its label is the target's
    greedy token behind that one, as long as the text itself was greedy from token i + 2 on.
    """
    with torch.no_grad():
        taps, greedy_next = target_taps(target, tokens, recipe.target_layer_ids)
        embeddings = target.get_input_embeddings()(tokens).float()
    agrees = (greedy_next[:, :-1] == tokens[:, 1:]).float()  # token i + 1 is the target's greedy one
    features, keys = head.features(taps[:, :-1].float()), ChainKeys()
    is_greedy = torch.ones_like(agrees)
    total, weight, hits = torch.zeros(()), 0.0, []
    for step in range(recipe.chain_steps):
        logits, features = head.step(shifted(embeddings[:, 1:], step), features, keys)
        labels = shifted(greedy_next[:, 1:].unsqueeze(-1), step).squeeze(-1)
        if step:
            is_greedy = is_greedy * shifted(agrees.unsqueeze(-1), step).squeeze(-1)
        is_inside = torch.arange(labels.shape[1]) < labels.shape[1] - step
        counted = is_greedy * is_inside
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        total = total + recipe.step_decay**step * (losses * counted).sum() / counted.sum().clamp(min=1)
        weight += recipe.step_decay**step
        hits.append(((logits.argmax(-1) == labels) * counted).sum() / counted.sum().clamp(min=1))
    return total / weight, torch.stack(hits).detach()


def initial_head(target: Qwen3ForCausalLM, recipe: ChainRecipe) -> ChainHead:
    """The layer starts as the target's last one, which reads features, beside its first one, which reads embeddings."""
    config = target.config
    head = ChainHead(head_shape(config, recipe), config.vocab_size)
    layers: Any = target.model.layers
    first, last, hidden = layers[0], layers[-1], config.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            parts = [getattr(layer.self_attn, name).weight for layer in (first, last)]
            getattr(head.midlayer.self_attn, name).weight.copy_(torch.cat(parts, dim=1))
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        head.midlayer.mlp.load_state_dict({k: v.float() for k, v in last.mlp.state_dict().items()})
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight)
        torch.nn.init.normal_(head.fc.weight, std=0.02)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
    return head


def head_shape(config: Qwen3Config, recipe: ChainRecipe) -> DrafterShape:
    return decoder_shape(config, num_layers=1, num_taps=len(recipe.target_layer_ids))


def save_head(head: ChainHead, target: Qwen3Config, recipe: ChainRecipe, path: Path) -> None:
    """A SafeAILab checkpoint in bfloat16: config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [each + 1 for each in recipe.target_layer_ids]},
        "fc_norm": True,
        "norm_output": True,
        "num_hidden_layers": 1,
        "draft_vocab_size": target.vocab_size,
        "vocab_size": target.vocab_size,
        "hidden_size": head.shape.hidden_size,
        "intermediate_size": head.shape.intermediate_size,
        "num_attention_heads": head.shape.num_heads,
        "num_key_value_heads": head.shape.num_kv_heads,
        "head_dim": head.shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": head.shape.rms_norm_eps,
        "rope_theta": head.shape.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _batches(responses: Responses, rows: NDArray[np.int64], recipe: ChainRecipe) -> Iterator[Tensor]:
    """Sequences that the target wrote, and rows of the corpus: int64 [batch_size, seq_len]."""
    random = np.random.default_rng(recipe.seed)
    while True:
        chosen = random.integers(0, len(responses.tokens), recipe.batch_size - recipe.num_corpus_rows)
        corpus = rows[random.integers(0, len(rows), recipe.num_corpus_rows)]
        yield torch.from_numpy(np.concatenate([responses.tokens[chosen], corpus]))


@click.command()
@click.option("--target", type=click.Path(path_type=Path, file_okay=False, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Of the head.")
@click.option("--steps", "num_steps", default=ChainRecipe.num_steps, show_default=True, help="Optimizer steps.")
@click.option("--max-minutes", default=15.0, show_default=True, help="Fewer steps when the time is short.")
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option("--seed", default=0, show_default=True)
def main(target: Path, output: Path, num_steps: int, max_minutes: float, threads: int, seed: int) -> None:
    """Train an EAGLE-3 head for the demo target, on its own responses and the standard library's source code."""
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    recipe = ChainRecipe(num_steps=num_steps, seed=seed)
    untyped: Any = Qwen3ForCausalLM
    model: Qwen3ForCausalLM = untyped.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    rows = token_rows(tokenizer, standard_library().train, seq_len=recipe.seq_len, seed=seed)
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    written = ResponseRecipe(
        num_sequences=recipe.num_responses, seq_len=recipe.seq_len, prompt_lens=(64, 128), batch_size=64, seed=seed
    )
    responses = generate_responses(model, rows, written, end_id=end_id, report=click.echo)
    left_s = 60 * max_minutes - (time.monotonic() - started_s)
    head = train_head(model, responses, rows, recipe, max_s=left_s, report=click.echo)
    save_head(head, model.config, recipe, output)
    click.echo(f"saved {output} after {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
