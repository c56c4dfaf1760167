"""What opens an engine, and what closes it: settings and policies handed on, and nothing left after a failure."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from dflash_trt.engine_dir import EngineDir
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.serving import llm as llm_module
from dflash_trt.serving import local_engine
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.llm import LLM, open_request_reader
from dflash_trt.serving.opening import checked_settings, open_engine
from dflash_trt.serving.tensorrt_llm import engine as trtllm_engine
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits, make_request
from tests.serving.engines import VOCAB_SIZE, run
from tests.serving.tokenizers import write_byte_level

_MODELS = SimpleNamespace(mapping=Mapping())
ENGINE: Any = SimpleNamespace(manifest=SimpleNamespace(backend="torch", pretrained_config=_MODELS))
FOREIGN: Any = SimpleNamespace(manifest=SimpleNamespace(backend="tensorrt_llm"))
CONFIG = RuntimeConfig(device="cpu", draft_length=4, overlap_scheduling=False)


class Executor(FakeExecutor):
    """`dies` is set by a test whose device is to be lost."""

    page_plan = "the plan"
    can_retry = False

    def __init__(self, log: list[Any]) -> None:
        super().__init__(make_limits(), vocab_size=VOCAB_SIZE)
        self.dies = False
        self._log = log

    def submit(self, plan: StepPlan) -> FinishedStep:
        if self.dies:
            raise RuntimeError("CUDA error")
        return super().submit(plan)

    def close(self) -> None:
        self._log.append(f"closed {self._log.index(self)}")
        if self.dies:
            raise RuntimeError("CUDA error")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Executors as they are opened, and notes of those that are closed."""
    log: list[Any] = []

    def open_executor(engine: Any, config: RuntimeConfig, *, draft_lens: tuple[int, ...]) -> Executor:
        log.append(Executor(log))
        log[-1].given = (engine, config, draft_lens)
        return log[-1]

    monkeypatch.setattr("dflash_trt.executor.opening.open_executor", open_executor)
    return log


@pytest.mark.parametrize(
    ("settings", "objects", "draft_lens"),
    [
        ({}, {}, (4,)),
        ({"draft_length": {1: 3, 2: 1}}, {}, (1, 3)),
        ({"adaptive_draft_length": True}, {}, AdaptiveDraftLength(4).lengths),
        ({}, {"draft_length_policy": BatchSizeDraftLength({1: 5, 2: 0})}, (0, 5)),
        ({"max_queue_len": 3}, {"scheduler_config": SchedulerConfig(max_queue_len=2)}, (4,)),
    ],
    ids=lambda options: ", ".join(options) if isinstance(options, dict) else None,
)
def test_an_executor_is_opened_for_every_draft_length(opened: list[Any], settings, objects, draft_lens) -> None:
    config = CONFIG.model_copy(update=settings)
    engine = local_engine.open_local_engine(ENGINE, config, **objects)
    ((found_engine, found_config, found_lens),) = [executor.given for executor in opened]
    assert (found_engine, found_config) == (ENGINE, config)
    assert found_lens == tuple(sorted(draft_lens))
    assert (engine.config, engine.page_plan) == (config, "the plan")
    stream = engine.submit(make_request("r", max_new_tokens=30))
    run(engine)
    longest = max(engine.statistics().scheduler.num_steps_by_draft_length)  # type: ignore[union-attr]
    assert stream.result().finish_reason == "length"
    assert longest <= max(draft_lens)
    engine.close()
    assert opened[1:] == ["closed 0"]


def test_steps_overlap_as_the_settings_say(opened: list[Any]) -> None:
    for overlaps in (False, True):
        before = set(threading.enumerate())
        engine = local_engine.open_local_engine(ENGINE, CONFIG.model_copy(update={"overlap_scheduling": overlaps}))
        stream = engine.submit(make_request("r"))
        engine.step()
        names = [thread.name.split("_")[0] for thread in set(threading.enumerate()) - before]
        assert names == ["dflash-device"] * overlaps and not stream.is_done
        engine.close()


def test_an_executor_that_is_lost_is_closed_before_one_like_it_is_opened(opened: list[Any], caplog: Any) -> None:
    engine = local_engine.open_local_engine(ENGINE, CONFIG)
    lost = engine.submit(make_request("lost"))
    opened[0].dies = True
    run(engine)
    assert lost.result().finish_reason == "error"
    first, closed, second = opened
    assert closed == "closed 0" and first.given == second.given
    stream = engine.submit(make_request("r"))
    run(engine)
    assert stream.result().finish_reason == "length"
    engine.close()
    assert opened[3:] == ["closed 2"]


def test_an_executor_without_its_engine_is_closed(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("no scheduler")

    monkeypatch.setattr(local_engine, "make_scheduler", fail)
    with pytest.raises(ValueError, match="no scheduler"):
        local_engine.open_local_engine(ENGINE, CONFIG)
    assert opened[1:] == ["closed 0"]


def test_settings_and_policies_reach_the_runtime_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def spy(name: str) -> Any:
        return lambda *arguments, **options: asked.append((name, arguments, options))

    monkeypatch.setattr(local_engine, "checked_config", spy("checked"))
    monkeypatch.setattr(local_engine, "open_local_engine", spy("opened"))
    monkeypatch.setattr(trtllm_engine, "checked_trtllm_config", spy("checked there"))
    monkeypatch.setattr(trtllm_engine, "open_trtllm_engine", spy("opened there"))
    objects: Any = {"scheduler_config": SchedulerConfig(), "draft_length_policy": AdaptiveDraftLength(3)}
    checked_settings(ENGINE, CONFIG, **objects)
    open_engine(ENGINE, CONFIG, **objects)
    checked_settings(FOREIGN, CONFIG)
    open_engine(FOREIGN, CONFIG)
    assert asked == [
        ("checked", (ENGINE, CONFIG), objects),
        ("opened", (ENGINE, CONFIG), objects),
        ("checked there", (FOREIGN, CONFIG), {}),
        ("opened there", (FOREIGN, CONFIG), {}),
    ]
    for name, value in objects.items():
        with pytest.raises(ConfigError, match=f"{name}: expected nothing for backend tensorrt_llm"):
            checked_settings(FOREIGN, CONFIG, **{name: value})


class Opening:
    """`LLM(...)` up to its engine, which is a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.is_closed = False
        target = SimpleNamespace(eos_token_ids=(5, 6))
        self.engine = SimpleNamespace(manifest=SimpleNamespace(target=target), reporting=lambda told: ("loud", told))
        self.opened = SimpleNamespace(config="resolved", page_plan="plan", close=self._close)
        monkeypatch.setattr(EngineDir, "open", lambda path: self.engine)
        monkeypatch.setattr(llm_module, "open_request_reader", lambda engine: "reader")
        monkeypatch.setattr(llm_module, "checked_settings", self._checked)
        monkeypatch.setattr(llm_module, "open_engine", self._open)

    def _close(self) -> None:
        self.is_closed = True

    def _checked(self, engine: Any, config: RuntimeConfig, **policies: Any) -> RuntimeConfig:
        self.calls.append((engine, config, policies))
        return config.replaced(device="cpu")

    def _open(self, *arguments: Any, **policies: Any) -> Any:
        self.calls.append((*arguments, policies))
        return self.opened


def test_an_llm_hands_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, made = Opening(monkeypatch), list[Any]()
    monkeypatch.setattr(Generator, "__init__", lambda self, *args, **options: made.append((args, options)))
    policies: Any = {"scheduler_config": SchedulerConfig(), "draft_length_policy": AdaptiveDraftLength(3)}
    llm = LLM("engine", RuntimeConfig(seed=3, num_threads=2), num_threads=1, **policies)
    config = RuntimeConfig(seed=3, num_threads=1)
    resolved = config.replaced(device="cpu")
    assert opening.calls == [(opening.engine, config, policies), (opening.engine, resolved, policies)]
    assert made == [((opening.opened, "reader"), {"eos_token_ids": (5, 6), "seed": 3})]
    assert (llm.config, llm.page_plan, opening.is_closed) == ("resolved", "plan", False)
    opening.calls.clear()
    told: Any = print
    LLM("engine", on_progress=told)
    assert opening.calls[1][0] == ("loud", told)


def test_an_llm_that_is_not_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening(monkeypatch)

    def refuse(reader: Any) -> None:
        raise RequestError(f"no {reader}")

    with pytest.raises(RequestError, match="no reader"):
        LLM("engine", before_load=refuse)
    assert len(opening.calls) == 1  # it is not opened

    def fail(self: Any, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(Generator, "__init__", fail)
    with pytest.raises(RuntimeError, match="no thread"):
        LLM("engine")
    assert opening.is_closed


def test_a_reader_takes_what_its_engine_does(tmp_path: Path) -> None:
    manifest = SimpleNamespace(
        build_config=SimpleNamespace(max_seq_len=9),
        target=SimpleNamespace(vocab_size=12),
        chat_template_options={"shout": True},
    )
    bare: Any = SimpleNamespace(manifest=manifest, tokenizer_path=None)
    reader = open_request_reader(bare)
    assert reader.codec is None
    assert reader.read([11] * 8).prompt_token_ids == (11,) * 8
    for prompt, found in (([11] * 9, "at most 8 tokens"), ([12], "from 0 to 11")):
        with pytest.raises(RequestError, match=found):
            reader.read(prompt)
    engine: Any = SimpleNamespace(manifest=manifest, tokenizer_path=write_byte_level(tmp_path))
    codec = open_request_reader(engine).codec
    assert codec is not None and codec.chat_template_options == {"shout": True}
