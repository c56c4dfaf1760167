"""Engines of real shapes with random weights, made on the GPU: no checkpoint is needed to time a step."""

import math
from typing import Final

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.decoder import LayerSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states, engine_weights
from dflash_trt.core.model.feed_forward import Dense
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.weight_spec import is_linear
from dflash_trt.formats.registry import quantized_tensors, split_quantized
from gpu_visit_parts.setting import SETTING


def target_spec(model: str) -> TargetSpec:
    """Sizes of Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B and Qwen/Qwen3.6-27B, a hybrid; tiny ones are for dry runs."""
    if model in _HYBRIDS:
        return _hybrid_spec(*_HYBRIDS[model])
    hidden, ffn, heads, kv_heads, head_dim, layers, vocab_size, family = {
        "tiny": (64, 96, 2, 1, 32, 1, 512, "qwen3"),
        "qwen3-8b": (4096, 12288, 32, 8, 128, 36, 151936, "qwen3"),
        "llama-3.1-8b": (4096, 14336, 32, 8, 128, 32, 128256, "llama"),
    }[model]
    mixer = Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(theta=1e6),
        has_qk_norm=family == "qwen3",
    )
    return TargetSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        rms_norm_eps=1e-6,
        is_embedding_tied=False,
        max_position_embeddings=131072,
        layers=(LayerSpec(mixer=mixer, feed_forward=Dense(intermediate_size=ffn)),) * layers,
    )


# hidden, ffn, heads, K/V heads, head_dim, rotated, layers, vocabulary
_HYBRIDS: Final = {
    "qwen3.6-27b": (5120, 17408, 24, 4, 256, 64, 64, 248320),
    "tiny-hybrid": (64, 96, 2, 1, 32, 16, 2, 512),
}


def _hybrid_spec(
    hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, layers: int, vocab_size: int
) -> TargetSpec:
    """Attention in every fourth layer, or in the second of two."""
    attention = Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(theta=1e7),
        rotary_dim=rotary_dim,
        has_qk_norm=True,
        has_output_gate=True,
    )
    interval, dense = min(4, layers), Dense(intermediate_size=ffn)
    delta_net, attended = (LayerSpec(mixer=mixer, feed_forward=dense) for mixer in (SETTING.delta_net, attention))
    return TargetSpec(
        family="qwen3_5_text",
        vocab_size=vocab_size,
        hidden_size=hidden,
        rms_norm_eps=1e-6,
        is_embedding_tied=False,
        has_offset_norms=True,
        max_position_embeddings=262144,
        layers=tuple(delta_net if (i + 1) % interval else attended for i in range(layers)),
    )


def draft_spec(model: str, target: TargetSpec) -> DraftSpec:
    """Sizes of z-lab/Qwen3-8B-DFlash-b16, z-lab's drafter for Llama-3.1-8B and z-lab/Qwen3.6-27B-DFlash."""
    layers, taps, block_size, heads, kv_heads, head_dim = {
        "qwen3-8b": (5, (1, 9, 17, 25, 33), 16, 32, 8, 128),
        "llama-3.1-8b": (5, (1, 8, 15, 22, 29), 10, 32, 8, 128),
        "qwen3.6-27b": (5, (1, 16, 31, 46, 61), 16, 32, 8, 128),
        "tiny": (1, (0,), 4, 2, 1, 32),
        "tiny-hybrid": (1, (0,), 4, 2, 1, 32),
    }[model]
    mixer = Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=target.attentions[0].rope,
        mask=AttentionMask(is_causal=False),
        has_qk_norm=True,
    )
    ffn = {"llama-3.1-8b": 12288}.get(model) or target.layers[0].feed_forward.intermediate_size
    layer = LayerSpec(mixer=mixer, feed_forward=Dense(intermediate_size=ffn))
    return DraftSpec(
        source_format="z-lab",
        hidden_size=target.hidden_size,
        rms_norm_eps=1e-6,
        layers=(layer,) * layers,
        max_position_embeddings=131072,
        target_layer_ids=taps,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        draft_block_size=block_size,
        mask_token_id=target.vocab_size - 1,
    )


def kv_bytes(target: TargetSpec, draft: DraftSpec) -> int:
    """Of one token position, target and drafter."""
    return engine_states(target, draft, dtype=dtype_name(SETTING.dtype)).bytes_per_token


def slot_bytes(target: TargetSpec, draft: DraftSpec) -> int:
    """Of the recurrent states of one request."""
    return engine_states(target, draft, dtype=dtype_name(SETTING.dtype)).bytes_per_slot


def _is_kept(name: str) -> bool:
    """In bfloat16, as the field's FP8 checkpoints keep it."""
    return name == "target.lm_head" or name.endswith(".ba")


def make_executor(
    target: TargetSpec,
    draft: DraftSpec,
    weight_format: str,
    *,
    max_batch_size: int,
    max_seq_len: int,
    is_deterministic: bool = False,
) -> TorchGpuExecutor:
    """Pages for max_batch_size sequences of max_seq_len. Raises torch.OutOfMemoryError where they do not fit."""
    device = SETTING.device
    table = engine_weights(target, draft, None)
    linears = [name for name, spec in table.items() if is_linear(spec, name)]
    quantization = QuantizationSpec(
        linears={name: "fp8" for name in linears if weight_format == "fp8" and not _is_kept(name)}
    )
    tensors = {}
    for name, spec in table.items():
        if name in quantization.linears:
            for part, layout in quantized_tensors(name, table, "fp8").items():
                tensors[part] = (
                    torch.randn(layout.shape, device=device, dtype=SETTING.dtype).mul_(64).to(torch.float8_e4m3fn)
                    if layout.dtype == "float8_e4m3fn"
                    else torch.full(layout.shape, 2e-4 if part.endswith("weight_scale") else 0.02, device=device)
                )
        elif len(spec.shape) == 1:
            dtype = torch.float32 if spec.is_float32 else SETTING.dtype
            tensors[name] = torch.ones(spec.shape, dtype=dtype, device=device)
        else:
            noise = torch.randn(spec.shape, dtype=SETTING.dtype, device=device)
            tensors[name] = noise.mul_(1 / math.sqrt(spec.shape[1]))
    plain, quantized = split_quantized(tensors, table, quantization.linears)
    max_draft_len = draft.max_draft_len
    page_plan = plan_pages(
        engine_states(target, draft, dtype=dtype_name(SETTING.dtype)),
        page_size=SETTING.page_size,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        budget_bytes=1 << 60,
    )
    return TorchGpuExecutor(
        bind_tensors(target, draft, plain, quantized),
        page_plan=page_plan,
        max_batch_size=max_batch_size,
        max_num_tokens=max(16 if SETTING.is_dry_run else 2048, max_batch_size * (max_draft_len + 1)),
        max_draft_len=max_draft_len,
        device=device,
        quantization=quantization,
        is_deterministic=is_deterministic,
    )


def weight_bytes(target: TargetSpec, draft: DraftSpec, weight_format: str, *, has_drafts: bool) -> float:
    """Bytes of weights that a step reads: everything but embeddings, and with drafts the head twice."""
    total = 0.0
    for name, spec in engine_weights(target, draft, None).items():
        is_unread = name.startswith("draft.") and name not in ("draft.fc", "draft.kv", "draft.context_norm")
        if name.endswith(".embedding") or (is_unread and not has_drafts):
            continue
        is_fp8 = weight_format == "fp8" and is_linear(spec, name) and not _is_kept(name)
        passes = 2 if has_drafts and name in ("target.lm_head", "draft.kv") else 1  # the block's K/V use them again
        total += passes * math.prod(spec.shape) * (1 if is_fp8 else SETTING.dtype.itemsize)
    return total


def linear_flops(target: TargetSpec, draft: DraftSpec, *, num_tokens: int, num_rows: int, num_drafts: int) -> float:
    """Multiply-adds of all GEMMs of a step, times two: T tokens, the head for R*(K+1) rows and for R*K drafts."""
    flops = 0.0
    for name, spec in engine_weights(target, draft, None).items():
        if not is_linear(spec, name):
            continue
        size = math.prod(spec.shape)
        if name == "target.lm_head":
            rows = num_rows + num_drafts
        elif name == "draft.fc":
            rows = num_tokens
        elif name == "draft.kv":
            rows = num_tokens + (num_rows if num_drafts else 0)
        elif name.startswith("draft."):
            rows = num_rows if num_drafts else 0
        else:
            rows = num_tokens
        flops += 2.0 * size * rows
    return flops
