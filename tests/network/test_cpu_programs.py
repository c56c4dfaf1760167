"""Recorded steps on a CPU: they give what the same steps give when each of their calls is made anew."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.native import programs
from dflash_trt.backends.torch.native.build import has_bfloat16_tiles
from dflash_trt.backends.torch.native.library import Add, CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.programs import Programs
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter

if isinstance(FOUND := cpu_kernels(), NoKernels):
    pytest.skip(f"no CPU kernels: {FOUND.reason}", allow_module_level=True)
KERNELS: CpuKernels = FOUND
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 2], [9] * 21, [5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    # In bfloat16, whose weights the kernels compute with.
    target = make_target(root / "target", vocab_size=12, head_dim=32, tokenizer=False, dtype=torch.bfloat16)
    return target, make_zlab_drafter(
        root / "drafter", target_dir=target, block_size=6, dtype=torch.bfloat16, head_dim=32
    )


def outputs_of(executor: TorchExecutor, draft_lens: dict[int, int], **sampling: Any) -> list[GenerationOutput]:
    """All prompts at once: the batch shrinks as they end, and pages are added as they grow."""
    loop = EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(), BatchSizeDraftLength(draft_lens)))
    streams = [
        loop.submit(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_new_tokens=20 + 9 * index, ignore_eos=True, **sampling),
            )
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    while loop.step():
        pass
    return [stream.result(timeout_s=1) for stream in streams]


def tokens_of(outputs: list[GenerationOutput]) -> list[Any]:
    return [(output.token_ids, [step.num_accepted for step in output.steps], output.error) for output in outputs]


class Counted(Programs):
    """Counts steps that a program repeats, and refuses to have any where `is_off`."""

    is_off = False
    num_replayed = 0

    def run(self, key: Any, compute: Callable[[], Any]) -> Any:
        type(self).num_replayed += key in self._programs
        return compute() if self.is_off else super().run(key, compute)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr("dflash_trt.backends.torch.executor.Programs", Counted)
    monkeypatch.setattr(Counted, "num_replayed", 0)
    return Counted


@pytest.mark.parametrize("draft_lens", [{1: 0}, {1: 3}, {1: 5, 2: 0, 3: 2}], ids=str)
@pytest.mark.parametrize("has_drafter", [False, True], ids=["target", "pair"])
def test_recorded_steps_give_the_tokens_of_others(
    counted: type[Counted],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    draft_lens: dict[int, int],
    has_drafter: bool,
) -> None:
    target, drafter = pair
    lens = draft_lens if has_drafter else {1: 0}
    found = outputs_of(make_executor(target, drafter if has_drafter else None), lens)
    assert counted.num_replayed > 20
    monkeypatch.setattr(Counted, "is_off", True)
    expected = outputs_of(make_executor(target, drafter if has_drafter else None), lens)
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_confidence", [False, True])
def test_greedy_steps_are_recorded_as_wholes(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], has_confidence: bool, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and has_bfloat16_tiles():
        pytest.skip("bfloat16 engines are oneDNN's on this CPU")
    made: list[Programs] = []
    create = Programs.__init__
    monkeypatch.setattr(Programs, "__init__", lambda self, kernels: (create(self, kernels), made.append(self))[0])
    outputs_of(make_executor(*pair, has_confidence=has_confidence, dtype=dtype), {1: 3})
    [some] = made
    assert not some._unrecordable and "step" in {key[0] for key in some._programs}  # type: ignore[index]


def test_steps_are_recorded_as_wholes_after_other_texts_have_ended(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """The last step of a text has no drafts, and leaves taps that no request asks for."""
    wholes: list[str] = []
    run = Programs.run
    monkeypatch.setattr(Programs, "run", lambda self, key, compute: (wholes.append(key[0]), run(self, key, compute))[1])
    executor = make_executor(*pair, max_batch_size=4, max_num_tokens=64, max_seq_len=1024)
    first = outputs_of(executor, {1: 3})
    assert executor._context is not None and executor._context._log
    wholes.clear()
    again = outputs_of(executor, {1: 3})
    assert tokens_of(again) == tokens_of(first)
    num_steps = max(len(output.steps) for output in again)
    # But the first, of prompts; the next, for taps of an earlier owner of its page; and the last.
    assert wholes.count("step") >= num_steps - 3 > 15


@pytest.mark.skipif(has_bfloat16_tiles(), reason="bfloat16 engines are oneDNN's on this CPU")
def test_texts_of_a_bfloat16_engine_depend_neither_on_drafts_nor_on_the_batch(pair: tuple[Path, Path]) -> None:
    executors = [make_executor(*pair, dtype=torch.bfloat16, max_batch_size=size) for size in (8, 8, 1)]
    assert executors[0]._state.target_kv[0].tensor.dtype == torch.bfloat16
    found = [
        outputs_of(executor, {1: num_drafts}, logprobs=True)
        for executor, num_drafts in zip(executors, (0, 3, 5), strict=True)
    ]
    assert found[0][0].logprobs
    for others in found[1:]:
        assert [(x.token_ids, x.logprobs) for x in others] == [(x.token_ids, x.logprobs) for x in found[0]]


@pytest.mark.skipif(has_bfloat16_tiles(), reason="bfloat16 engines are oneDNN's on this CPU")
def test_a_bfloat16_engine_is_closer_to_float32_than_pytorchs(pair: tuple[Path, Path]) -> None:
    def logits(**options: Any) -> Tensor:
        return make_executor(*pair, **options).target_logits(PROMPTS[2] + PROMPTS[3]).float()

    exact = logits()  # of the same weights
    kernels, pytorch = (
        (logits(dtype=torch.bfloat16, has_kernels=has_kernels) - exact).abs().mean().item()
        for has_kernels in (True, False)
    )
    assert 0 < kernels < 0.7 * pytorch  # measured 0.61


def test_a_program_that_is_not_repeated_is_noticed(
    counted: type[Counted], monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """The negative control."""
    expected = outputs_of(make_executor(*pair), {1: 3})
    monkeypatch.setattr(CpuKernels, "run", lambda *arguments: None)
    assert tokens_of(outputs_of(make_executor(*pair), {1: 3})) != tokens_of(expected)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8},
        {"repetition_penalty": 1.2},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_of_steps_that_pytorch_samples_the_target_is_recorded(
    counted: type[Counted],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    num_drafts: int,
    sampling: dict[str, Any],
) -> None:
    sampling = {"seed": 7} | sampling
    found = outputs_of(make_executor(*pair), {1: num_drafts}, **sampling)
    assert counted.num_replayed > 20
    monkeypatch.setattr(Counted, "is_off", True)
    expected = outputs_of(make_executor(*pair), {1: num_drafts}, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    assert [output.logprobs for output in found] == [output.logprobs for output in expected]


def repeated(
    compute: Callable[[], Tensor], change: Callable[[], object], times: int = 3
) -> tuple[list[Tensor], Programs]:
    some, results = Programs(KERNELS), []
    for _ in range(times):
        results.append(some.run("key", compute).clone())
        change()
    return results, some


def added(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.shape)
    KERNELS.call(Add(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr()))
    return out


@torch.inference_mode()
def test_a_program_reads_its_inputs_anew_and_keeps_its_memory() -> None:
    x = torch.ones(5, 8)
    results, some = repeated(lambda: added(added(added(x, x), x).view(8, 5), x.view(8, 5)), lambda: x.mul_(2))
    assert [result.unique().tolist() for result in results] == [[4], [8], [16]]
    [program] = some._programs.values()
    assert len(program.arguments) == 3
    assert len(program.memory.blocks) == 2  # the first sum's serves the last one, too


@torch.inference_mode()
def test_of_memory_that_is_free_the_smallest_serves_that_is_large_enough() -> None:
    memory = programs.Memory()
    with memory:
        large, small = torch.empty(100), torch.empty(10)
        del large, small
        kept = [torch.empty(size) for size in (10, 100)]
    assert len(memory.blocks) == len(kept) == 2


@torch.inference_mode()
def test_what_pytorch_computes_is_never_recorded() -> None:
    x = torch.ones(5, 8)
    for compute in (
        lambda: added(x, x) * 2,
        lambda: added(x, x).mul_(2),
        lambda: added(x.t().contiguous(), x.t().contiguous()),
        lambda: added(x, torch.full((5, 8), x.sum().item())),
    ):
        expected = compute().clone()
        results, some = repeated(compute, lambda: None)
        assert not some._programs and all(torch.equal(result, expected) for result in results)
    computed: list[int] = []
    repeated(lambda: added(x, x) * (computed.append(1) or 2), lambda: None, times=5)
    assert len(computed) == 6, "the second time also in vain, to be recorded, and not again"


@torch.inference_mode()
def test_a_part_is_recorded_alone_where_the_whole_cannot_be() -> None:
    x, some = torch.ones(5, 8), Programs(KERNELS)

    def part() -> Tensor:
        return some.run("part", lambda: added(x, x))

    for _ in range(3):
        assert torch.equal(some.run("whole", lambda: added(part(), x)), 3 * x)
        assert torch.equal(some.run("with PyTorch", lambda: part() * 2), 4 * x)
    assert set(some._programs) == {"whole", "part"}


@torch.inference_mode()
def test_programs_that_take_too_much_memory_give_way_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(64)
    monkeypatch.setattr(programs, "_MAX_BYTES", 2 * (64 * 4 + 64))
    some = Programs(KERNELS)
    for key in (1, 1, 2, 2, 1, 3, 3, 2):
        assert torch.equal(some.run(key, lambda: added(x, x)), 2 * x)
    assert list(some._programs) == [3, 2]


def test_recording_imports_no_compiler() -> None:
    """PyTorch's takes a second, in the middle of the first text."""
    code = (
        "import sys, torch\n"
        "from dflash_trt.backends.torch.native.programs import Memory\n"
        "with Memory(): torch.empty(3)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
