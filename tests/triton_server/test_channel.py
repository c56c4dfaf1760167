"""What Triton gets of a response, and what an opened model is made of; Triton's module is a stand-in."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_trt.servers.triton.metrics import METRICS
from dflash_trt.servers.triton.settings import ModelSettings


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.has_left = False

    def send(self, response: Any, *, flags: int) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return self.has_left


class Request:
    def __init__(self, *wanted: str) -> None:
        self.sender = Sender()
        self._wanted = wanted

    def get_response_sender(self) -> Sender:
        return self.sender

    def requested_output_names(self) -> tuple[str, ...]:
        return self._wanted


class Family:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, **options: Any) -> None: ...

    def Metric(self, *, labels: dict[str, str], buckets: Any = None) -> Any:  # noqa: N802 - Triton's name
        LABELS.append(labels)
        return SimpleNamespace(increment=int, set=int, observe=int)


LABELS: list[dict[str, str]] = []
FINAL = 7


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType("triton_python_backend_utils")
    module.TritonModelException = type("TritonModelException", (Exception,), {})
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.Tensor = lambda name, array: (name, array.tolist())
    module.InferenceResponse = lambda output_tensors=(), error=None: error or dict(output_tensors)
    module.TritonError = lambda message, code: (message, code)
    module.TritonError.UNAVAILABLE = 14
    module.MetricFamily = Family
    module.said = []
    module.Logger = SimpleNamespace(
        log_info=lambda text: module.said.append(("info", text)),
        log_warn=lambda text: module.said.append(("warning", text)),
        log_error=lambda text: module.said.append(("error", text)),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.delitem(sys.modules, "dflash_trt.servers.triton.model", raising=False)
    log = logging.getLogger("dflash_trt")
    handlers, interval = list(log.handlers), sys.getswitchinterval()
    yield module
    log.handlers[:] = handlers
    sys.setswitchinterval(interval)
    sys.modules.pop("dflash_trt.servers.triton.model", None)


@pytest.fixture
def model(pb_utils: Any) -> Any:
    import importlib

    return importlib.import_module("dflash_trt.servers.triton.model")


@pytest.mark.parametrize("has_batch_dimension", [False, True])
def test_a_response_has_the_outputs_that_are_wanted_and_the_last_one_says_so(model: Any, has_batch_dimension) -> None:
    request = Request("output_ids", "finish_reason")
    channel = model._TritonChannel(request, has_batch_dimension=has_batch_dimension)
    arrays = {"output_ids": np.array([1, 2]), "sequence_index": np.array([0])}
    channel.send(arrays, is_last=False)
    channel.send(arrays | {"finish_reason": np.array(["stop"])}, is_last=True)
    channel.send(arrays, is_last=True)  # nothing comes after the last one
    ids, reason = ([[1, 2]], [["stop"]]) if has_batch_dimension else ([1, 2], ["stop"])
    assert request.sender.sent == [({"output_ids": ids}, 0), ({"output_ids": ids, "finish_reason": reason}, FINAL)]


def test_an_error_is_the_last_response_and_has_its_code(model: Any) -> None:
    request = Request()
    channel = model._TritonChannel(request, has_batch_dimension=False)
    channel.fail("come back", "UNAVAILABLE")
    channel.fail("again", "UNAVAILABLE")
    assert request.sender.sent == [(("come back", 14), FINAL)]


def test_a_client_has_left_until_it_has_its_last_response(model: Any) -> None:
    request = Request()
    channel = model._TritonChannel(request, has_batch_dimension=False)
    assert not channel.is_cancelled()
    request.sender.has_left = True
    assert channel.is_cancelled()
    channel.send({}, is_last=True)
    assert not channel.is_cancelled()


def test_the_log_of_the_engine_goes_to_the_servers(model: Any, pb_utils: Any) -> None:
    log = logging.Logger("test")
    log.addHandler(model._ServerLog())
    log.warning("slow %d", 3)
    log.error("lost")
    assert pb_utils.said == [("warning", "slow 3"), ("error", "lost")]


class Part:
    """A thing that is made with options and closed in turn."""

    closed: list[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options

    def close(self) -> None:
        self.closed.append(type(self).__name__)


@pytest.mark.parametrize(("kind", "is_on_gpu"), [("KIND_CPU", False), ("KIND_GPU", True), ("KIND_MODEL", True)])
def test_an_opened_model_is_wired_to_its_engine_its_server_and_its_metrics(
    model: Any, pb_utils: Any, monkeypatch: pytest.MonkeyPatch, kind: str, is_on_gpu: bool
) -> None:
    llm = type("Engine", (Part,), {"closed": (closed := [])})()
    llm.limits, llm.page_plan, llm.failure = SimpleNamespace(max_draft_len=2), "64 pages", None
    manifest = SimpleNamespace(target=SimpleNamespace(vocab_size=272))
    llm.engine = SimpleNamespace(path="/engine", manifest=manifest)
    asked: list[Any] = []
    selected: list[Any] = []
    monkeypatch.setattr(model, "select_gpus", selected.append)
    monkeypatch.setattr(model, "_open_llm", lambda *words, **options: asked.append((words, options)) or llm)
    monkeypatch.setattr(model, "EngineService", type("Service", (Part,), {"closed": closed}))
    monkeypatch.setattr(model.os, "_exit", asked.append)
    settings = ModelSettings(engine_dir="/engine", accepts_numpy_2=True, keeps_server=True, gpu_device_ids="3,4")
    parameters = {name: {"string_value": text} for name, text in settings.parameters().items()}
    LABELS.clear()
    made = model.TritonPythonModel()
    made.initialize({
        "model_config": json.dumps({"parameters": parameters, "max_batch_size": 1}),
        "model_instance_kind": kind.removeprefix("KIND_"),
        "model_instance_device_id": "5",
        "model_repository": "/models/dflash",
        "model_version": "1",
        "model_name": "dflash",
        "model_instance_name": "dflash_0_0",
    })  # fmt: skip
    gpus = {"KIND_CPU": (), "KIND_GPU": (5,), "KIND_MODEL": (3, 4)}[kind]
    assert selected == [gpus]
    assert asked == [((settings, Path("/models/dflash/1")), {"gpus": gpus, "is_on_gpu": is_on_gpu})]
    assert made._has_batch_dimension
    labels = {"model": "dflash", "version": "1", "instance": "dflash_0_0"}
    assert len(LABELS) > len(METRICS) and all(labels.items() <= found.items() for found in LABELS)
    assert {found["position"] for found in LABELS if "position" in found} == {"1", "2"}
    service = made._service
    assert service.arguments == (llm, settings)
    options = dict(service.options)
    assert (options.pop("vocab_size"), options.pop("book")) == (272, made._book)
    options.pop("on_server_gone")()
    assert asked[-1] == 1
    assert options.pop("on_engine_failed") == made._end
    answers = {"Server not ready": False, "unknown model": True, "": True}
    for words, is_ready in answers.items():
        error = SimpleNamespace(message=lambda words=words: words)
        response = SimpleNamespace(has_error=lambda words=words: bool(words), error=lambda error=error: error)
        pb_utils.InferenceRequest = lambda response=response, **options: SimpleNamespace(exec=lambda: response)
        assert options["watch"]._is_ready() == is_ready
    assert options.keys() == {"watch"}
    assert pb_utils.said[-1] == ("info", "dflash_0_0 opened engine /engine: 64 pages")
    assert made.is_ready()
    llm.failure = "lost"
    assert not made.is_ready()
    monkeypatch.setattr(made._book, "close", lambda: closed.append("Book"))
    made.finalize()
    assert closed == ["Service", "Engine", "Book"]
