"""Arguments of tensorrt_llm.LLM for an engine.

Names, types and literals are from TensorRT-LLM 1.4.0rc1: `tests/data/tensorrt_llm_1.4.0rc1.json` has them, with their
sources.
"""

from collections.abc import Iterator
from typing import Any, Final

from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.provenance import DRAFTER_DIR, TARGET_DIR

_FREE_GPU_MEMORY_FRACTION: Final = 0.8


def llm_args(config: PretrainedConfig, limits: EngineLimits, *, has_tokenizer: bool) -> dict[str, Any]:
    """Keyword arguments of LLM; paths are relative to the engine directory.

    Block reuse and chunked prefill are off, since DFlash's context is made of the hidden states of a prompt that is
    computed as a whole, in one step. Structured output needs the tokenizer, and is llguidance's, as here. The counts
    of penalties are a small buffer, which costs a step nothing while no request has any.
    """
    has_fp8_kv = config.quantization is not None and config.quantization.target_kv is not None
    args: dict[str, Any] = {
        "model": TARGET_DIR,
        "backend": "pytorch",
        "dtype": config.dtype,
        "tensor_parallel_size": config.mapping.tp_size,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "attn_backend": "TRTLLM",
        "enable_chunked_prefill": False,
        "kv_cache_config": {
            "dtype": "fp8" if has_fp8_kv else "auto",
            "tokens_per_block": limits.page_size,
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": _FREE_GPU_MEMORY_FRACTION,
        },
        "cuda_graph_config": {"batch_sizes": list(_graph_sizes(limits.max_batch_size)), "enable_padding": True},
    }
    if has_tokenizer:
        args["guided_decoding_backend"] = "llguidance"
    if config.target.moes:
        args["moe_expert_parallel_size"] = config.mapping.ep_size
        args["moe_tensor_parallel_size"] = config.mapping.moe_tp_size
    if config.draft is not None:
        args["speculative_config"] = {
            **_of_algorithm(config.draft),
            "max_draft_len": limits.max_draft_len,
            "speculative_model": DRAFTER_DIR,
            "enable_penalty": True,
        }
    return args


def _of_algorithm(draft: DraftSpec) -> dict[str, Any]:
    if draft.algorithm == "eagle3":
        return {
            "decoding_type": "Eagle3",
            "eagle3_layers_to_capture": list(draft.target_layer_ids),  # their outputs, as here
            "eagle3_model_arch": "llama3",
        }
    return {"decoding_type": "DFlash", "attention_backend": "VANILLA"}  # the only one that every GPU has


def _graph_sizes(max_batch_size: int) -> Iterator[int]:
    """Powers of two, and the largest batch."""
    size = 1
    while size < max_batch_size:
        yield size
        size *= 2
    yield max_batch_size
