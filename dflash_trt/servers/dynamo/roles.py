"""Workers that compute prompts, and workers that go on with them: Dynamo's disaggregated serving.

Both open the same engine. The front end sends a request to a prefill worker and at once to a decode worker, too. The
first computes the prompt, writes the blocks of every chunk, target's and drafter's, into a directory that both share or
into memory that the other reads (`serving/nixl_blocks.py`), and gives one token that nobody reads. The other reads
blocks as they come, until its connection to the first (`rooms.py`) ends, and starts the request: all blocks but the
last tokens' are there, so it drafts as if it had computed them. A block that is missing, for whatever reason, is
computed: so are prompts too short for a prefill worker, which passes them on at once. (The front end's own rule for
short prompts never spares one of which nothing is cached.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.dynamo.rooms import Rooms, visiting
from dflash_trt.serving.nixl_blocks import BlockReceiver, BlockSender, check_nixl

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.serving.local_engine import LocalEngine

Role = Literal["both", "prefill", "decode"]
TransferBackend = Literal["files", "nixl"]  # how blocks go from prefill to decode workers

DEFAULT_MIN_TOKENS: Final = 512
DEFAULT_TRANSFER_BYTES: Final = 1 << 30
_POLL_S: Final = 0.002
_LOOK_S: Final = 0.02  # for blocks that have come
_ROOM: Final = "bootstrap_info"


def runtime_of(role: Role, runtime: RuntimeConfig, backend: TransferBackend = "files") -> RuntimeConfig:
    """The settings of a worker in its role.

    Raises:
        ConfigError: a role needs the directory, or for NIXL a host tier of one node and no directory.
    """
    if role == "both":
        return runtime
    check_transfers(runtime, backend)
    if backend == "nixl":
        return runtime
    if runtime.disk_cache_dir is None:
        hint = "Name one that prefill and decode workers share; between processes of one machine, in /dev/shm."
        raise ConfigError.about(f"--role {role}", expected="--disk-cache-dir as well", found="none", hint=hint)
    return runtime.replaced(publish_prompts=runtime.publish_prompts or role == "prefill")


def check_transfers(runtime: RuntimeConfig, backend: TransferBackend) -> None:
    """Raises ConfigError: NIXL is not installed, or needs other settings."""
    if backend != "nixl":
        return
    subject = "--transfer-backend nixl"
    if runtime.host_cache_bytes is None:
        hint = "Blocks go from the host memory of one worker to that of the other."
        raise ConfigError.about(subject, expected="--host-cache-bytes as well", found="none", hint=hint)
    if runtime.disk_cache_dir is not None:
        hint = "Leave out one of them."
        raise ConfigError.about(subject, expected="no --disk-cache-dir", found=runtime.disk_cache_dir, hint=hint)
    if runtime.nnodes > 1:
        raise ConfigError.about(subject, expected="ranks on one node", found=f"{runtime.nnodes} nodes")
    check_nixl()


class HandOver:
    """A worker's part of it. Prompts of fewer than `min_tokens` are not computed by a prefill worker.

    `blocks` are a BlockSender or a BlockReceiver of NIXL, by role; None where files take the blocks.
    """

    def __init__(
        self, role: Role, engine: LocalEngine, min_tokens: int = 0, *, blocks: BlockSender | BlockReceiver | None = None
    ) -> None:
        self.role, self.engine, self.min_tokens = role, engine, min_tokens
        self._blocks = blocks
        self._kind = engine.prefix_root if blocks is None else f"{engine.prefix_root} over NIXL"
        sender = blocks if isinstance(blocks, BlockSender) else None
        self.rooms = Rooms(self._kind, sender) if role == "prefill" else None

    @contextmanager
    def computing(self, request: Mapping[str, Any], cancel: Callable[[], None]) -> Iterator[None]:
        """A prefill worker's block that computes a prompt and writes it: `cancel` ends it if nobody waits any more."""
        if self.rooms is None or request.get(_ROOM) is None:
            yield
            return
        with self.rooms.computing(request[_ROOM]["bootstrap_room"], cancel):
            yield

    def passed_on(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The whole answer of a prefill worker that leaves a prompt to the decode worker.

        A short one, one whose log probabilities are wanted, which is computed whole by the worker that answers, or one
        that nobody waits for any more.
        """
        is_scored = (request.get("output_options") or {}).get("prompt_logprobs") is not None
        is_left = self.rooms is not None and self.rooms.is_left((request.get(_ROOM) or {}).get("bootstrap_room"))
        if self.role != "prefill" or not (is_scored or is_left or len(request["token_ids"]) < self.min_tokens):
            return None
        return {"token_ids": [0], "index": 0, "finish_reason": "length", **self._given()}

    def taken(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request that this worker runs."""
        runs = {name: value for name, value in request.items() if name != _ROOM}
        return runs | {"stop_conditions": {"max_tokens": 1, "ignore_eos": True}} if self.role == "prefill" else runs

    async def read(
        self, request: Mapping[str, Any], prompt_token_ids: Sequence[int], *, salt: str, is_stopped: Callable[[], bool]
    ) -> None:
        """Read the blocks of a prompt as a prefill worker writes them, until all are there, or no more come.

        A prefill worker begins to tell of its blocks.

        Raises:
            RequestError: the prefill worker has refused the prompt, or is one of another engine or with other settings.
        """
        if request.get(_ROOM) is None:
            return
        keys = await asyncio.to_thread(self.engine.prefix_keys, prompt_token_ids, salt=salt)
        if self.rooms is not None:
            self.rooms.offer(request[_ROOM]["bootstrap_room"], keys)
            return
        receiver = self._blocks if isinstance(self._blocks, BlockReceiver) else None
        async with visiting(request[_ROOM], self._kind, receiver) as ended:
            while not ended.done() and not is_stopped():
                if await asyncio.to_thread(self.engine.read_early, prompt_token_ids, keys, salt=salt):
                    return
                await asyncio.wait({ended}, timeout=_LOOK_S)
            if ended.done():
                ended.result()

    async def given(self, prompt_token_ids: Sequence[int], *, salt: str, reason: str) -> dict[str, Any]:
        """Wait until the blocks of a prompt are written, or will not be; fields of the last item for the front end.

        `reason` is the item's finish_reason. The front end takes "cancelled" for the end of the decode worker's
        request, too, which has only left the room.
        """
        if self.role != "prefill":
            return {}
        keys = await asyncio.to_thread(self.engine.prefix_keys, prompt_token_ids, salt=salt)
        while not self.engine.has_kept(keys):
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(0)  # what threads have told of blocks comes first
        return {"finish_reason": "length" if reason == "cancelled" else reason, **self._given()}

    def close(self) -> None:
        """After the engine."""
        if self._blocks is not None:
            self._blocks.close()

    def _given(self) -> dict[str, Any]:
        """Dynamo wants some, though the room has told the decode worker all."""
        return {"disaggregated_params": {"engine": self.engine.prefix_root}}
