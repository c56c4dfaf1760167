"""An engine class for specdec_bench, NVIDIA's harness of SPEED-Bench (examples/specdec_bench of its Model-Optimizer).

Copy this file into the harness, and add one entry to `engines_available` of its run.py:

    from specdec_bench_engine import DFlashTrtModel
    engines_available["DFLASH_TRT"] = DFlashTrtModel

    python run.py --engine DFLASH_TRT --model_dir ENGINE_DIR --tokenizer ENGINE_DIR/tokenizer --tp_size 1 --ep_size 1 \
        --speculative_algorithm DFLASH --draft_length 7 --dataset speed --dataset_path data/speed/qualitative

The harness takes its acceptance length from the lengths of the chunks that an engine streams. So this class gives one
list of tokens for each step, and never two steps as one. What it cannot do as asked is refused: the harness would
measure something else without a word. Its `engine_args` are fields of dflash_trt.RuntimeConfig.
"""

import time
from typing import Any

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.errors import ConfigError, problem, raise_all

# What the harness always passes and an engine directory has settled already.
_SETTLED = ("trust_remote_code", "tokenizer_path")
_SAMPLING = ("temperature", "top_p", "top_k")


class DFlashTrtModel:
    """What the harness calls: `run` for each turn, `stop` at the end. `model_dir` is an engine directory."""

    def __init__(
        self, model_dir: str, max_concurrent_requests: int, sampling_kwargs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Raises ConfigError, and what LLM raises."""
        algorithm = str(kwargs.pop("speculative_algorithm", None) or "NONE")
        ranks = {"tp_size": kwargs.pop("tensor_parallel_size", 1), "ep_size": kwargs.pop("moe_expert_parallel_size", 1)}
        drafter = kwargs.pop("draft_model_dir", None)
        num_draft_tokens = kwargs.pop("speculative_num_steps", None)
        block_size = kwargs.pop("speculative_num_draft_tokens", None)  # the harness's --block_size, the anchor included
        if block_size is not None:
            num_draft_tokens = block_size - 1
        settings = {name: value for name, value in kwargs.items() if name not in _SETTLED}
        drafting = {"use_drafter": False} if algorithm == "NONE" else {"draft_length": num_draft_tokens}
        self._sampling = _sampling_of(sampling_kwargs)
        self._llm = LLM(model_dir, **{"enable_prefix_caching": False} | settings | drafting)
        try:
            raise_all(ConfigError, "specdec_bench", self._problems(algorithm, ranks, drafter, max_concurrent_requests))
        except ConfigError:
            self.stop()
            raise

    async def run(
        self, prompt_ids: list[int], max_length: int, end_id: int, request_id: int, turn_id: int
    ) -> dict[str, Any]:
        """One turn. `output_ids` are [beam][step][token], `token_times` the start and the end of each step, in seconds.

        `end_id` ends the text and is left out of it, as the harness's own engines do; -1 is no end. If there is nothing
        else it is kept: the harness divides by the number of steps.
        """
        ends = {"ignore_eos": True} if end_id == -1 else {"stop_token_ids": (end_id,)}
        sampling = SamplingParams(max_new_tokens=max_length, **ends, **self._sampling)
        token_times, steps = [time.perf_counter()], []
        stream = self._llm.submit({"prompt_token_ids": prompt_ids}, sampling)
        while chunks := await stream.take_steps_async():
            now = time.perf_counter()
            for chunk in chunks:
                if chunk.output is not None and chunk.output.error is not None:
                    raise RuntimeError(f"request {request_id}, turn {turn_id}: {chunk.output.error}")
                tokens = [token for token in chunk.token_ids if token != end_id]
                if tokens:
                    steps.append(tokens)
                    token_times.append(now)
        if not steps:
            steps.append([end_id])
            token_times.append(time.perf_counter())
        return {"output_ids": [steps], "output_logits": None, "token_times": token_times}

    def get_serving_config(self) -> dict[str, Any]:
        return {"engine": "dflash-trt", **self._llm.config.model_dump(mode="json")}

    def stop(self) -> None:
        self._llm.close()

    def _problems(self, algorithm: str, ranks: dict[str, int], drafter: str | None, num_requests: int) -> list[str]:
        """What the command line says of the engine, against the engine."""
        manifest = self._llm.engine.manifest
        built = "none" if manifest.draft is None else manifest.draft.algorithm
        mapping, limits = manifest.pretrained_config.mapping, manifest.build_config
        found = []
        if algorithm != "NONE" and algorithm.lower() not in (built, built.removesuffix("2")):
            expected = f"{built.removesuffix('2').upper()} or NONE for this engine"
            found.append(problem("--speculative_algorithm", expected=expected, found=algorithm))
        if drafter is not None:
            found.append(problem("--draft_model_dir", expected="none: the engine has its drafter", found=str(drafter)))
        for name, asked in ranks.items():
            if asked != (has := getattr(mapping, name)):
                found.append(problem(f"--{name}", expected=f"{has}, that of the engine", found=str(asked)))
        if num_requests > limits.max_batch_size:
            expected = f"at most {limits.max_batch_size}, the engine's max_batch_size"
            found.append(problem("--concurrency", expected=expected, found=str(num_requests)))
        return found


def _sampling_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for what is not sampled here."""
    unknown = [f"{name} {value}" for name, value in asked.items() if name not in _SAMPLING]
    if unknown and unknown != ["beam_width 1"]:
        raise ConfigError.about("sampling_kwargs", expected=", ".join(_SAMPLING), found=", ".join(unknown))
    return {name: asked[name] for name in _SAMPLING if asked.get(name) is not None}
