"""An engine of this process as a worker needs it, whatever the front end: requests in, chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import KV_BUDGET, RuntimeConfig
from dflash_trt.servers.dynamo.echo import tell_texts
from dflash_trt.servers.dynamo.request_fields import Order, read_request
from dflash_trt.servers.dynamo.responses import response
from dflash_trt.servers.dynamo.roles import DEFAULT_TRANSFER_BYTES, HandOver, Role, TransferBackend, runtime_of
from dflash_trt.servers.dynamo.settings import sampling_defaults
from dflash_trt.serving.marked_texts import DraftMarker
from dflash_trt.serving.nixl_blocks import BlockReceiver, BlockSender

if TYPE_CHECKING:
    from dflash_trt.core.prefix_watcher import PrefixWatcher
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.serving.generator import Generator
    from dflash_trt.serving.statistics import EngineStatistics
    from dflash_trt.serving.stream import RequestStream

_CPU_MEMORY_FRACTION = 0.5  # for the K/V pages of all replicas
_MIN_BLOCKS = 4  # in a prefill worker's memory


@dataclass(frozen=True, kw_only=True)
class RegisteredLimits:
    """Limits that a worker registers for its engine. None means that another runtime owns the pages."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    page_size: int | None = None
    num_pages: int | None = None


class EngineService:
    """Owns the generator. `sampling_defaults` are for requests that do not say."""

    def __init__(
        self, generator: Generator, *, sampling_defaults: Mapping[str, Any], hand_over: HandOver | None = None
    ) -> None:
        self._generator = generator
        self._hand_over = hand_over
        self._defaults = sampling_defaults
        self._streams: dict[str, RequestStream] = {}  # by the front end's id

    @property
    def failure(self) -> str | None:
        return self._generator.failure

    def statistics(self) -> EngineStatistics:
        return self._generator.statistics

    async def generate(
        self, request: Mapping[str, Any], request_id: str, is_stopped: Callable[[], bool]
    ) -> AsyncIterator[dict[str, Any]]:
        """One item per step. Closing the iterator, or `abort`, ends the request and frees its pages.

        Raises:
            RequestError: the request is refused.
            RuntimeError: it failed.
        """
        hand_over, passed_on = self._hand_over, None
        with nullcontext() if hand_over is None else hand_over.computing(request, lambda: self.abort(request_id)):
            if hand_over is not None:
                passed_on = hand_over.passed_on(request)
            if passed_on is None:
                async with aclosing(self._generate(request, request_id, is_stopped)) as items:
                    async for item in items:
                        yield item
        if passed_on is not None:
            yield passed_on

    async def _generate(
        self, request: Mapping[str, Any], request_id: str, is_stopped: Callable[[], bool]
    ) -> AsyncGenerator[dict[str, Any]]:
        limits, codec, hand_over = self._generator.limits, self._generator.codec, self._hand_over
        own_request = request if hand_over is None else hand_over.taken(request)
        order = read_request(own_request, defaults=self._defaults, max_seq_len=limits.max_seq_len)
        if hand_over is not None:
            await hand_over.read(request, order.prompt_token_ids, salt=order.cache_salt, is_stopped=is_stopped)
            if is_stopped():
                return
        stream = await self._submit(order)
        self._streams[request_id] = stream
        to_response = partial(
            response,
            max_draft_len=limits.max_draft_len,
            has_logprobs=order.sampling.logprobs,
            marker=self._marker(order),
        )
        try:
            while chunks := await stream.take_steps_async():
                for chunk in chunks:
                    item = to_response(chunk)
                    if codec is not None:
                        tell_texts(item.get("engine_data", {}), order.prompt_token_ids, codec)
                    if hand_over is not None and "finish_reason" in item:
                        reason = item["finish_reason"]
                        item |= await hand_over.given(order.prompt_token_ids, salt=order.cache_salt, reason=reason)
                    yield item
                if is_stopped():
                    return
        finally:
            self._streams.pop(request_id, None)
            stream.cancel()

    def _marker(self, order: Order) -> DraftMarker | None:
        if not order.reports_drafts:
            return None
        assert self._generator.codec is not None  # a worker's engine has a tokenizer: see card_source
        return DraftMarker(self._generator.codec)

    async def _submit(self, order: Order) -> RequestStream:
        """A constraint may take seconds to compile: then not in the event loop.

        Raises:
            RequestError: the request is refused.
        """
        submit = partial(
            self._generator.submit,
            order.prompt_token_ids,
            order.sampling,
            cache_salt=order.cache_salt,
            priority=order.priority,
            reports_drafts=order.reports_drafts,
        )
        if order.sampling.grammar_field is None:
            return submit()
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_stream)
            raise

    def abort(self, request_id: str) -> None:
        """End a request whose client has left."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    async def listen(self, host: str) -> asyncio.Server | None:
        """Let decode workers wait for prompts of a prefill worker; None of other workers."""
        rooms = None if self._hand_over is None else self._hand_over.rooms
        return None if rooms is None else await rooms.listen(host)

    def close(self) -> None:
        self._generator.close()
        if self._hand_over is not None:
            self._hand_over.close()


def _cancel_stream(submitting: asyncio.Future[RequestStream]) -> None:
    """Cancel a request whose client has left before the engine took it."""
    if submitting.exception() is None:
        submitting.result().cancel()


def open_service(
    engine: EngineDir,
    runtime: RuntimeConfig,
    watcher: PrefixWatcher,
    *,
    num_replicas: int = 1,
    role: Role = "both",
    prefill_min_tokens: int = 0,
    transfer_backend: TransferBackend = "files",
    transfer_bytes: int = DEFAULT_TRANSFER_BYTES,
) -> tuple[EngineService, RegisteredLimits]:
    """Open an engine; `watcher` is told of its prefix cache. On a CPU, `num_replicas` divide the memory.

    A prefill worker has `transfer_bytes` of memory for blocks that others read over NIXL.

    Raises:
        ConfigError, EngineDirError, CapacityError, RankError: see LLM.
    """
    from dflash_trt.serving.generator import Generator
    from dflash_trt.serving.llm import open_request_reader
    from dflash_trt.serving.local_engine import checked_config, open_local_engine

    if engine.manifest.backend == "tensorrt_llm":
        return _open_foreign(engine, runtime)
    config = checked_config(engine, runtime_of(role, runtime, transfer_backend))
    if config.device == "cpu" and all(getattr(config, name) is None for name in KV_BUDGET):
        config = config.replaced(kv_cache_free_memory_fraction=_CPU_MEMORY_FRACTION / num_replicas)
    reader = open_request_reader(engine)
    make_blocks = None if role == "both" or transfer_backend == "files" else partial(_blocks, role, transfer_bytes)
    local = open_local_engine(engine, config, make_store=make_blocks, publishes_all=role == "prefill")
    blocks = local.prefix_store if isinstance(local.prefix_store, BlockSender | BlockReceiver) else None
    local.watch_prefixes(watcher)
    generator = Generator(local, reader, eos_token_ids=engine.manifest.target.eos_token_ids, seed=config.seed)
    limits = local.limits
    hand_over = None if role == "both" else HandOver(role, local, prefill_min_tokens, blocks=blocks)
    return EngineService(generator, sampling_defaults=sampling_defaults(engine), hand_over=hand_over), RegisteredLimits(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
    )


def _blocks(role: Role, num_bytes: int, name: str, max_block_bytes: int) -> BlockSender | BlockReceiver:
    """What a worker sends or receives over NIXL.

    Raises:
        ConfigError: a prefill worker's memory holds hardly any block.
    """
    if role == "decode":
        return BlockReceiver(max_block_bytes)
    if num_bytes < _MIN_BLOCKS * max_block_bytes:
        expected, found = f"{_MIN_BLOCKS} blocks of {max_block_bytes} bytes or more", f"{num_bytes} bytes"
        raise ConfigError.about("--transfer-bytes", expected=expected, found=found)
    return BlockSender(num_bytes)


def _open_foreign(engine: EngineDir, runtime: RuntimeConfig) -> tuple[EngineService, RegisteredLimits]:
    """An engine that another runtime runs: its prefix cache, if any, sends no events."""
    from dflash_trt.serving.llm import LLM

    limits = engine.manifest.build_config
    registered = RegisteredLimits(
        max_batch_size=limits.max_batch_size, max_seq_len=limits.max_seq_len, max_num_tokens=limits.max_num_tokens
    )
    return EngineService(LLM(engine.path, runtime), sampling_defaults=sampling_defaults(engine)), registered
