"""A long chained run on a GPU: each step is submitted before the results of the one before it are read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash_trt import SamplingParams
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.staging import InputStaging
from dflash_trt.core.step_plan import StepHandle, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import build
from tests.factories import make_target, make_zlab_drafter
from tests.gpu.test_families_gpu import opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: a device with a queue"),
]

NUM_STEPS = 500
NUM_REQUESTS = 32
VOCAB_SIZE = 12
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    root = tmp_path_factory.mktemp("pair")
    sizes = {"vocab_size": VOCAB_SIZE, "tokenizer": False, "num_hidden_layers": 1}
    target = make_target(root / "target", **sizes, **FEW_HEADS)
    make_zlab_drafter(
        root / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0,), head_dim=16, seed=4, **FEW_HEADS
    )
    return build(root, tp_size=1, max_batch_size=2, max_num_tokens=16)


def requests(count: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts of one to 14 tokens, some of which begin alike; half of them sampled."""
    for i in range(count):
        sampled = {"temperature": 1.2, "top_p": 0.95, "seed": i} if i % 2 else {}
        prompt = [(5 * j * j + j + i // 3) % VOCAB_SIZE for j in range(1 + 5 * i % 14)]
        yield prompt, SamplingParams(max_new_tokens=40 - i % 7, ignore_eos=True, **sampled)


class Chain:
    """Counts submitted steps, and those whose forerunner has not been read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_steps = self.num_chained = self.num_unread = 0
        submit = TorchGpuExecutor.submit

        def watch(executor: TorchGpuExecutor, plan: StepPlan) -> StepHandle:
            self.num_steps += 1
            self.num_chained += self.num_unread > 0
            self.num_unread += 1
            handle = submit(executor, plan)
            read = handle.result

            def result() -> StepResult:
                self.num_unread -= 1
                return read()

            handle.result = result
            return handle

        monkeypatch.setattr(TorchGpuExecutor, "submit", watch)


def generate(engine: EngineDir, count: int, **options: Any) -> list[tuple[int, ...]]:
    """K is 3 for a request alone, and 2 for two."""
    with opened(engine, draft_length={1: 3, 2: 2}, **options) as llm:
        outputs = llm.generate(*map(list, zip(*requests(count), strict=True)))
        llm.check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.timeout(600)
def test_a_long_chain_has_the_tokens_of_a_cpu(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(monkeypatch)
    found, expected = (generate(engine, NUM_REQUESTS, device=device) for device in ("cuda", "cpu"))
    assert found == expected
    assert chain.num_steps >= NUM_STEPS and chain.num_chained > 0.9 * chain.num_steps and not chain.num_unread


def test_inputs_that_come_too_late_are_noticed(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: plans are copied on a stream that no step waits for."""
    expected = generate(engine, 2, device="cpu")
    side, upload = torch.cuda.Stream(), InputStaging.upload

    def upload_late(staging: InputStaging) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**7)  # a GPU may do at once what it may do later
            upload(staging)

    monkeypatch.setattr(InputStaging, "upload", upload_late)
    assert generate(engine, 2, device="cuda") != expected
