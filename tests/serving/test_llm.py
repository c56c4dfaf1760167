"""A real engine, tiny: what comes out depends on the request alone, however the engine serves it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.serving.llm import LLM
from tests.factories import make_target, make_zlab_drafter

SYSTEM = "You are a tiny model. "
PROMPTS = [SYSTEM + text for text in ("Hello.", "What is 2 + 2?", "é", "def f(x):\n    return", "Hello.", "12345" * 8)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=20 + 4 * i, temperature=0.0 if i % 2 else 0.8, seed=i, ignore_eos=i != 2)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    make_zlab_drafter(path / "drafter", target_dir=make_target(path / "target"))
    config = BuildConfig(
        target="target", drafter="drafter", dtype="float32", max_seq_len=160, max_batch_size=4, page_size=8,
        max_num_tokens=64,
    )  # fmt: skip
    output = path / "engine"
    build_engine(config, output, base_dir=path, overwrite=False, command=["test"], progress=lambda _: None)
    return output


@pytest.fixture(scope="module")
def alone(engine_dir: Path) -> list[GenerationOutput]:
    """Each request by itself, nothing reused, nothing drafted."""
    with LLM(engine_dir, use_drafter=False, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir) as llm:
        yield llm


def assert_same(outputs: list[GenerationOutput], others: list[GenerationOutput]) -> None:
    for output, other in zip(outputs, others, strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )


def test_an_engine_says_what_it_is(llm: LLM, engine_dir: Path) -> None:
    assert repr(llm) == f"<LLM {engine_dir}: qwen3, dflash drafter, on cpu>"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_scheduling": True},
        {"use_drafter": False},
        {"draft_length": 0},
        {"draft_length": 1, "overlap_scheduling": True},
        {"draft_length": {1: 3, 2: 1, 3: 2}},
        {"draft_length_policy": BatchSizeDraftLength({1: 3, 2: 0, 3: 2})},
        {"draft_length_policy": AdaptiveDraftLength(3)},
        {"scheduler_config": SchedulerConfig(max_prefill_tokens=3)},
        {"scheduler_config": SchedulerConfig(enable_prefix_caching=False)},
    ],
    ids=lambda options: ", ".join(options) or "as it comes",
)
def test_tokens_do_not_depend_on_how_they_are_served(
    engine_dir: Path, alone: list[GenerationOutput], options: dict[str, Any]
) -> None:
    with LLM(engine_dir, **options) as llm:
        assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)
        assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)  # now with prefix hits
        llm.check_integrity()
        hits = llm.statistics.scheduler.num_prefix_hit_tokens
        assert (hits > 0) == (options.get("scheduler_config") != SchedulerConfig(enable_prefix_caching=False))


@pytest.mark.parametrize("overlaps", [False, True])
def test_preempted_requests_give_the_same_tokens(engine_dir: Path, overlaps: bool) -> None:
    samplings = [replace(sampling, max_new_tokens=90, ignore_eos=True) for sampling in SAMPLINGS[:4]]
    with LLM(engine_dir) as llm:
        wanted = llm.generate(PROMPTS[:4], samplings)
        bytes_per_page = llm.page_plan.total_bytes // llm.page_plan.num_pages
    with LLM(engine_dir, overlap_scheduling=overlaps, kv_cache_bytes=21 * bytes_per_page) as llm:
        assert llm.limits.num_pages == 21, "room for one and a half of the four requests"
        assert_same(llm.generate(PROMPTS[:4], samplings), wanted)
        assert llm.statistics.scheduler.num_preemptions > 0


def test_acceptance_after_a_prefix_hit_equals_acceptance_without(engine_dir: Path) -> None:
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompt = list(range(4, 100))
    with LLM(engine_dir, draft_length=3) as llm:
        first, second = (llm.generate([prompt], sampling)[0] for _ in range(2))
    assert (first.statistics.num_prefix_hit_tokens, second.statistics.num_prefix_hit_tokens) == (0, 88)
    verified = [
        [(step.num_candidates, step.num_accepted) for step in output.steps if step.num_candidates]
        for output in (first, second)
    ]
    assert verified[0] == verified[1]


def test_a_stream_joins_to_the_output(llm: LLM) -> None:
    sampling = SamplingParams(max_new_tokens=40, seed=3, temperature=1.0, ignore_eos=True)
    (whole,) = llm.generate(["Hello."], sampling)
    chunks = list(llm.stream("Hello.", sampling))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text

    async def read() -> str:
        return "".join([chunk.text or "" async for chunk in llm.submit("Hello.", sampling)])

    assert asyncio.run(asyncio.wait_for(read(), 60)) == whole.text


def test_a_bad_prompt_is_refused_and_the_others_are_served(llm: LLM) -> None:
    outputs = llm.generate(["Hello.", "", {"messages": [{"role": "user", "content": "hi"}]}, [1, 999]])
    assert [output.finish_reason == "error" for output in outputs] == [False, True, True, True]
    assert "a tokenizer with a chat template" in str(outputs[2].error)


def test_too_many_drafts_are_refused(engine_dir: Path) -> None:
    with pytest.raises(ConfigError, match="expected 0 to 3, this engine's max_draft_len, found 4"):
        LLM(engine_dir, draft_length=4)
    with pytest.raises(ConfigError, match="draft_length: expected 0 to 3, this engine's max_draft_len, found 5"):
        LLM(engine_dir, draft_length={1: 3, 8: 5})


def test_draft_lengths_follow_the_number_of_requests(engine_dir: Path) -> None:
    prompt, sampling = list(range(4, 10)), SamplingParams(max_new_tokens=24, ignore_eos=True)
    with LLM(engine_dir, draft_length={1: 3, 2: 2}) as llm:
        assert llm.config.draft_length == {1: 3, 2: 2}
        llm.generate([prompt], sampling)
        alone = set(llm.statistics.scheduler.num_steps_by_draft_length)
        llm.generate([prompt, prompt[1:]], sampling)
        together = set(llm.statistics.scheduler.num_steps_by_draft_length)
    assert (alone - {0}, together - {0}) == ({3}, {2, 3})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"scheduler_config": SchedulerConfig(), "max_queue_len": 3}, ["max_queue_len"]),
        ({"scheduler_config": SchedulerConfig(), "enable_prefix_caching": False}, ["enable_prefix_caching"]),
        ({"scheduler_config": SchedulerConfig(), "ngram": True}, ["ngram"]),
        ({"draft_length_policy": AdaptiveDraftLength(3), "draft_length": {1: 2}}, ["draft_length"]),
        ({"draft_length_policy": AdaptiveDraftLength(3), "draft_length": 2}, ["draft_length"]),
        ({"draft_length_policy": AdaptiveDraftLength(3), "adaptive_draft_length": True}, ["adaptive_draft_length"]),
    ],
)
def test_a_setting_beside_an_object_that_replaces_it_is_refused(
    engine_dir: Path, options: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(engine_dir, **options)
    assert all(f"{name}: expected only in {next(iter(options))}" in str(error.value) for name in names)


def test_fields_replace_those_of_a_config_and_what_was_opened_is_resolved(engine_dir: Path) -> None:
    config = RuntimeConfig(device="cpu", num_threads=1, draft_length=1, kv_cache_bytes=1 << 22)
    with LLM(engine_dir, config, draft_length=2) as llm:
        assert llm.config == config.replaced(draft_length=2, overlap_scheduling=False)
        assert llm.page_plan.total_bytes <= 1 << 22
    with LLM(engine_dir) as llm:
        assert (llm.config.device, llm.config.draft_length) == ("cpu", {1: 3})
        assert llm.config.num_threads == torch.get_num_threads()
    with LLM(engine_dir, use_drafter=False) as llm:
        assert (llm.config.draft_length, llm.limits.max_draft_len) == (None, 0)


def test_a_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineDirError):
        LLM(tmp_path)


def test_an_engine_runs_without_packer_and_checkpoint_reader(engine_dir: Path) -> None:
    """In an interpreter of its own: what builds engines is not loaded, nor what reads and computes checkpoints."""
    program = (
        "import sys\n"
        "from dflash_trt import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], device='cpu', num_threads=1, kv_cache_bytes=1 << 22) as llm:\n"
        "    (output,) = llm.generate(['Hello.'], SamplingParams(max_new_tokens=4, ignore_eos=True))\n"
        "assert len(output.token_ids) == 4, output\n"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program, engine_dir], capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert "dflash_trt.backends.torch.executor" in loaded
    builders = ("dflash_trt.quantize", "dflash_trt.checkpoint", "dflash_trt.compile", "modelopt", "tensorrt")
    assert [name for name in loaded if name.startswith(builders)] == []
    model_code = [name for name in loaded if name.startswith("transformers.models.") and ".modeling_" in name]
    assert model_code in ([], ["transformers.models.auto.modeling_auto"]), (
        "tables of names, which AutoTokenizer imports"
    )
    assert "transformers.modeling_utils" not in loaded


def test_settings_of_the_queue_and_of_prefixes_reach_the_scheduler(engine_dir: Path) -> None:
    config = RuntimeConfig(max_queue_len=3, enable_prefix_caching=False, ngram=True)
    with LLM(engine_dir, config) as llm:
        found = llm._engine._scheduler.config  # type: ignore[attr-defined]
    assert found == SchedulerConfig(max_queue_len=3, enable_prefix_caching=False, ngram=True)


def test_what_other_engines_call_outputs_and_tokenizer_is_there(llm: LLM) -> None:
    (output,) = llm.generate(["Hello."], SamplingParams(max_new_tokens=4, n=2, seed=1, ignore_eos=True))
    assert output.outputs == output.samples and output.outputs[0].text == output.text
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(list(output.token_ids), skip_special_tokens=True) == output.text
