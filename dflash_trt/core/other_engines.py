"""Options of vLLM, SGLang, TensorRT-LLM and llama.cpp, and our names: for commands, files and Python.

Names are fields; `--tensor-parallel-size`, `tensor_parallel_size` and `--tensor_parallel_size` are one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

from dflash_trt.core.frozen import nearest_name

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Our answer to a foreign name: the first of `ours` that a place has, `sentence`, or both."""

    ours: tuple[str, ...] = ()
    sentence: str = ""


# Ours, in order of preference; theirs.
_RENAMED: Final = {
    "target engine_dir engine_dirs sources": "model model_path model_dir checkpoint_dir hf_model_dir "
    "model_name_or_path",
    "drafter": "draft_model draft_model_path speculative_config speculative_model speculative_draft_model_path "
    "speculative_algorithm speculative_algo speculative_decoding_mode model_draft",
    "draft_length max_draft_len": "num_speculative_tokens speculative_num_draft_tokens draft_len draft_len_schedule "
    "max_draft_tokens speculative_num_steps num_draft_tokens",
    "tp_size": "tensor_parallel_size tensor_model_parallel_size tensor_parallel tp world_size",
    "ep_size": "expert_parallel_size enable_expert_parallel moe_ep_size ep",
    "dcp_size": "decode_context_parallel_size dcp",
    "attention_dp": "enable_attention_dp enable_dp_attention",
    "replicas": "data_parallel_size data_parallel dp_size dp",
    "gpus": "gpu_ids device_ids",
    "max_batch_size": "max_num_seqs max_running_requests max_num_requests",
    "max_seq_len": "max_model_len context_length ctx_size max_sequence_length",
    "max_num_tokens": "max_num_batched_tokens max_prefill_tokens chunked_prefill_size",
    "max_queue_len": "max_queued_requests max_queue_size",
    "page_size": "block_size tokens_per_block",
    "kv_cache": "kv_cache_dtype kv_cache_quant_algo",
    "kv_cache_bytes": "kv_cache_memory_bytes",
    "host_cache_bytes": "host_cache_size kv_offloading_size hicache_size enable_hierarchical_cache",
    "disk_cache_dir": "hicache_storage_backend local_disk",
    "disk_cache_bytes": "max_local_disk_size",
    "publish_prompts": "hicache_write_policy",
    "transfer_backend": "disaggregation_transfer_backend kv_transfer_config cache_transceiver_config kv_connector",
    "quantization": "qformat quant_algo quant_method",
    "dtype": "torch_dtype data_type",
    "output output_file": "output_dir output_path save_dir",
    "input_file": "dataset dataset_path input_path",
    "model_name": "served_model_name model_alias",
    "tool_call_parser": "enable_auto_tool_choice",
    "reasoning_parser": "enable_reasoning",
    "no_prefix_caching enable_prefix_caching=False": "disable_radix_cache no_enable_prefix_caching",
    "no_overlap overlap_scheduling=False": "disable_overlap_schedule no_async_scheduling",
    "deterministic": "enable_deterministic_inference",
    "num_threads": "threads",
    "max_new_tokens": "max_tokens max_completion_tokens max_output_len output_len n_predict",
    "min_tokens": "min_new_tokens",
    "temperature": "temp do_sample",
    "n": "num_return_sequences",
    "stop": "stop_words stop_strings stop_sequences",
    "stop_token_ids": "eos_token_id end_id",
    "json_schema": "guided_json structured_outputs guided_decoding",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar ebnf",
    "bad_words": "bad_words_list",
    "chat_template_options": "default_chat_template_kwargs",
    "concurrency": "max_concurrency",
    "stream": "streaming",
}
# Ours, theirs, and what they have not in common.
_DIFFERENT: Final = (
    (
        "kv_cache_free_memory_fraction",
        "gpu_memory_utilization mem_fraction_static free_gpu_memory_fraction kv_cache_free_gpu_memory_fraction "
        "kv_cache_free_gpu_mem_fraction",
        "It is a fraction of the memory that the weights leave free.",
    ),
    ("max_seq_len", "max_input_len max_input_length", "It counts the tokens of prompt and output together."),
    ("tp_size", "pipeline_parallel_size pp_size pp", "There is no pipeline parallelism; ranks share every layer."),
    ("n", "best_of", "All samples are returned, without a choice among them."),
    ("target", "revision", "A revision is written after the name on the hub, as OWNER/NAME@REVISION."),
)
_SENTENCES: Final = {
    "api_key ssl_keyfile ssl_certfile": "`dflash-trt serve` has no users and no TLS: put a proxy with both before it.",
    "enable_prefix_caching": "Prefix caching is on by default; `dflash-trt run --no-prefix-caching` is without.",
    "enable_chunked_prefill": "Prompts are always computed in chunks, of the tokens that "
    "`dflash-trt build --max-num-tokens` sets.",
    "enforce_eager disable_cuda_graph cuda_graph_max_bs compilation_config": "CUDA graphs are captured as needed.",
    "attention_backend moe_backend sampling_backend gemm_plugin gpt_attention_plugin use_paged_context_fmha": "Kernels "
    "follow from the engine's backend and the GPU; `dflash-trt build --backend` chooses a backend.",
    "swap_space cpu_offload_gb": "Weights and the pages of requests stay in the memory of the device; "
    "`--host-cache-bytes` keeps cached prefixes that leave it.",
    "tokenizer tokenizer_path tokenizer_dir tokenizer_mode": "The tokenizer is the target's, and part of the engine.",
    "chat_template": "The chat template is the target's, and part of the engine.",
    "trust_remote_code": "No code of a checkpoint is ever run.",
    "download_dir": "huggingface_hub downloads to its cache: set HF_HOME.",
    "hf_token": "huggingface_hub reads its token: set HF_TOKEN.",
    "load_format": "Checkpoints are read from safetensors files.",
    "enable_lora lora_modules lora_paths": "Adapters are not implemented: merge them into the target.",
    "use_beam_search beam_width num_beams length_penalty": "There is no beam search.",
    "skip_special_tokens": "Texts are without special tokens; the token ids have all.",
    "include_stop_str_in_output": "Texts end before a stop string.",
}
# Options that are neither settings nor sampling parameters, by a command that has them.
_OF_COMMANDS: Final = {
    "build": "kv_cache output",
    "run": "input_file stream",
    "serve": "replicas gpus model_name tool_call_parser reasoning_parser transfer_backend",
    "bench throughput": "concurrency",
}
# Commands, or commands of a group; a sentence.
COMMANDS: Final = {
    "generate": "`dflash-trt run`",
    "complete": "`dflash-trt run`",
    "chat": "`dflash-trt run --chat`",
    "run-batch": "`dflash-trt run --input-file`",
    "launch_server": "`dflash-trt serve`",
    "server": "`dflash-trt serve`",
    "convert": "`dflash-trt build`",
    "compile": "`dflash-trt build`",
    "quantize": "`dflash-trt build --quantization`",
    "collect-env": "`dflash-trt doctor`",
    "models": "`dflash-trt recipes`",
    "latency": "`dflash-trt bench speedup`",
    "online": "`dflash-trt bench serve`",
}
# Values of options. A number format of TensorRT-LLM or vLLM, and ours.
VALUES: Final = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp8_e4m3": "fp8",
    "gpu": "cuda",
    "pytorch": "torch",
    "trt": "tensorrt",
    "trtllm": "tensorrt_llm",
    "int4_awq": "int4",
    "awq": "int4",
}


def _table() -> dict[str, Answer]:
    rows = [(ours, theirs, "") for ours, theirs in _RENAMED.items()]
    rows += [*_DIFFERENT, *(("", theirs, sentence) for theirs, sentence in _SENTENCES.items())]
    return {
        name: Answer(ours=tuple(ours.split()), sentence=sentence)
        for ours, theirs, sentence in rows
        for name in theirs.split()
    }


NAMES: Final = _table()


def checks_keywords(check: Callable[[Sequence[object], Mapping[str, object]], None]) -> Callable[[type[_T]], type[_T]]:
    """Give a class an __init__ that checks its arguments first, so that errors have a hint."""

    def decorate(kind: type[_T]) -> type[_T]:
        init: Callable[..., None] = kind.__init__

        @wraps(init)
        def checked_init(self: _T, *args: Any, **fields: Any) -> None:
            check(args, fields)
            init(self, *args, **fields)

        setattr(kind, "__init__", checked_init)  # noqa: B010 - mypy refuses to assign to a method
        return kind

    return decorate


def field_of(word: str) -> str:
    """The field that an option of a command line, or a keyword, names."""
    return word.lstrip("-").replace("-", "_")


def hint_for(name: str, known: Collection[str]) -> str:
    """Hint for an unknown keyword or key: its name among `known`, or the place that has it."""
    answer = NAMES.get(field_of(name)) or Answer(ours=(name,))
    here = next((ours for ours in answer.ours if ours.partition("=")[0] in known), None)
    elsewhere = next((place for ours in answer.ours if (place := _where(ours))), "")
    found = f"Use {here}." if here else elsewhere
    if found or answer.sentence:
        return f"{found} {answer.sentence}".strip()
    nearest = nearest_name(name, known)
    return f"Did you mean '{nearest}'?" if nearest else f"Known names: {', '.join(known)}."


def _where(name: str) -> str:
    """A sentence about the place that has one of our names."""
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.core.sampling import SAMPLING_FIELDS

    option = name.replace("_", "-").removesuffix("s" if name.endswith(("_options", "_overrides")) else "")
    if name in BuildConfig.model_fields:
        return f"`dflash-trt build --{option}` sets it."
    if name.partition("=")[0] in RuntimeConfig.model_fields:
        return f"LLM has {name}."
    if any(row.name == name for row in SAMPLING_FIELDS):
        return f"SamplingParams has {name}."
    command = next((command for command, names in _OF_COMMANDS.items() if name in names.split()), None)
    return f"`dflash-trt {command} --{option}` sets it." if command else ""
