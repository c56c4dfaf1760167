"""Variants of the kernels that sample and draft, to compile ahead of time: what their launchers pass."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from dflash_trt.core.dtype import torch_dtype, triton_type
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.kernels.launching import constants_of
from dflash_trt.kernels.sampling_launch import (
    NUM_WARPS,
    RULE_CONSTANTS,
    UNFUSED,
    WARPS,
    SamplingInputs,
    SamplingOutputs,
    draft_constants,
    kernel_of,
    sampling_constants,
    score_constants,
    workspace_shapes,
)
from dflash_trt.kernels.sampling_scratch import DRAFT_GRIDS, DRAFT_SCRATCH, RULE_GRIDS, SAMPLING_GRIDS, SCORE_GRIDS
from plugins.aot.variant import KernelVariant, pointer

DRAFT_TOPK: Final = 32  # of a draft, at most: no drafter of the library's has more


def sampling_variants(dtype: torch.dtype, *, vocab_size: int, max_width: int) -> tuple[KernelVariant, ...]:
    """The launches of `sample_and_accept`, in order. Grids use num_requests, num_rows = num_requests * width and
    num_tiles = ceil(vocab_size / TILE); `max_width` is the largest K + 1."""
    types = {key: pointer(of) for key, (of, _) in workspace_shapes(1, vocab_size).items()}
    types |= dict.fromkeys(SamplingInputs.__dataclass_fields__, pointer(torch.int32))
    types |= dict.fromkeys(SamplingOutputs.__dataclass_fields__, pointer(torch.int32))
    types |= {row.name: pointer(torch_dtype(row.dtype)) for row in STEP_SAMPLING_FIELDS if row.dtype is not None}
    types |= dict.fromkeys(("emitted_logprobs", "draft_topk_probs"), pointer(torch.float32))
    types |= {"logits": pointer(dtype)} | dict.fromkeys(("width", "num_tiles", "draft_topk"), "i32")
    types["vocab_size"] = _size(vocab_size)
    return _variants(SAMPLING_GRIDS, types, sampling_constants(vocab_size=vocab_size, width=max_width))


def rule_variants(dtype: torch.dtype, *, vocab_size: int) -> tuple[KernelVariant, ...]:
    """The launches of `adjusted_scores` and `write_raw_logprobs`, in order; grids as above."""
    floats = ("scores", "penalties", "bias_values", "emitted_logprobs")
    types = dict.fromkeys(floats, pointer(torch.float32)) | dict.fromkeys(("width", "max_positions"), "i32")
    types |= {"logits": pointer(dtype), "slot_ids": pointer(torch.int64), "vocab_size": _size(vocab_size)}
    return _variants(RULE_GRIDS, types, RULE_CONSTANTS, otherwise=pointer(torch.int32))


def score_variants(dtype: torch.dtype, *, vocab_size: int) -> tuple[KernelVariant, ...]:
    """The launches of `score_rows` with tokens, in order; grids as above, of the scored rows."""
    longs, integers = pointer(torch.int64), pointer(torch.int32)
    types = {"logits": pointer(dtype), "vocab_size": _size(vocab_size), "rows": longs, "tokens": longs}
    types |= dict.fromkeys(("columns", "top_tokens"), integers) | dict.fromkeys(("num_top", "num_tiles"), "i32")
    constants = score_constants(vocab_size, has_tokens=True)
    return _variants(SCORE_GRIDS, types, constants, otherwise=pointer(torch.float32))


def draft_variants(
    dtype: torch.dtype, *, vocab_size: int, has_map: bool, draft_topk: int = DRAFT_TOPK
) -> tuple[KernelVariant, ...]:
    """The launches of `draft_tokens`, in order; grids as above. `has_map`: of a draft vocabulary."""
    values, integers, longs = (pointer(of) for of in (torch.float32, torch.int32, torch.int64))
    types = dict.fromkeys(("draft_stream", "next_context_lens", "token_ids", "next_draft_topk_ids"), integers)
    types |= {scratch.name: pointer(torch_dtype(scratch.dtype)) for scratch in DRAFT_SCRATCH}
    types |= {"logits": pointer(dtype), "temperature": values, "seed": longs, "draft_to_target": longs}
    types |= {"next_draft_topk_probs": values, "vocab_size": _size(vocab_size)}
    types |= dict.fromkeys(("num_slots", "num_tiles", "draft_topk"), "i32")
    constants = draft_constants(vocab_size=vocab_size, has_map=has_map, draft_topk=draft_topk)
    return _variants(DRAFT_GRIDS, types, constants)


def _variants(
    grids: Mapping[str, tuple[str, str, str]],
    types: Mapping[str, str],  # by argument
    constants: Mapping[str, int],
    *,
    otherwise: str | None = None,  # the type of arguments that `types` does not name
) -> tuple[KernelVariant, ...]:
    variants = []
    for name, grid in grids.items():
        kernel = kernel_of(name)
        own = constants_of(kernel, constants)
        names = [key for key in kernel.arg_names if key not in own]
        variants.append(
            KernelVariant(
                name=name,
                kernel=kernel,
                signature={key: types[key] if otherwise is None else types.get(key, otherwise) for key in names},
                constexprs=own,
                num_warps=WARPS.get(name, NUM_WARPS),
                num_stages=1,
                has_fp_fusion=name not in UNFUSED,
                grid=grid,
            )
        )
    return tuple(variants)


def library_sampling_variants(dtype: torch.dtype, *, vocab_size: int, max_width: int) -> Iterator[KernelVariant]:
    """The first three with names that are unique in a library: the launcher's and what distinguishes its variants here.

    Steps with rules or masks sample scores, which are float32 in every network.
    """
    for sampled in (dtype, torch.float32):
        for variant in sampling_variants(sampled, vocab_size=vocab_size, max_width=max_width):
            yield replace(variant, name=_name(variant, sampled))
    for variant in (*rule_variants(dtype, vocab_size=vocab_size), *score_variants(dtype, vocab_size=vocab_size)):
        yield replace(variant, name=_name(variant, dtype))


def library_draft_variants(dtype: torch.dtype, *, vocab_size: int, has_map: bool) -> Iterator[KernelVariant]:
    """The fourth with such names."""
    for variant in draft_variants(dtype, vocab_size=vocab_size, has_map=has_map):
        yield replace(variant, name=_name(variant, dtype) + ("_map" if has_map else ""))


def _name(variant: KernelVariant, dtype: torch.dtype) -> str:
    parts = [variant.name]
    if f"*{triton_type(dtype)}:16" == variant.signature.get("logits"):
        parts.append(str(dtype).removeprefix("torch."))
    if variant.signature.get("vocab_size") == "i32:16":
        parts.append("v16")
    parts += [f"{name.lower()}{variant.constexprs[name]}" for name in ("TILES", "WIDTH") if name in variant.constexprs]
    return "_".join(parts)


def _size(vocab_size: int) -> str:
    return "i32:16" if vocab_size % 16 == 0 else "i32"
