"""Trains the demo target: a small Qwen3 on the standard library's source, with `transformers`' own model.

Writes an ordinary Hugging Face directory. It refuses to know that a drafter will follow.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.train_demo.corpus import END_OF_TEXT, IM_END, IM_START, MASK

CHAT_TEMPLATE = (
    "{% for message in messages %}" + IM_START + "{{ message['role'] }}\n{{ message['content'] }}" + IM_END + "\n"
    "{% endfor %}{% if add_generation_prompt %}" + IM_START + "assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """Shape and schedule; sizes in tokens, learning rates at their peak."""

    vocab_size: int = 512
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    seq_len: int = 512
    batch_size: int = 16
    num_tokens: int = 8_000_000
    matrix_lr: float = 4e-3
    vector_lr: float = 3e-3
    warmup_fraction: float = 0.03
    seed: int = 0


def train_target(
    rows: NDArray[np.int64],  # [num_rows, seq_len]
    recipe: TargetRecipe,
    *,
    initial: Qwen3ForCausalLM | None = None,
    report: Callable[[str], None],
) -> Qwen3ForCausalLM:
    """Next-token cross entropy; Muon on the matrices of the layers, AdamW on the rest, bfloat16 autocast.

    `initial` is trained further, in place; without one the weights start at random.
    """
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    untyped: Any = initial or _untrained(recipe)
    model: Qwen3ForCausalLM = untyped.to(device)
    optimizers = optimizers_for(model, matrix_lr=recipe.matrix_lr, vector_lr=recipe.vector_lr)
    num_steps = recipe.num_tokens // (recipe.batch_size * recipe.seq_len)
    start_s = time.monotonic()
    mean_loss = float("nan")
    for step, batch in zip(range(num_steps), _batches(rows, recipe), strict=False):
        set_lr(optimizers, lr_factor(step, num_steps, recipe.warmup_fraction))
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.model(input_ids=batch.to(device)).last_hidden_state
            logits = model.lm_head(hidden[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().to(device))
        descend(loss, model, optimizers)
        mean_loss = loss.item() if math.isnan(mean_loss) else 0.95 * mean_loss + 0.05 * loss.item()
        if step % 20 == 0 or step == num_steps - 1:
            speed = (step + 1) * batch.numel() / (time.monotonic() - start_s)
            report(f"target step {step + 1}/{num_steps}  loss {mean_loss:.3f}  {speed:.0f} tok/s")
    return model


def with_vocabulary(earlier: Path, tokenizer: Tokenizer, recipe: TargetRecipe) -> Qwen3ForCausalLM:
    """An earlier target in float32 with another vocabulary: embeddings of the tokens that both have, and all layers."""
    untyped: Any = Qwen3ForCausalLM
    source = untyped.from_pretrained(earlier, dtype=torch.float32)
    earlier_ids = Tokenizer.from_file(str(earlier / "tokenizer.json")).get_vocab()
    model = _untrained(recipe)
    tensors = source.state_dict()
    embeddings = tensors["model.embed_tokens.weight"]
    fresh: Any = model.get_input_embeddings()
    kept = fresh.weight.detach().clone()
    for token, token_id in tokenizer.get_vocab().items():
        if token in earlier_ids:
            kept[token_id] = embeddings[earlier_ids[token]]
    model.load_state_dict({**tensors, "model.embed_tokens.weight": kept, "lm_head.weight": kept})
    return model


def save_target(model: Qwen3ForCausalLM, tokenizer: Tokenizer, path: Path) -> None:
    """Hugging Face directory in bfloat16, tokenizer and chat template included."""
    untyped: Any = PreTrainedTokenizerFast
    wrapped = untyped(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, mask_token=MASK, additional_special_tokens=[IM_START, IM_END]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    narrow: Any = model
    narrow.to(torch.bfloat16).save_pretrained(path)
    wrapped.save_pretrained(path)


def optimizers_for(model: torch.nn.Module, *, matrix_lr: float, vector_lr: float) -> list[torch.optim.Optimizer]:
    """Muon (orthogonalised momentum) for hidden matrices; AdamW for tables of tokens, norms and biases."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and not _is_table(name)]
    rest = [p for name, p in trained if p.ndim != 2 or _is_table(name)]
    muon = torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def _is_table(name: str) -> bool:
    """Whether a parameter has a row for every token."""
    return any(part in name for part in ("embed", "lm_head", "codebook"))


def lr_factor(step: int, num_steps: int, warmup_fraction: float) -> float:
    """Linear warm-up, then linear decay to a fiftieth."""
    progress = (step + 1) / num_steps
    return min(progress / warmup_fraction, max(0.02, (1 - progress) / (1 - warmup_fraction)))


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def descend(loss: Tensor, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _batches(rows: NDArray[np.int64], recipe: TargetRecipe) -> Iterator[Tensor]:
    """Epoch after epoch, each in its own order; [batch_size, seq_len]."""
    order = np.random.default_rng(recipe.seed)
    while True:
        shuffled = order.permutation(len(rows))
        for start in range(0, len(rows) - recipe.batch_size + 1, recipe.batch_size):
            yield torch.from_numpy(rows[shuffled[start : start + recipe.batch_size]])


def _untrained(recipe: TargetRecipe) -> Qwen3ForCausalLM:
    untyped: Any = Qwen3ForCausalLM
    model: Qwen3ForCausalLM = untyped(_config(recipe))
    return model


def _config(recipe: TargetRecipe) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )
