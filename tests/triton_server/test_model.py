"""The model as Triton calls it, without Triton: every option of `deploy triton` arrives in config, engine and service.

The tests compare all arguments, and fail for an option or a setting that they do not set.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_trt.cli.deploy import deploy
from dflash_trt.core.runtime_config import NODES, RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.triton.pbtxt import Message, read
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.serving.llm import LLM
from tests.cli.calls import RecordedError, Recorder, options_never_set
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.cli.test_options_arrive import LLM_DEFAULTS, runtime_cases

RUNTIME = runtime_cases("device", *NODES)  # which the instance group says, and the server's machine
(ALL, CONFIG), *OTHERS = RUNTIME
DRAFTING = [*ALL]
DRAFTING += ["--default-max-new-tokens", "11", "--chat", "--system", "Be brief.", "--drain-timeout", "2.5"]
DRAFTING += [
    "--keep-server",
    "--accept-parameter",
    "a",
    "--accept-parameter",
    "b",
    "--accept-numpy-2",
    "--model-name",
    "other",
]
DRAFTING += ["--environment", sys.prefix, "--copy-engine", "--instances", "2", "--batch-dimension"]
ON_GPUS = ["--no-drafter", "--gpus", "3,1", "--accept-numpy-2"]

SETTINGS = ModelSettings(
    engine_dir="engine",
    runtime=CONFIG,
    default_max_tokens=11,
    wraps_in_chat=True,
    system="Be brief.",
    drain_timeout_s=2.5,
    accepted_request_parameters=("a", "b"),
    accepts_numpy_2=True,
    keeps_server=True,
)


@pytest.fixture
def pb_utils(monkeypatch) -> Iterator[ModuleType]:
    module = ModuleType("triton_python_backend_utils")
    module.TritonModelException = type("TritonModelException", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.delitem(sys.modules, "dflash_trt.servers.triton.model", raising=False)
    log = logging.getLogger("dflash_trt")
    handlers = list(log.handlers)
    yield module
    log.handlers[:] = handlers  # the model's own writes to a server's log


@pytest.fixture
def model(pb_utils) -> Iterator[Any]:
    from dflash_trt.servers.triton.model import TritonPythonModel

    yield TritonPythonModel()
    del sys.modules["dflash_trt.servers.triton.model"]


def written(model_dir: Path) -> Message:
    return read((model_dir / "config.pbtxt").read_text(), subject="config.pbtxt")


def parameters_of(config: Message) -> dict[str, str]:
    entries = [entry for entry in config.all("parameters") if isinstance(entry, Message)]
    values = {str(entry.one("key")): entry.one("value") for entry in entries}
    return {name: str(value.one("string_value")) for name, value in values.items() if isinstance(value, Message)}


def instances_of(config: Message) -> list[tuple[str, object]]:
    group = config.one("instance_group")
    assert isinstance(group, Message)
    return group.fields


def load(model: Any, pb_utils: Any, model_dir: Path, *, kind: str, device_id: str, monkeypatch: Any) -> dict[str, Any]:
    """What LLM is asked for when the server loads the model on an instance."""
    opening = Recorder(LLM)
    monkeypatch.setattr("dflash_trt.serving.llm.LLM", opening)
    config = written(model_dir)
    parameters = {name: {"string_value": text} for name, text in parameters_of(config).items()}
    args = {
        "model_config": json.dumps({"parameters": parameters, "max_batch_size": config.one("max_batch_size")}),
        "model_instance_kind": kind,
        "model_instance_device_id": device_id,
        "model_repository": str(model_dir),
        "model_version": "1",
        "model_name": model_dir.name,
        "model_instance_name": f"{model_dir.name}_0_0",
    }
    with pytest.raises(pb_utils.TritonModelException, match="recorded"):
        model.initialize(args)
    return opening.arguments


def test_every_option_reaches_the_config_and_the_engine(
    engine_dir,
    tmp_path,
    invoke,  # noqa: F811
    model,
    pb_utils,
    monkeypatch,
) -> None:
    result = invoke("deploy", "triton", engine_dir, "-o", tmp_path, *DRAFTING)
    assert result.exit_code == 0, result.stderr
    config = written(tmp_path / "other")
    parameters = parameters_of(config)
    assert parameters.pop("EXECUTION_ENV_PATH") == str(Path(sys.prefix).resolve())
    assert ModelSettings.from_parameters(parameters) == SETTINGS
    assert config.one("max_batch_size") == 1
    assert instances_of(config) == [("count", 2), ("kind", "KIND_CPU")]
    said: list[tuple[str, str]] = []
    logger = {name: partial(lambda name, text: said.append((name, text)), name) for name in ("log_error", "log_warn")}
    pb_utils.Logger = SimpleNamespace(**logger)
    asked = load(model, pb_utils, tmp_path / "other", kind="CPU", device_id="0", monkeypatch=monkeypatch)
    log = logging.getLogger("dflash_trt.a_part_of_it")
    log.error("broken")
    log.warning("odd")
    assert said == [("log_error", "broken"), ("log_warn", "odd")]
    engine = tmp_path / "other" / "1" / "engine"
    assert asked == LLM_DEFAULTS | {"engine_dir": engine, "config": CONFIG.replaced(device="cpu")}


@pytest.mark.parametrize(("words", "config"), RUNTIME)
def test_every_setting_of_an_engine_is_a_parameter_of_its_own_name(
    engine_dir,
    tmp_path,
    invoke,  # noqa: F811
    words,
    config,
) -> None:
    assert invoke("deploy", "triton", engine_dir, "-o", tmp_path, *words).exit_code == 0
    parameters = parameters_of(written(tmp_path / "dflash"))
    default = RuntimeConfig()
    changed = {name for name, value in config if value != getattr(default, name)}
    assert parameters.keys() == changed | {"engine_dir"}
    assert ModelSettings.from_parameters(parameters).runtime == config


def test_an_instance_on_a_gpu_runs_there_and_sees_no_other(
    engine_dir,
    tmp_path,
    invoke,  # noqa: F811
    model,
    pb_utils,
    monkeypatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    result = invoke("deploy", "triton", engine_dir, "-o", tmp_path, *ON_GPUS)
    assert result.exit_code == 0, result.stderr
    assert "CUDA_VISIBLE_DEVICES: GPUs 3, 1 are counted among those it lists" in result.stdout
    assert "first python3 on the server's PATH" in result.stdout
    config = written(tmp_path / "dflash")
    assert parameters_of(config) == {"engine_dir": str(engine_dir), "use_drafter": "false", "accepts_numpy_2": "true"}
    assert config.one("max_batch_size") == 0
    assert instances_of(config) == [("count", 1), ("kind", "KIND_GPU"), ("gpus", [3, 1])]
    asked = load(model, pb_utils, tmp_path / "dflash", kind="GPU", device_id="3", monkeypatch=monkeypatch)
    assert asked == LLM_DEFAULTS | {"engine_dir": engine_dir, "config": RuntimeConfig(use_drafter=False, device="cuda")}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"


@pytest.mark.parametrize(
    ("backend", "is_on_gpu", "device"),
    [("torch", True, "cuda"), ("torch", False, "cpu"), ("tensorrt", True, "auto"), ("tensorrt_llm", True, "auto")],
)
def test_only_an_engine_that_has_the_choice_is_told_its_device(model, monkeypatch, backend, is_on_gpu, device) -> None:
    from dflash_trt.servers.triton.model import _open_llm

    mapping = SimpleNamespace(mapping=SimpleNamespace(world_size=1))
    manifest = SimpleNamespace(backend=backend, pretrained_config=mapping)
    monkeypatch.setattr(EngineDir, "open", lambda path: SimpleNamespace(manifest=manifest))
    opening = Recorder(LLM)
    monkeypatch.setattr("dflash_trt.serving.llm.LLM", opening)
    settings = ModelSettings(engine_dir="/engine", runtime=RuntimeConfig(seed=4))
    with pytest.raises(RecordedError):
        _open_llm(settings, Path("version"), gpus=(0,), is_on_gpu=is_on_gpu)
    assert opening.arguments["config"] == RuntimeConfig(seed=4, device=device)


def test_no_option_and_no_setting_is_left_out_here() -> None:
    minimal = ["dir", "-o", "out"]
    cases = [[*minimal, *words] for words in (DRAFTING, ON_GPUS, *(words for words, _ in OTHERS))]
    never_set = options_never_set(deploy.commands["triton"], minimal, *cases)
    assert never_set == {"engine_dir", "repository", "check_only", "llmapi"}  # of test_deploy_tensorrt_llm.py
    default = ModelSettings(engine_dir="")
    alike = {field.name for field in fields(default) if getattr(SETTINGS, field.name) == getattr(default, field.name)}
    assert alike == {"gpu_device_ids"}, "of engines of several ranks alone: see test_repository.py"


class FailedLLM:
    failure = "the device is lost"


@pytest.mark.parametrize(
    ("keeps_server", "is_own_server", "exits"), [(False, True, []), (False, False, [70]), (True, True, [70])]
)
def test_a_failed_engine_stops_its_server_once_or_ends_the_process(
    model, pb_utils, monkeypatch, capsys, keeps_server, is_own_server, exits
) -> None:
    said: list[str] = []
    found: list[int] = []
    stops: list[bool] = []
    pb_utils.Logger = SimpleNamespace(log_error=said.append)
    monkeypatch.setattr("dflash_trt.servers.triton.model.stop_server", lambda: stops.append(True) or is_own_server)
    monkeypatch.setattr(os, "_exit", found.append)
    model._llm, model._name, model._has_ended, model._keeps_server = FailedLLM(), "dflash_0_0", False, keeps_server
    assert not model.is_ready()
    for _ in range(2):
        model._end("the device is lost")
    assert found == exits
    assert stops == [True] * (not keeps_server)
    assert said[0] == "dflash_0_0 ends: the device is lost"
    assert ("exits with 70: the device is lost" in capsys.readouterr().err) == bool(exits)


def test_a_model_closes_its_service_before_its_engine_and_the_metrics_after_both(model, pb_utils) -> None:
    closed: list[str] = []
    pb_utils.Logger = SimpleNamespace(log_info=closed.append)
    model._name = "dflash_0_0"
    for name in ("_service", "_llm", "_book"):
        setattr(model, name, SimpleNamespace(close=partial(closed.append, name)))
    model.finalize()
    assert closed == ["dflash_0_0 closes", "_service", "_llm", "_book"]


class Request:
    """A request of Triton's whose id or parameters are no UTF-8."""

    def __init__(self, *, parameters: bytes = b"", request_id: bytes = b"") -> None:
        self._parameters = parameters
        self._request_id = request_id

    def get_response_sender(self) -> object:
        return object()

    def requested_output_names(self) -> list[str]:
        return []

    def inputs(self) -> list[Any]:
        return []

    def parameters(self) -> str:
        return self._parameters.decode()

    def request_id(self) -> str:
        return self._request_id.decode()


class Service:
    """Remembers what became of each request."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def take(self, arrays: object, parameters: str, client_id: str, channel: object) -> None:
        self.found.append(client_id)

    def refuse(self, channel: object, error: Exception) -> None:
        self.found.append(str(error))


def test_a_request_that_is_no_text_leaves_the_others_of_its_batch_alone(model) -> None:
    model._service, model._has_batch_dimension = service, _ = Service(), False
    model.execute(
        [
            Request(request_id=b"a"),
            Request(request_id=b"b\xff"),
            Request(parameters=b'{"\xed\xa0\x80": 1}'),
            Request(request_id=b"c"),
        ]
    )
    first, second, third, fourth = service.found
    assert (first, fourth) == ("a", "c")
    assert second.startswith(r"request: expected UTF-8 text, found b'b\xff'")
    assert "request: expected UTF-8 text" in third
