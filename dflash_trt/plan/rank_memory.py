"""Memory of one rank on its GPU, part by part, as the back end `cuda` allocates it.

Buffers and workspaces are exact: the same tables and rules as the allocations. Activations are the largest tensors of a
step that live at the same time, and an upper bound of what the step holds at once (`tests/plan/test_activations.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from dflash_trt.backends.padding import MAX_GRAPH_TOKENS
from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.logit_rules import rules_bytes
from dflash_trt.core.logprobs import LOGPROBS_ROWS
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, LayerSpec
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.core.step_spec import DRAFT_OUTPUTS
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.kernels.latent_rules import LatentShape, largest_workspace
from dflash_trt.kernels.launch_rules import CONTEXT_PIECE_ROWS, MIN_DIRECT_ROWS, num_partials, num_stats, work_slots
from dflash_trt.kernels.sampling_scratch import SCRATCH, num_tiles

# CUDA's context, loaded kernels and cuBLAS, before any weight: an assumption, not measured.
CONTEXT_BYTES: Final = 1 << 30
_LARGEST_ATTENTION_TILE: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of each rank, apart from K/V pages. `graph_pool_bytes` are activations that CUDA graphs keep.

    `has_pages_last`: everything is there before the pages are planned, as with TensorRT, whose contexts have their
    activations from the beginning.
    """

    has_pages_last: bool
    context_bytes: int
    weights_bytes: int
    buffers_bytes: int
    workspace_bytes: int
    activations_bytes: int
    graph_pool_bytes: int

    @property
    def before_pages_bytes(self) -> int:
        """Memory in use when the pages are planned."""
        return self.context_bytes + self.weights_bytes + (self._of_steps if self.has_pages_last else 0)

    @property
    def after_pages_bytes(self) -> int:
        return 0 if self.has_pages_last else self._of_steps

    @property
    def _of_steps(self) -> int:
        return self.buffers_bytes + self.workspace_bytes + self.activations_bytes + self.graph_pool_bytes


def executor_limits(config: PretrainedConfig, limits: EngineLimits) -> ExecutorLimits:
    """Limits of the engine's steps; pages are planned later."""
    draft = config.draft
    of_drafts: dict[str, Any] = {"max_draft_len": 0}
    if draft is not None:
        of_drafts = {"draft_topk": draft.draft_topk, "has_draft_confidence": draft.has_confidence}
    return ExecutorLimits(**limits.model_dump() | of_drafts, num_pages=0)


def rank_memory(
    config: PretrainedConfig,
    limits: EngineLimits,
    *,
    weights_bytes: int,
    multiprocessors: int,
    has_pages_last: bool = False,
) -> RankMemory:
    """Memory of each rank except pages, for an engine with `weights_bytes` of weights."""
    steps = executor_limits(config, limits)
    graph_tokens = max(_max_rows(steps), min(MAX_GRAPH_TOKENS, steps.max_num_tokens))
    return RankMemory(
        has_pages_last=has_pages_last,
        context_bytes=CONTEXT_BYTES,
        weights_bytes=weights_bytes,
        buffers_bytes=buffers_bytes(steps, has_nodes=has_pages_last)
        + rules_bytes(limits.max_batch_size + 1, steps.max_positions),  # of every slot, and of padding
        workspace_bytes=workspace_bytes(config, steps, multiprocessors=multiprocessors),
        activations_bytes=activations_bytes(
            config, steps, num_tokens=_max_tokens(steps), has_rules=True, has_nodes=has_pages_last
        ),
        graph_pool_bytes=activations_bytes(config, steps, num_tokens=graph_tokens, has_nodes=has_pages_last),
    )


@lru_cache(maxsize=64)
def buffers_bytes(limits: ExecutorLimits, *, has_nodes: bool = False) -> int:
    """Inputs, outputs and slots of a step: the executor's own staging memory, allocated on no device.

    `has_nodes`: of a TensorRT engine, whose outputs for the slots alone have memory of their own.
    """
    import torch

    from dflash_trt.backends.staging import InputStaging, ResultStaging
    from dflash_trt.backends.step_inputs import TensorBlock

    device = torch.device("meta")
    num_bytes = InputStaging(limits, device).device_bytes + ResultStaging(limits, device).device_bytes
    return num_bytes + (TensorBlock(DRAFT_OUTPUTS, limits, device=device).memory.nbytes if has_nodes else 0)


def workspace_bytes(config: PretrainedConfig, limits: ExecutorLimits, *, multiprocessors: int) -> int:
    """Scratch memory of attention and sampling, and attention's results, which are kept between steps."""
    mixers = {gqa.shard(config.mapping) for decoder in _decoders(config) for gqa in decoder.attentions}
    attention = max((_attention_elements(m.num_kv_heads, m.head_dim, multiprocessors) for m in mixers), default=0)
    tiles = num_tiles(config.target.vocab_size)
    per_row = sum((item.per_row + item.per_tile * tiles) * num_bytes_of(item.dtype) for item in SCRATCH)
    divides = config.mapping.dcp_size > 1  # positions: all heads attend on each rank
    latents = [_latent_shape(mla if divides else mla.shard(config.mapping)) for mla in config.target.latents]
    of_latents = [largest_workspace(shape, num_multiprocessors=multiprocessors) for shape in latents]
    attention = max(attention, *of_latents, 0)
    num_tokens = _max_tokens(limits)
    num_rows = min(num_tokens, CONTEXT_PIECE_ROWS) if divides else num_tokens
    kept = num_tokens * max((gqa.q_size for gqa in mixers), default=0)
    kept += max((shape.query_elements(num_rows) for shape in latents), default=0)
    kept += max((shape.attended_elements(num_rows) for shape in latents), default=0)
    return attention * num_bytes_of("float32") + _max_rows(limits) * per_row + kept * num_bytes_of(config.dtype)


def activations_bytes(
    config: PretrainedConfig,
    limits: ExecutorLimits,
    *,
    num_tokens: int,
    has_rules: bool = False,
    has_nodes: bool = False,
) -> int:
    """Peak activation memory of a step of `num_tokens` tokens, logits included.

    The step keeps the outputs that the drafter taps. On top comes the largest of: a layer, the target's logits, the
    drafter's fusion, and its block with its logits; DSpark's walk adds a bias to those of a slot. `has_rules` adds the
    logits' float32 scores under rules, or the logits of prompts that are read. `has_nodes` is for a TensorRT engine.
    """
    target, draft, mapping = config.target, config.draft, config.mapping
    rows, num_bytes = _max_rows(limits), num_bytes_of(config.dtype)
    kept = target.hidden_size * (0 if draft is None else len(draft.target_layer_ids))
    if target.per_layer_embedding is not None:
        kept += target.num_layers * target.per_layer_embedding.size
    layer = max(layer_features(x, target.hidden_size, config, num_tokens, has_nodes=has_nodes) for x in target.layers)
    columns = _logit_features(target.vocab_size, target.hidden_size, mapping)
    logits = num_tokens * 2 * target.hidden_size + rows * (2 * target.hidden_size + columns)
    scores_bytes = _scores_bytes(config, limits, num_tokens, has_nodes=has_nodes) if has_rules else 0
    phases = [num_tokens * layer * num_bytes, logits * num_bytes + scores_bytes]
    if draft is not None:
        kv_size = sum(gqa.shard(mapping).kv_size for gqa in draft.attentions)
        # An MTP head has the features of two positions, and embeddings and features normed and joined.
        fused = len(draft.target_layer_ids) * draft.target_hidden_size if draft.mtp is None else 4 * draft.hidden_size
        fused += 2 * draft.hidden_size
        phases.append(num_tokens * (2 * target.hidden_size + fused + 2 * kv_size) * num_bytes)
        of_layer = max(layer_features(x, draft.hidden_size, config, rows) for x in draft.layers)
        columns = _logit_features(draft.draft_vocab_size or target.vocab_size, draft.hidden_size, mapping)
        block = max(of_layer, 4 * draft.hidden_size + columns)
        walked = 0 if draft.heads is None else 2 * limits.max_batch_size * (draft.draft_vocab_size or target.vocab_size)
        phases.append((num_tokens * 2 * target.hidden_size + rows * block + walked) * num_bytes)
    return num_tokens * kept * num_bytes + max(phases)


def _scores_bytes(config: PretrainedConfig, limits: ExecutorLimits, num_tokens: int, *, has_nodes: bool) -> int:
    """Bytes of scores with each request's token counts, or of prompt logits, which several ranks gather.

    A TensorRT engine, whose nodes get memory for their largest step, has both at once.
    """
    target = config.target
    read = min(LOGPROBS_ROWS, num_tokens) * _logit_features(target.vocab_size, target.hidden_size, config.mapping)
    scores = (_max_rows(limits) + limits.max_batch_size) * target.vocab_size
    parts = read * num_bytes_of(config.dtype), scores * num_bytes_of("float32")
    return sum(parts) if has_nodes else max(parts)


def layer_features(
    layer: LayerSpec, hidden_size: int, config: PretrainedConfig, num_tokens: int = 1, *, has_nodes: bool = False
) -> int:
    """Elements per token that a layer holds at once, in attention or in its feed-forward, with its input."""
    mixed = layer.mixer.shard(config.mapping).held_features(
        expands_latents=num_tokens >= MIN_DIRECT_ROWS,
        has_nodes=has_nodes,
        float32_size=num_bytes_of("float32") // num_bytes_of(config.dtype),
    )
    if config.mapping.dcp_size > 1 and isinstance(layer.mixer, Mla):
        mixed += -(-_exchanged_features(layer.mixer) * min(num_tokens, CONTEXT_PIECE_ROWS) // num_tokens)
    fed = layer.feed_forward.held_features(hidden_size, config.mapping)
    # Input, normed, result; after attention also its result and their sum.
    return max(3 * hidden_size + mixed, (5 + layer.has_post_norms) * hidden_size + fed)


def _exchanged_features(mla: Mla) -> int:
    """Elements for each row of a piece where ranks divide positions: queries of all heads, or parts."""
    return max(mla.num_heads * (mla.latent_dim + mla.rope_dim), 2 * mla.num_heads * (mla.latent_dim + 2))


def _latent_shape(mla: Mla) -> LatentShape:
    return LatentShape(num_heads=mla.num_heads, latent_dim=mla.latent_dim, rope_dim=mla.rope_dim)


def _logit_features(vocab_size: int, hidden_size: int, mapping: Mapping) -> int:
    """Elements for each row of logits; several ranks gather theirs.

    Ranks with requests of their own have the gathered rows and their part of the logits of all, receive the logits of
    their rows, and put them into the order of the vocabulary.
    """
    if mapping.dp_size > 1:
        return mapping.dp_size * hidden_size + 3 * vocab_size
    return vocab_size if mapping.tp_size == 1 else vocab_size + 2 * (vocab_size // mapping.tp_size)


def _attention_elements(kv_heads: int, head_dim: int, multiprocessors: int) -> int:
    slots = work_slots(kv_heads=kv_heads, num_multiprocessors=multiprocessors)
    sizes = {"tile": _LARGEST_ATTENTION_TILE, "kv_heads": kv_heads, "num_slots": slots}
    return num_partials(head_dim=head_dim, **sizes) + num_stats(**sizes)


def _decoders(config: PretrainedConfig) -> Sequence[DecoderSpec]:
    return [config.target, *([config.draft] if config.draft else [])]


def _max_rows(limits: ExecutorLimits) -> int:
    return limits.max_batch_size * (limits.max_draft_len + 1)


def _max_tokens(limits: ExecutorLimits) -> int:
    return max(limits.max_num_tokens, _max_rows(limits))
