"""An engine class for Dynamo, and its front end: the only module that imports Dynamo.

Dynamo's contract with engines is beta. Everything else about a worker is in `service.py`, in plain types.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import HttpError, InvalidArgument

from dflash_trt.core.errors import ConfigError, QueueFullError, RequestError, problem, raise_all
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.dynamo.metrics import registry_of
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.rooms import port_of
from dflash_trt.servers.dynamo.service import EngineService, RegisteredLimits, open_service
from dflash_trt.servers.dynamo.settings import WorkerSettings, has_chat_template, shared_card
from dflash_trt.servers.dynamo.worker_address import own_address, worker_environment

if TYPE_CHECKING:
    from dynamo._core import Context


_TOO_MANY_REQUESTS = 429
_MODES = {
    "both": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}


def check_parsers(*, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ConfigError: Dynamo has no parser of that name."""
    named = (
        ("--tool-call-parser", tool_call_parser, get_tool_parser_names()),
        ("--reasoning-parser", reasoning_parser, get_reasoning_parser_names()),
    )
    problems = [
        problem(option, expected=f"one of {', '.join(sorted(known))}", found=repr(name))
        for option, name, known in named
        if name is not None and name not in known
    ]
    raise_all(ConfigError, "options", problems)


class DynamoEngine(LLMEngine):
    """An open engine under Dynamo's contract. Dynamo owns the event loop; the engine has its own thread."""

    def __init__(
        self,
        service: EngineService,
        limits: RegisteredLimits,
        events: PrefixEvents,
        settings: WorkerSettings,
        card: Path,
    ) -> None:
        """`events` watch the prefix cache of the engine, whose model card is in the directory `card`."""
        self.failure: str | None = None
        self._service = service
        self._limits = limits
        self._events = events
        self._settings = settings
        self._card = card
        self._snapshots: Any = None
        self._rooms: asyncio.Server | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        raise NotImplementedError("made by run_worker, from settings")

    async def start(self, worker_id: int) -> EngineConfig:
        if self._settings.id_file is not None:
            self._settings.id_file.write_text(f"{worker_id:x}")
        self._events.start(self._tick)
        host = self._settings.host or own_address() if self._settings.role == "prefill" else None
        self._rooms = None if host is None else await self._service.listen(host)
        return EngineConfig(
            model=str(self._card),
            served_model_name=self._settings.model_name,
            llm=LlmRegistration(
                context_length=self._limits.max_seq_len,
                kv_cache_block_size=self._limits.page_size,
                total_kv_blocks=self._limits.num_pages,
                max_num_seqs=self._limits.max_batch_size,
                max_num_batched_tokens=self._limits.max_num_tokens,
                bootstrap_host=host,
                bootstrap_port=None if self._rooms is None else port_of(self._rooms),
            ),
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        try:
            async for chunk in self._service.generate(request, context.id(), context.is_stopped):
                yield chunk
        except QueueFullError as error:
            raise HttpError(_TOO_MANY_REQUESTS, str(error)) from error
        except RequestError as error:
            raise InvalidArgument(str(error)) from error

    async def abort(self, context: Context) -> None:
        self._service.abort(context.id())

    async def cleanup(self) -> None:
        self._events.close()
        if self._rooms is not None:
            self._rooms.close()
        await asyncio.to_thread(self._service.close)

    async def is_quiescent(self) -> bool | None:
        """Blocks of a prefill worker are in files before its request ends."""
        return True

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._events.publish_to, dp_rank=0)]

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, registry_of(self._service.statistics))

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    def _tick(self) -> None:
        """Tell the router how full this worker is, and end the process of an engine that has failed for good."""
        self.failure = self._service.failure
        if self.failure is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        scheduler = self._service.statistics().scheduler
        if scheduler is not None and self._snapshots is not None:
            snapshot = ComponentSnapshot(
                kv_used_blocks=scheduler.num_pages_in_use_now,
                kv_total_blocks=scheduler.num_pages,
                gpu_cache_usage=scheduler.num_pages_in_use_now / scheduler.num_pages,
                dp_rank=0,
                kv_cache_hit_rate=scheduler.prefix_hit_fraction,
            )
            self._snapshots.publish(0, snapshot)


def run_worker(settings: WorkerSettings) -> int:
    """Serve until a signal, or until the registration has ended; returns the exit code.

    Raises:
        ConfigError, EngineDirError, CapacityError, RankError: the engine cannot be opened, or has no model card.
    """
    if settings.host is not None:
        os.environ.update(worker_environment(settings.host, os.environ))
    if settings.transfer_backend == "nixl" and IPv4Address(settings.host or own_address()).is_loopback:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # NIXL's UCX listens on all networks by default
    engine = EngineDir.open(settings.engine_dir)
    card = settings.card or shared_card(engine)
    events = PrefixEvents()
    service, limits = open_service(
        engine,
        settings.runtime,
        events,
        num_replicas=settings.num_replicas,
        role=settings.role,
        prefill_min_tokens=settings.prefill_min_tokens,
        transfer_backend=settings.transfer_backend,
        transfer_bytes=settings.transfer_bytes,
    )
    worker = DynamoEngine(service, limits, events, settings, card)
    serve(worker, worker_config(settings, card))
    return ExitCode.DONE if worker.failure is None else ExitCode.ENGINE_LOST


def serve(worker: DynamoEngine, config: WorkerConfig) -> None:
    """Run Dynamo's worker, which ends with a signal."""

    async def made(argv: list[str] | None) -> tuple[DynamoEngine, WorkerConfig]:
        return worker, config

    run(DynamoEngine, [], engine_factory=made)


def worker_config(settings: WorkerSettings, card: Path) -> WorkerConfig:
    return WorkerConfig(
        namespace=settings.namespace,
        component="prefill" if settings.role == "prefill" else settings.component,
        disaggregation_mode=_MODES[settings.role],
        model_name=str(card),
        served_model_name=settings.model_name,
        endpoint_types="chat,completions" if has_chat_template(card) else "completions",
        discovery_backend=settings.discovery_backend,
        request_plane=settings.request_plane,
        event_plane=settings.event_plane,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def run_frontend(arguments: Sequence[str]) -> int:
    """Dynamo's front end, with the arguments of its command line."""
    from dynamo.frontend.main import main

    sys.argv = ["dynamo.frontend", *arguments]
    main()
    return ExitCode.DONE
