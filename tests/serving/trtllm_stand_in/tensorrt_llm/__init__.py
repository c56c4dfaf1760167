"""A stand-in for TensorRT-LLM with the classes and names that its documentation has, and no others.

Arguments that `tests/data/tensorrt_llm_1.4.0rc1.json` does not list raise TypeError. Tokens are transformers' own,
greedy, of the checkpoint that the arguments name, in float32; they come in iterations of 1, 2, 3, ... up to K + 1
tokens, as if so many drafts were right. Sampling is not played: a temperature raises.

What it is told goes to the file that STAND_IN_LOG names, a JSON object a line.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__version__ = "1.4.0rc1"
KNOWN = json.loads((Path(__file__).resolve().parents[3] / "data/tensorrt_llm_1.4.0rc1.json").read_text())


class Model:
    """Greedy tokens of a checkpoint, in iterations."""

    def __init__(self, directory: str, *, max_draft_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._max_draft_len = max_draft_len

    def iterations(self, prompt: list[int], params: dict[str, Any]) -> Iterator[tuple[list[int], str | None]]:
        """New tokens and, with the last ones, "stop" or "length"."""
        import torch

        assert params["temperature"] == 0 and params["ignore_eos"] and not params["detokenize"]
        assert params["include_stop_str_in_output"] and not params["add_special_tokens"]
        stops, num_left, size = set(params["stop_token_ids"]), params["max_tokens"], 0
        ids, past = torch.tensor([prompt]), None
        new: list[int] = []
        while num_left:
            with torch.no_grad():
                out = self._model(ids, past_key_values=past, use_cache=True)
            past, num_left = out.past_key_values, num_left - 1
            new.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([new[-1:]])
            reason = "stop" if new[-1] in stops else None if num_left else "length"
            if reason is not None or len(new) == max(1, size):
                yield new, reason
                new, size = [], size % (self._max_draft_len + 1) + 1
            if reason is not None:
                return


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class SamplingParams:
    def __init__(self, **params: Any) -> None:
        _refuse_unknown("SamplingParams", params, KNOWN["sampling_params"])
        self.params = params


class RequestOutput:
    def __init__(self, request_id: int, prompt: list[int], iterations: Iterator[tuple[list[int], str | None]]) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self._iterations = iterations
        self._is_aborted = False

    def abort(self) -> None:
        self._is_aborted = True
        log({"abort": self.request_id})

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        completion = self.outputs[0]
        for new, reason in self._iterations:
            await asyncio.sleep(0.001)
            if self._is_aborted:
                completion.finish_reason, self.finished = "cancelled", True
                yield self
                return
            completion.token_ids = [*completion.token_ids, *new]
            completion.finish_reason, self.finished = reason, reason is not None
            yield self


class LLM:
    def __init__(self, model: str, **args: Any) -> None:
        _check_arguments({"model": model, **args})
        log({"llm_args": {"model": model, **args}})
        speculative = args.get("speculative_config")
        if speculative is not None:
            config = json.loads((Path(speculative["speculative_model"]) / "config.json").read_text())
            assert speculative["max_draft_len"] <= config["block_size"] - 1
        self._model = Model(model, max_draft_len=speculative["max_draft_len"] if speculative else 0)
        self._num_requests = 0

    def generate_async(self, inputs: list[int], **options: Any) -> RequestOutput:
        _refuse_unknown("generate_async", options, KNOWN["generate_async"])
        assert options["streaming"]
        params = options["sampling_params"].params
        self._num_requests += 1
        log({"request": self._num_requests, "params": params})
        if inputs[:2] == [6, 6]:
            raise ValueError("a prompt that TensorRT-LLM refuses")
        return RequestOutput(self._num_requests, inputs, self._model.iterations(inputs, params))

    def shutdown(self) -> None:
        log({"shutdown": True})


def log(told: dict[str, Any]) -> None:
    with Path(os.environ["STAND_IN_LOG"]).open("a") as file:
        file.write(json.dumps(told) + "\n")


def _refuse_unknown(what: str, given: dict[str, Any], known: Any) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{what}() got unexpected arguments {unknown}")


def _check_arguments(args: dict[str, Any], prefix: str = "") -> None:
    for name, value in args.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            _check_arguments(value, f"{path}.")
        elif path not in KNOWN["llm_args"] and path not in KNOWN["free_text"]:
            raise TypeError(f"LLM() got an unexpected argument {path}")
