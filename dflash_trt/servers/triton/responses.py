"""Responses as arrays, made from the engine's chunks. Knows no Triton API."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.core.logprobs import TokenLogprob
from dflash_trt.core.request import GenerationOutput
from dflash_trt.servers.triton.request_reader import Order
from dflash_trt.servers.triton.tensors import OUTPUTS_BY_NAME
from dflash_trt.serving.output_processor import StreamChunk

Arrays = dict[str, NDArray[Any]]

_DTYPES: dict[str, Any] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_NS_PER_S = 1e9


@dataclass(kw_only=True, slots=True)
class ResponseMaker:
    """The responses of one request. `prompt_text` precedes the text if the request asks for the prompt.

    `stop_token_ids` are the ids of `stop_reason`; `decode` gives the text of ids, None without a tokenizer.
    """

    order: Order
    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    decode: Any = None  # Callable[[Sequence[int]], str] | None
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    _cumulative_logprob: float = 0.0
    _has_begun: bool = False
    _last_token_ns: int = 0

    def response(self, chunk: StreamChunk) -> Arrays | None:
        """The arrays that are due with this chunk; None when a request that does not stream has nothing yet."""
        if chunk.token_ids:
            self._last_token_ns = time.monotonic_ns()
        self._cumulative_logprob += math.fsum(chunk.logprobs)
        if self.order.streams:
            return self._part(chunk)
        if chunk.output is None:
            return None
        output = chunk.output
        whole = StreamChunk(
            text=output.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            output=output,
            top_logprobs=output.top_logprobs,
            sample_index=output.sample_index,
        )
        return self._part(whole)

    def _part(self, chunk: StreamChunk) -> Arrays:
        text, token_ids = chunk.text or "", chunk.token_ids
        if self.order.echoes_prompt and not self._has_begun:
            text, token_ids = self.prompt_text + text, self.prompt_token_ids + token_ids
        self._has_begun = True
        values: dict[str, Any] = {"text_output": [text], "output_ids": token_ids}
        values["sequence_index"] = [chunk.sample_index]
        num_top = self.order.sampling.top_logprobs
        if num_top:
            values |= _top_arrays("output", chunk.top_logprobs, num_top)
        if "return_log_probs" in self.order.asked:
            values["output_log_probs"] = [chunk.logprobs]
        if chunk.output is not None:
            values |= self._last(chunk.output)
        return as_arrays(values)

    def _last(self, output: GenerationOutput) -> dict[str, Any]:
        num_draft_tokens = output.num_draft_tokens
        values: dict[str, Any] = {
            "num_input_tokens": [output.num_prompt_tokens],
            "num_output_tokens": [len(output.token_ids)],
            "acceptance_rate": [output.num_accepted_tokens / num_draft_tokens if num_draft_tokens else 0.0],
            "total_accepted_draft_tokens": [output.num_accepted_tokens],
            "total_draft_tokens": [num_draft_tokens],
            "num_verify_steps": [output.num_verify_steps],
            "acceptance_length": [output.acceptance_length or 0.0],
            "batch_index": [0],
        }
        num_top = self.order.sampling.prompt_logprobs
        if num_top is not None and output.prompt_logprobs is not None:
            entries = [entry for entry in output.prompt_logprobs if entry is not None]
            values["prompt_log_probs"] = [entry.logprob for entry in entries]
            values |= _top_arrays("prompt", [entry.top_logprobs for entry in entries], num_top)
        if self.order.gives_finish_reason:
            values["finish_reason"] = [output.finish_reason]
        if "return_log_probs" in self.order.asked:
            values["cum_log_probs"] = [self._cumulative_logprob]
        if "return_cumulative_logprob" in self.order.asked:
            values["cumulative_logprob"] = [self._cumulative_logprob]
        if "return_stop_reason" in self.order.asked:
            values["stop_reason"] = [self._stop_reason(output)]
        if "return_perf_metrics" in self.order.asked:
            values |= self._times(output)
        return values

    def _times(self, output: GenerationOutput) -> dict[str, Any]:
        first_token_ns = self.arrived_ns + int(output.time_to_first_token_s * _NS_PER_S)
        return {
            "kv_cache_hit_rate": [output.statistics.num_prefix_hit_tokens / max(1, output.num_prompt_tokens)],
            "arrival_time_ns": [self.arrived_ns],
            "first_scheduled_time_ns": [self.arrived_ns + int(output.statistics.queue_time_s * _NS_PER_S)],
            "first_token_time_ns": [first_token_ns if output.token_ids else 0],
            "last_token_time_ns": [max(first_token_ns, self._last_token_ns) if output.token_ids else 0],
        }

    def _stop_reason(self, output: GenerationOutput) -> str:
        if output.finish_reason != "stop":
            return ""
        text = output.text
        if text is not None and self.order.sampling.stop:
            rest = self.decode(output.token_ids)[len(text) :]
            found = [stop for stop in self.order.sampling.stop if rest.startswith(stop)]
            if found:
                return min(found, key=len)
        return str(output.token_ids[-1])


def _top_arrays(prefix: str, rows: Sequence[Sequence[TokenLogprob]], num_top: int) -> dict[str, Any]:
    """[rows, num_top] each, also without rows."""
    shape = (len(rows), num_top)
    return {
        f"{prefix}_top_token_ids": np.array([[entry.token_id for entry in row] for row in rows]).reshape(shape),
        f"{prefix}_top_log_probs": np.array([[entry.logprob for entry in row] for row in rows]).reshape(shape),
    }


def as_arrays(values: Mapping[str, Sequence[Any]]) -> Arrays:
    """Each value as its output declares it."""
    arrays: Arrays = {}
    for name, value in values.items():
        tensor = OUTPUTS_BY_NAME[name]
        if tensor.type == "STRING":
            value = [text.encode() for text in value]
        arrays[name] = np.array(value, dtype=_DTYPES[tensor.type])
    return arrays
