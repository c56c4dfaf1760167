"""A stand-in for TensorRT-LLM with the classes and names that its documentation has, and no others.

Arguments that `tests/data/tensorrt_llm_1.4.0rc1.json` does not list raise TypeError, and so do parameters of a request
that it lists as refused while TensorRT-LLM drafts. Tokens are transformers' own, greedy, of the checkpoint that the
arguments name, in float32; they come in iterations of 1, 2, 3, ... up to K + 1 tokens, as if so many drafts were right.
Penalties, biases, bans, guides and log probabilities are played by transformers' processors and llguidance, as the
documentation defines them; at a temperature tokens are drawn after transformers' filters.

What it is told goes to the file that STAND_IN_LOG names, a JSON object a line.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
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
        self._directory = Path(directory)
        self._max_draft_len = max_draft_len

    def iterations(
        self, prompt: list[int], params: dict[str, Any]
    ) -> Iterator[tuple[list[int], str | None, list[dict[int, float]]]]:
        """New tokens, with the last ones "stop" or "length", and log probabilities of the K most likely and of each."""
        import torch

        assert params["ignore_eos"] and not params["detokenize"]
        assert params["include_stop_str_in_output"] and not params["add_special_tokens"]
        stops, num_left, size = set(params["stop_token_ids"]), params["max_tokens"], 0
        ids, past, rules = torch.tensor([prompt]), None, Rules(self._model, self._directory, prompt, params)
        new: list[int] = []
        scores: list[dict[int, float]] = []
        while num_left:
            with torch.no_grad():
                out = self._model(ids, past_key_values=past, use_cache=True)
            past, num_left = out.past_key_values, num_left - 1
            raw = out.logits[0, -1].log_softmax(0)
            new.append(rules.token(out.logits[:, -1]))
            rules.add(new[-1])
            if params.get("logprobs") is not None:
                most_likely = raw.topk(params["logprobs"])
                scores.append({new[-1]: float(raw[new[-1]])})
                scores[-1] |= dict(zip(most_likely.indices.tolist(), most_likely.values.tolist(), strict=True))
            ids = torch.tensor([new[-1:]])
            reason = "stop" if new[-1] in stops else None if num_left else "length"
            if reason is not None or len(new) == max(1, size):
                yield new, reason, scores
                new, scores, size = [], [], size % (self._max_draft_len + 1) + 1
            if reason is not None:
                return

    def prompt_scores(self, prompt: list[int], num_top: int, first_token: int) -> list[dict[int, float]]:
        """Entry i has the most likely tokens after prompt token i, and the one that follows it."""
        import torch

        with torch.no_grad():
            rows = self._model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        entries = []
        for row, token in zip(rows, [*prompt[1:], first_token], strict=True):
            most_likely = row.topk(num_top)
            entries.append(dict(zip(most_likely.indices.tolist(), most_likely.values.tolist(), strict=True)))
            entries[-1].setdefault(token, float(row[token]))
        return entries


class Rules:
    """What a request's parameters do to its logits."""

    def __init__(self, model: Any, directory: Path, prompt: list[int], params: dict[str, Any]) -> None:
        self._params = params
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._eos_id = model.config.eos_token_id
        self._matcher: Any = None
        self._seed = params["seed"]
        guide = params.get("guided_decoding")
        if guide is not None or params.get("bad"):
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._bad = [tokenizer.encode(text, add_special_tokens=False).ids for text in params.get("bad", ())]
        if guide is not None:
            from llguidance import LLMatcher, LLTokenizer

            ((name, text),) = guide.items()
            tokens = LLTokenizer(tokenizer.to_str(), n_vocab=model.config.vocab_size, eos_token=self._eos_id)
            self._matcher = LLMatcher(tokens, getattr(LLMatcher, KNOWN["llguidance"][name])(text))

    def add(self, token: int) -> None:
        self._tokens.append(token)
        if self._matcher is not None and token != self._eos_id:
            assert self._matcher.consume_token(token)

    def token(self, logits: Any) -> int:
        import torch
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        given, logits = self._params, self.applied(logits)
        if not given["temperature"]:
            return int(logits[0].argmax())
        filters = [TemperatureLogitsWarper(given["temperature"])]
        filters += [TopKLogitsWarper(given["top_k"])] if given.get("top_k") else []
        filters += [TopPLogitsWarper(given["top_p"])] if "top_p" in given else []
        for apply in filters:
            logits = apply(None, logits)
        generator = torch.Generator().manual_seed(self._seed + len(self._tokens))
        return int(torch.multinomial(logits[0].softmax(0), 1, generator=generator))

    def applied(self, logits: Any) -> Any:
        import torch
        from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

        given, ids = self._params, torch.tensor([self._tokens])
        bias = given.get("embedding_bias")
        logits = logits if bias is None else logits + bias
        repetition = given.get("repetition_penalty", 1.0)
        if repetition != 1.0:
            logits = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits)
        counted = torch.tensor(self._tokens[min(given.get("prompt_ignore_length", 0), self._num_prompt) :]).long()
        counts = torch.bincount(counted, minlength=logits.shape[1])
        frequency, presence = given.get("frequency_penalty", 0.0), given.get("presence_penalty", 0.0)
        logits = logits - frequency * counts - presence * (counts > 0)
        if given.get("bad"):
            logits = NoBadWordsLogitsProcessor(self._bad)(ids, logits)
        if len(self._tokens) - self._num_prompt < given.get("min_tokens", 0):
            logits[0, given["end_id"]] = -torch.inf
        if self._matcher is not None:
            logits = logits.masked_fill(~self._allowed(logits.shape[1]), -torch.inf)
        return logits

    def _allowed(self, vocab_size: int) -> Any:
        import numpy as np
        import torch

        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(mask, bitorder="little")[:vocab_size].astype(bool))


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class GuidedDecodingParams:
    def __init__(self, **params: Any) -> None:
        _refuse_unknown("GuidedDecodingParams", params, KNOWN["guided_decoding_params"])
        self.params = params


class SamplingParams:
    def __init__(self, **params: Any) -> None:
        _refuse_unknown("SamplingParams", params, KNOWN["sampling_params"])
        self.params = params


class RequestOutput:
    def __init__(self, request_id: int, prompt: list[int], iterations: Iterator[tuple[Any, ...]], scores: Any) -> None:
        """`scores` gives the entries of the prompt after the first token; None where no request asks for them."""
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self._iterations, self._scores = iterations, scores
        self._is_aborted = False

    def abort(self) -> None:
        self._is_aborted = True
        log({"abort": self.request_id})

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        completion = self.outputs[0]
        for new, reason, scores in self._iterations:
            await asyncio.sleep(0.001)
            if self._is_aborted:
                completion.finish_reason, self.finished = "cancelled", True
                yield self
                return
            if self._scores is not None and not completion.token_ids:
                entries = self._scores(new[0])
                completion.prompt_logprobs = [{t: Logprob(value) for t, value in row.items()} for row in entries]
            completion.token_ids = [*completion.token_ids, *new]
            rows = [{token: Logprob(value) for token, value in row.items()} for row in scores]
            completion.logprobs = [*completion.logprobs, *rows]
            completion.finish_reason, self.finished = reason, reason is not None
            yield self


class LLM:
    def __init__(self, model: str, **args: Any) -> None:
        _check_arguments({"model": model, **args})
        log({"llm_args": {"model": model, **args}})
        speculative = args.get("speculative_config")
        if speculative is not None:
            _check_drafter(speculative)
        self._model = Model(model, max_draft_len=speculative["max_draft_len"] if speculative else 0)
        self._num_requests, self._refused = 0, refused_parameters(speculative)
        self._has_guides = args.get("guided_decoding_backend") == "llguidance"

    def generate_async(self, inputs: list[int], **options: Any) -> RequestOutput:
        _refuse_unknown("generate_async", options, KNOWN["generate_async"])
        assert options["streaming"]
        params = dict(options["sampling_params"].params)
        guide = params.get("guided_decoding")
        if guide is not None:
            assert isinstance(guide, GuidedDecodingParams) and self._has_guides
            params["guided_decoding"] = guide.params
        _refuse("SamplingParams", set(params) & self._refused)
        self._num_requests += 1
        log({"request": self._num_requests, "params": {**params, "embedding_bias": "embedding_bias" in params}})
        if inputs[:2] == [6, 6]:
            raise ValueError("a prompt that TensorRT-LLM refuses")
        num_top, scores = params.get("prompt_logprobs"), None
        if num_top is not None:
            scores = partial(self._model.prompt_scores, inputs, num_top)
        return RequestOutput(self._num_requests, inputs, self._model.iterations(inputs, params), scores)

    def shutdown(self) -> None:
        log({"shutdown": True})


def log(told: dict[str, Any]) -> None:
    with Path(os.environ["STAND_IN_LOG"]).open("a") as file:
        file.write(json.dumps(told) + "\n")


def _check_drafter(speculative: dict[str, Any]) -> None:
    """What is read of a drafter before its weights: K fits the block of DFlash, the taps of EAGLE-3 fit its fc."""
    directory = Path(speculative["speculative_model"])
    config = json.loads((directory / "config.json").read_text())
    if speculative["decoding_type"] == "DFlash":
        assert speculative["max_draft_len"] <= config["block_size"] - 1
        return
    from safetensors import safe_open

    taps = speculative["eagle3_layers_to_capture"]
    assert taps == sorted(set(taps))
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert file.get_slice("fc.weight").get_shape()[1] == len(taps) * config["target_hidden_size"]
        assert file.get_slice("lm_head.weight").get_shape()[0] == config["draft_vocab_size"]


def refused_parameters(speculative: dict[str, Any] | None) -> set[str]:
    """Parameters of a request that are refused beside these drafts."""
    always, without_penalties = KNOWN["refused_while_drafting"]
    if speculative is None:
        return set()
    return set(always) | (set() if speculative.get("enable_penalty") else set(without_penalties))


def _refuse_unknown(what: str, given: Any, known: Any) -> None:
    _refuse(what, set(given) - set(known))


def _refuse(what: str, names: set[str]) -> None:
    if names:
        raise TypeError(f"{what}() got unexpected arguments {sorted(names)}")


def _check_arguments(args: dict[str, Any], prefix: str = "") -> None:
    for name, value in args.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            if name == "speculative_config":
                _refuse_unknown(name, value, KNOWN["decoding_configs"][value["decoding_type"]])
            _check_arguments(value, f"{path}.")
        elif path not in KNOWN["llm_args"] and path not in KNOWN["free_text"]:
            raise TypeError(f"LLM() got an unexpected argument {path}")
