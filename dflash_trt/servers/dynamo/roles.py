"""Workers that compute prompts, and workers that go on with them: Dynamo's disaggregated serving.

Both open the same engine with the same directory of prefix blocks. The front end sends a request to a prefill worker
first, which computes the prompt, writes its blocks, target's and drafter's, and gives one token that nobody reads. Then
the request goes to a decode worker, which finds all blocks but the last tokens', so it drafts as if it had computed
them. A block that is missing there, for whatever reason, is computed: so are prompts too short for a prefill worker,
which passes them on at once. (The front end's own rule for short prompts never spares one of which nothing is cached.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from dflash_trt.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.serving.local_engine import LocalEngine

Role = Literal["both", "prefill", "decode"]

DEFAULT_MIN_TOKENS: Final = 512
_POLL_S: Final = 0.002
_RESULT: Final = "prefill_result"
_PARAMETERS: Final = "disaggregated_params"


def runtime_of(role: Role, runtime: RuntimeConfig) -> RuntimeConfig:
    """The settings of a worker in its role.

    Raises:
        ConfigError: a role needs the directory.
    """
    if role == "both":
        return runtime
    if runtime.disk_cache_dir is None:
        hint = "Name one that prefill and decode workers share; between processes of one machine, in /dev/shm."
        raise ConfigError.about(f"--role {role}", expected="--disk-cache-dir as well", found="none", hint=hint)
    return runtime.replaced(publish_prompts=runtime.publish_prompts or role == "prefill")


@dataclass(frozen=True, slots=True)
class HandOver:
    """A worker's part of it. Prompts of fewer than `min_tokens` are not computed by a prefill worker."""

    role: Role
    engine: LocalEngine
    min_tokens: int = 0

    def passed_on(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The whole answer of a prefill worker that leaves a prompt to the decode worker.

        A short one, or one whose log probabilities are wanted: that is computed whole by the worker that answers.
        """
        is_scored = (request.get("output_options") or {}).get("prompt_logprobs") is not None
        if self.role != "prefill" or not (is_scored or len(request["token_ids"]) < self.min_tokens):
            return None
        return {"token_ids": [0], "index": 0, "finish_reason": "length", **self._given()}

    def taken(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request that this worker runs.

        Raises:
            RequestError: a prefill worker of another engine, or with other settings, has computed the prompt.
        """
        if self.role == "prefill":
            return {**request, "stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
        given = (request.get(_RESULT) or {}).get(_PARAMETERS) or {}
        if given and given.get("engine") != self.engine.prefix_root:
            raise RequestError.about(
                "prefill worker",
                expected=f"one with the engine and settings of this one, {self.engine.prefix_root}",
                found=str(given.get("engine")),
                hint="Start prefill and decode workers with the same engine, device and drafter options.",
            )
        return {name: value for name, value in request.items() if name != _RESULT}

    async def given(self, prompt_token_ids: Sequence[int], *, salt: str) -> dict[str, Any]:
        """Wait until the blocks of a prompt are written, or will not be; fields of the last item for the front end."""
        if self.role != "prefill":
            return {}
        keys = await asyncio.to_thread(self.engine.prefix_keys, prompt_token_ids, salt=salt)
        while not self.engine.has_kept(keys):
            await asyncio.sleep(_POLL_S)
        return self._given()

    def _given(self) -> dict[str, Any]:
        return {_PARAMETERS: {"engine": self.engine.prefix_root}}
