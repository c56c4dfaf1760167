"""Trains the demo drafter by the DFlash recipe: frozen target, random anchors, position-weighted cross entropy.

Paper: https://arxiv.org/abs/2602.06036. The selector of DFlash2 learns with the text's own tokens before each slot.
Writes a z-lab checkpoint. It refuses to know where the text came from.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.train_demo.block_drafter import BlockDrafter, DFlash2Shape, DrafterShape
from scripts.train_demo.responses import Responses
from scripts.train_demo.train_target import descend, lr_factor, optimizers_for, set_lr

_PROMPT_ANCHORS = 40  # positions of the prompt's end that may be anchors, too: other people's text


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """Shape and schedule; learning rates at their peak."""

    num_layers: int = 3
    draft_block_size: int = 8
    target_layer_ids: tuple[int, ...] = (1, 3, 4, 5, 6)  # late ones: in a small target they say most about what comes
    mask_token_id: int = 1
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 128
    selector_top_k: int = 16
    batch_size: int = 8  # sequences
    anchors_per_sequence: int = 128
    num_steps: int = 2000
    loss_decay_slots: float = 4.0  # the paper's gamma: slot j weighs exp(-(j - 1) / gamma)
    matrix_lr: float = 4e-3
    vector_lr: float = 3e-3
    warmup_fraction: float = 0.03
    seed: int = 0


def train_drafter(
    target: Qwen3ForCausalLM,
    responses: Responses,
    recipe: DrafterRecipe,
    *,
    initial: BlockDrafter | None = None,
    report: Callable[[str], None],
) -> BlockDrafter:
    """The target is run once per batch for its taps; its embedding and head serve the drafter and stay as they are.

    `initial` is trained further, in place; without one the drafter starts from the target's last layers.
    """
    torch.manual_seed(recipe.seed)
    device = target.device
    drafter = initial or initial_drafter(target, recipe).to(device)
    optimizers = optimizers_for(drafter, matrix_lr=recipe.matrix_lr, vector_lr=recipe.vector_lr)
    weights = torch.exp(-torch.arange(recipe.draft_block_size - 1, device=device) / recipe.loss_decay_slots)
    start_s, mean_loss, mean_hit = time.monotonic(), math.nan, math.nan
    for step, (tokens, anchors) in zip(range(recipe.num_steps), _batches(responses, recipe), strict=False):
        set_lr(optimizers, lr_factor(step, recipe.num_steps, recipe.warmup_fraction))
        logits, labels, is_greedy = draft_logits(drafter, target, tokens.to(device), anchors.to(device), recipe)
        losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        slot_weights = weights * is_greedy
        loss = (losses.view(labels.shape) * slot_weights).sum() / slot_weights.sum()
        descend(loss, drafter, optimizers)
        hit = (logits[..., 0, :].argmax(-1) == labels[..., 0]).float().mean().item()
        mean_loss = _smoothed(mean_loss, loss.item())
        mean_hit = _smoothed(mean_hit, hit)
        if step % 20 == 0 or step == recipe.num_steps - 1:
            step_s = (time.monotonic() - start_s) / (step + 1)
            left_s = step_s * (recipe.num_steps - step - 1)
            report(
                f"drafter step {step + 1}/{recipe.num_steps}  loss {mean_loss:.3f}  first draft right {mean_hit:.3f}"
                f"  {anchors.numel() / step_s:.0f} anchors/s  {left_s:.0f} s left"
            )
    return drafter


def draft_logits(
    drafter: BlockDrafter,
    target: Qwen3ForCausalLM,
    tokens: Tensor,  # int64 [sequences, seq_len]
    anchors: Tensor,  # int64 [sequences, anchors]
    recipe: DrafterRecipe,
) -> tuple[Tensor, Tensor, Tensor]:  # float32 [sequences, anchors, slots - 1, vocab], int64 and bool without vocab
    """Logits of slots 1 .. B-1, their labels, and which labels are the target's greedy continuation of the anchor.

    The label of a slot is the target's argmax at its own position: DFlash has no logit shift. It continues the anchor
    greedily as long as the text itself does, so human text gives exact labels up to its first surprise. The selector
    scores a slot after the text's token before it, which is the draft before it as long as all were right.
    """
    slots = anchors.unsqueeze(-1) + torch.arange(recipe.draft_block_size, device=anchors.device)
    block_tokens = tokens.gather(1, slots.flatten(1)).view(slots.shape)
    block_inputs = torch.full_like(block_tokens, recipe.mask_token_id)
    block_inputs[..., 0] = block_tokens[..., 0]
    with torch.no_grad():
        taps, greedy_next = target_taps(target, tokens, recipe.target_layer_ids)
        embeddings = target.get_input_embeddings()(block_inputs).float()
    labels = greedy_next.gather(1, slots[..., :-1].flatten(1)).view(slots[..., :-1].shape)
    agrees = (labels == block_tokens[..., 1:]).long()
    is_greedy = torch.cat([torch.ones_like(agrees[..., :1]), agrees[..., :-1].cumprod(-1)], dim=-1).bool()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        hidden = drafter(taps, embeddings, anchors)[..., 1:, :]
        logits = functional.linear(hidden, target.lm_head.weight.detach())
        choices = drafter.candidate_selector(hidden, block_tokens[..., :-1])
    return logits.float() + choices.float(), labels, is_greedy


def target_taps(
    target: Qwen3ForCausalLM,
    tokens: Tensor,  # int64 [sequences, seq_len]
    target_layer_ids: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # [sequences, seq_len, num_taps * hidden] in the target's dtype, int64 [sequences, seq_len]
    """Outputs of layers before the final norm, in the recipe's order; and the target's argmax after each token."""
    last_layer = target.config.num_hidden_layers - 1
    assert max(target_layer_ids) < last_layer, "transformers gives the last layer's output final-normed"
    states = target.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    assert states is not None
    greedy_next = target.lm_head(states[-1]).argmax(-1)  # transformers has final-normed the last state
    return torch.cat([states[layer_id + 1] for layer_id in target_layer_ids], dim=-1), greedy_next


def initial_drafter(target: Qwen3ForCausalLM, recipe: DrafterRecipe) -> BlockDrafter:
    """Layers and norm start as the target's last ones, and `fc` passes the latest tap through.

    When that tap is the input of the target's last layer, the drafter's last layer starts with that layer's own keys
    and values, so it begins by reading the context as the target does.
    """
    drafter = BlockDrafter(shape_of(target.config, recipe))
    layers: Any = target.model.layers
    for layer, source in zip(drafter.layers, layers[-recipe.num_layers :], strict=True):
        copied = {name: tensor.float() for name, tensor in source.state_dict().items()}
        layer.load_state_dict({**layer.state_dict(), **copied})  # the convolutions stay
    hidden_size = target.config.hidden_size
    latest = int(np.argmax(recipe.target_layer_ids))
    with torch.no_grad():
        drafter.norm.weight.copy_(target.model.norm.weight)
        drafter.hidden_norm.weight.copy_(layers[-1].input_layernorm.weight)
        torch.nn.init.normal_(drafter.fc.weight, std=0.02)
        drafter.fc.weight[:, latest * hidden_size : (latest + 1) * hidden_size] += torch.eye(hidden_size)
    return drafter


def load_drafter(path: Path, target: Qwen3ForCausalLM, recipe: DrafterRecipe) -> BlockDrafter:
    """A z-lab checkpoint in float32, to be trained further; what a DFlash drafter lacks of DFlash2 is new.

    So is a selector for another vocabulary. Raises when the shape is another.
    """
    drafter = BlockDrafter(shape_of(target.config, recipe))
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    codebook = tensors.get("candidate_selector.predecessor_codebook")
    if codebook is None or len(codebook) != target.config.vocab_size:
        tensors |= {name: x for name, x in drafter.state_dict().items() if name.startswith("candidate_selector.")}
    convs = {name: x for name, x in drafter.state_dict().items() if "_conv." in name}
    drafter.load_state_dict({**convs, **tensors})
    return drafter.to(target.device)


def shape_of(config: Qwen3Config, recipe: DrafterRecipe) -> DFlash2Shape:
    decoder = decoder_shape(config, num_layers=recipe.num_layers, num_taps=len(recipe.target_layer_ids))
    return DFlash2Shape(
        **vars(decoder),
        vocab_size=config.vocab_size,
        conv_kernel_size=recipe.conv_kernel_size,
        conv_group_size=recipe.conv_group_size,
        selector_rank=recipe.selector_rank,
    )


def decoder_shape(config: Qwen3Config, *, num_layers: int, num_taps: int) -> DrafterShape:
    """The target's sizes, for a drafter with layers like the target's."""
    assert config.num_key_value_heads is not None
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_layers=num_layers,
        num_taps=num_taps,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=_rope_theta(config),
    )


def save_drafter(drafter: BlockDrafter, target_config: Qwen3Config, recipe: DrafterRecipe, path: Path) -> None:
    """A z-lab checkpoint in bfloat16: config.json in the schema of June 2026, and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(_zlab_config(target_config, recipe), indent=2)
    (path / "config.json").write_text(config + "\n", encoding="utf-8")


def _zlab_config(target: Qwen3Config, recipe: DrafterRecipe) -> dict[str, Any]:
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dflash_config": {
            "block_size": recipe.draft_block_size,
            "mask_token_id": recipe.mask_token_id,
            "target_layer_ids": list(recipe.target_layer_ids),
            "conv_kernel_size": recipe.conv_kernel_size,
            "conv_group_size": recipe.conv_group_size,
            "selector_rank": recipe.selector_rank,
            "selector_top_k": recipe.selector_top_k,
        },
        "is_causal": False,
        "num_target_layers": target.num_hidden_layers,
        "num_hidden_layers": recipe.num_layers,
        "layer_types": ["full_attention"] * recipe.num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(target)},
        "max_position_embeddings": target.max_position_embeddings,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "dtype": "bfloat16",
    }


def _batches(responses: Responses, recipe: DrafterRecipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch, each in its own order and with anchors of its own: tokens and anchors."""
    random = np.random.default_rng(recipe.seed)
    tokens, first = responses.tokens, np.maximum(responses.greedy_from - _PROMPT_ANCHORS, 1)
    while True:
        order = random.permutation(len(tokens))
        for start in range(0, len(tokens) - recipe.batch_size + 1, recipe.batch_size):
            batch = order[start : start + recipe.batch_size]
            anchors = random_anchors(first[batch], tokens.shape[1], recipe, random)
            yield torch.from_numpy(tokens[batch]), torch.from_numpy(anchors)


def random_anchors(
    first: NDArray[np.int64],  # [sequences]: the first position that may be an anchor
    seq_len: int,
    recipe: DrafterRecipe,
    random: np.random.Generator,
) -> NDArray[np.int64]:  # [sequences, anchors], each row sorted and without repetition
    """Positions whose whole block lies in the sequence."""
    end = seq_len - recipe.draft_block_size + 1
    count = recipe.anchors_per_sequence
    assert first.max() + count <= end, "sequences too short for so many anchors"
    rows = [np.sort(random.choice(np.arange(start, end), count, replace=False)) for start in first]
    return np.stack(rows)


def _rope_theta(config: Qwen3Config) -> float:
    parameters: Any = config.rope_parameters
    assert parameters["rope_type"] == "default", "the drafter's rotation is unscaled"
    return float(parameters["rope_theta"])


def _smoothed(mean: float, value: float) -> float:
    return value if math.isnan(mean) else 0.95 * mean + 0.05 * value
