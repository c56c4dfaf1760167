"""The model as Triton's Python backend calls it.

The only file that knows `triton_python_backend_utils`.

One instance is one process with one engine loop. `execute` hands requests over and returns; responses go out from the
service's own thread.
"""

import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from dflash_trt.core.errors import DFlashError, RequestError
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.servers.triton.environment import (
    check_gpus_of_ranks,
    check_numpy,
    explained,
    gpus_of_instance,
    select_gpus,
)
from dflash_trt.servers.triton.metrics import MetricBook, Series
from dflash_trt.servers.triton.open_request import ErrorCode
from dflash_trt.servers.triton.responses import Arrays
from dflash_trt.servers.triton.server_watch import ServerWatch, stop_server
from dflash_trt.servers.triton.service import EngineService
from dflash_trt.servers.triton.settings import ModelSettings

# Asking for a model that is not there is the one question a model can always ask its server.
_NO_MODEL = "dflash_trt_is_the_server_ready"
_NOT_READY = "Server not ready"

# The longest time for which the thread that makes text keeps the interpreter from the engine's (CPython's own: 5 ms, as
# long as a step).
_SWITCH_INTERVAL_S = 0.001


class TritonPythonModel:
    """Triton calls initialize once, execute per batch of requests, and finalize after the last answer."""

    _has_ended = False

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine; raises its errors as TritonModelException."""
        try:
            self._open(args)
        except DFlashError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            channel = _TritonChannel(request, has_batch_dimension=self._has_batch_dimension)
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            try:
                parameters, request_id = _texts(request)
            except RequestError as error:
                self._service.refuse(channel, error)
            else:
                self._service.take(arrays, parameters, request_id, channel)

    def finalize(self) -> None:
        pb_utils.Logger.log_info(f"{self._name} closes")
        self._service.close()
        self._llm.close()
        self._book.close()

    def is_ready(self) -> bool:
        """False after a failure, for servers that ask; Triton 2.51 calls a model ready whatever happens to it."""
        return self._llm.failure is None

    def _end(self, failure: str) -> None:
        """Stop the server, which restarts no model and would still call it ready; else exit with our own code."""
        if self._has_ended:  # called again until the process ends
            return
        self._has_ended = True
        pb_utils.Logger.log_error(f"{self._name} ends: {failure}")
        if not self._keeps_server and stop_server():
            pb_utils.Logger.log_error(f"{self._name} stops the server, which would call it ready")
            return
        sys.stderr.write(f"{self._name} exits with {ExitCode.ENGINE_LOST}: {failure}\n")
        sys.stderr.flush()
        os._exit(ExitCode.ENGINE_LOST)

    def _open(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        settings = ModelSettings.from_parameters(parameters)
        check_numpy(np.__version__, accepts_numpy_2=settings.accepts_numpy_2)
        gpus = gpus_of_instance(args, settings.instance_gpus)
        select_gpus(gpus)
        logging.getLogger("dflash_trt").addHandler(_ServerLog())
        self._has_batch_dimension = config["max_batch_size"] > 0
        self._name = args["model_instance_name"]
        self._keeps_server = settings.keeps_server
        try:
            self._llm = _open_llm(
                settings,
                Path(args["model_repository"]) / args["model_version"],
                gpus=gpus,
                is_on_gpu=args["model_instance_kind"] != "CPU",
            )
        except ImportError as error:
            raise explained(error) from error
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "instance": args["model_instance_name"],
        }
        self._book = MetricBook(Series(pb_utils, labels), max_draft_len=self._llm.limits.max_draft_len)
        self._service = EngineService(
            self._llm,
            settings,
            vocab_size=self._llm.engine.manifest.target.vocab_size,
            book=self._book,
            watch=ServerWatch(_is_server_ready),
            on_server_gone=lambda: os._exit(1),  # nothing ends an orphan of the server otherwise
            on_engine_failed=self._end,
        )
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.freeze()  # the loaded objects stay: no collection walks them again, not even the one at interpreter exit
        pb_utils.Logger.log_info(f"{self._name} opened engine {self._llm.engine.path}: {self._llm.page_plan}")


def _open_llm(settings: ModelSettings, version_dir: Path, *, gpus: Sequence[int], is_on_gpu: bool) -> Any:
    from dflash_trt.engine_dir import EngineDir

    path = settings.engine_path(version_dir)
    manifest = EngineDir.open(path).manifest
    check_gpus_of_ranks(gpus, manifest.pretrained_config.mapping.world_size)
    has_choice = manifest.backend == "torch"  # TensorRT runs on a GPU whatever the group says
    from dflash_trt.serving.llm import LLM

    device = "cuda" if is_on_gpu else "cpu"
    return LLM(path, settings.runtime.replaced(device=device if has_choice else "auto"))


def _texts(request: Any) -> tuple[str, str]:
    """Parameters and id. The server takes any bytes for them; the first reading of them decodes.

    Raises:
        RequestError: they are not UTF-8.
    """
    try:
        return request.parameters(), request.request_id()
    except UnicodeDecodeError as error:
        found = repr(error.object[max(0, error.start - 8) : error.end + 8])
        hint = "Send the id and the names of parameters as UTF-8."
        raise RequestError.about("request", expected="UTF-8 text", found=found, hint=hint) from None


def _is_server_ready() -> bool:
    response = pb_utils.InferenceRequest(model_name=_NO_MODEL, requested_output_names=["none"], inputs=[]).exec()
    return not (response.has_error() and _NOT_READY in response.error().message())


class _TritonChannel:
    """Implements Channel over a response sender.

    The server counts a request as running for as long as its sender exists, so it goes with the last response.
    """

    def __init__(self, request: Any, *, has_batch_dimension: bool) -> None:
        self._sender = request.get_response_sender()
        self._wanted = set(request.requested_output_names())
        self._has_batch_dimension = has_batch_dimension
        self._lock = threading.Lock()  # guards the sender

    def send(self, arrays: Arrays, *, is_last: bool) -> None:
        tensors = [
            pb_utils.Tensor(name, array[np.newaxis] if self._has_batch_dimension else array)
            for name, array in arrays.items()
            if name in self._wanted
        ]
        self._put(pb_utils.InferenceResponse(output_tensors=tensors), is_last=is_last)

    def fail(self, message: str, code: ErrorCode) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._put(pb_utils.InferenceResponse(error=error), is_last=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())

    def _put(self, response: Any, *, is_last: bool) -> None:
        with self._lock:
            if self._sender is not None:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
                self._sender = None if is_last else self._sender


class _ServerLog(logging.Handler):
    """Forwards the engine's log to the server's."""

    def emit(self, record: logging.LogRecord) -> None:
        log = pb_utils.Logger.log_error if record.levelno >= logging.ERROR else pb_utils.Logger.log_warn
        log(self.format(record))
