"""How good a drafter is on given text: how often each slot is right, and the acceptance length that follows.

Runs the training forward over fixed sequences. It refuses to generate: a real decoding loop picks its own anchors.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from scripts.train_demo.block_drafter import BlockDrafter
from scripts.train_demo.responses import Responses
from scripts.train_demo.train_drafter import DrafterRecipe, draft_logits, random_anchors


@dataclass(frozen=True, kw_only=True)
class DraftQuality:
    slot_accuracy: tuple[float, ...]  # of slots 1 .. B-1, each alone
    acceptance_length: float  # mean over anchors of right drafts in a row, plus the bonus token

    def __str__(self) -> str:
        slots = " ".join(f"{accuracy:.3f}" for accuracy in self.slot_accuracy)
        return f"acceptance_length {self.acceptance_length:.2f} (bonus included)  slot accuracy {slots}"


@torch.inference_mode()
def evaluate_drafter(
    drafter: BlockDrafter, target: Qwen3ForCausalLM, responses: Responses, recipe: DrafterRecipe
) -> DraftQuality:
    """Over the same random anchors at every call."""
    recipe = replace(recipe, seed=recipe.seed + 1)
    random = np.random.default_rng(recipe.seed)
    hits = []
    for start in range(0, len(responses.tokens), recipe.batch_size):
        batch = slice(start, start + recipe.batch_size)
        tokens = torch.from_numpy(responses.tokens[batch]).to(target.device)
        anchors = random_anchors(responses.greedy_from[batch], tokens.shape[1], recipe, random)
        logits, labels, _ = draft_logits(drafter, target, tokens, torch.from_numpy(anchors).to(target.device), recipe)
        hits.append((logits.argmax(-1) == labels).flatten(0, 1).float().cpu())
    is_right = torch.cat(hits)  # [anchors, slots - 1]
    num_accepted = is_right.cumprod(-1).sum(-1)
    return DraftQuality(
        slot_accuracy=tuple(is_right.mean(0).tolist()), acceptance_length=1 + num_accepted.mean().item()
    )
