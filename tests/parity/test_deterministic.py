"""The law of `deterministic`: bfloat16, FP8 and FP4 texts and log probabilities depend on their request alone."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trt import LLM
from dflash_trt.backends.base import EngineExecutor, backend_of
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter

VOCAB_SIZE, BLOCK_SIZE, NUM_NEW = 120, 6, 12
GENERATOR = torch.Generator().manual_seed(3)
SHARED = torch.randint(4, VOCAB_SIZE, (37,), generator=GENERATOR).tolist()
PROMPTS = [[*SHARED[:n], 5 + n] for n in (0, 3, 9, 16, 36)] + [SHARED * 2, SHARED[5:30]]
REPEATED = [5, 6, 5, 5]  # the same prompt of more than a page, so that a cached prefix is hit
TEMPERATURES = (0.0, 0.8)
EXPERTS: dict[str, Any] = {"family": "gpt_oss", "intermediate_size": 40}  # no multiple of a vector's length
DELTA: dict[str, Any] = {"family": "qwen3_5_moe_text", "num_hidden_layers": 3, "linear_key_head_dim": 20}
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LATENTS: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_hidden_layers": 3,
    "kv_lora_rank": 40,
    "moe_intermediate_size": 40,
}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the target, and of QuantizationConfig
    "bfloat16": ({}, {}),
    "experts, sinks and windows": (EXPERTS, {}),
    "fp8": ({}, {"target": "fp8", "kv_cache": "fp8"}),
    "nvfp4_w4a16": ({}, {"target": "nvfp4_w4a16"}),
    "int8": ({}, {"target": "int8", "drafter": "int8"}),
    "float32, CPU kernels": ({"head_dim": 32}, {}),
    "gated delta nets": (DELTA, {}),
    "latents": (LATENTS, {}),
}
Answer = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    fields, quantization = ENGINES[request.param]
    if quantization and importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: scripts/test installs it")
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False, **fields)
    head_dim = fields.get("head_dim", 8)
    make_zlab_drafter(root / "drafter", target_dir=target, block_size=BLOCK_SIZE, head_dim=head_dim)
    (root / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": SHARED}) + "\n")
    calibration = {"prompts": str(root / "prompts.jsonl")}
    config = QuantizationConfig(**quantization, calibration=calibration) if quantization else QuantizationConfig()
    limits = {"max_seq_len": 256, "max_batch_size": 8, "max_num_tokens": 64}
    dtype = "float32" if request.param.startswith("float32") else "bfloat16"
    return build(root, root / "engine", drafter="drafter", dtype=dtype, quantization=config, **limits)


def opened(engine: EngineDir, *, deterministic: bool) -> EngineExecutor:
    config = RuntimeConfig(device="cpu", deterministic=deterministic, kv_cache_bytes=1 << 22)
    return backend_of("torch").open(engine, config)


def make_request(index: int, name: str) -> Request:
    sampling = SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=TEMPERATURES[index % 2],
        top_p=0.9,
        repetition_penalty=1.0 if index % 3 else 1.3,
        frequency_penalty=0.0 if index % 3 else 0.2,
        ignore_eos=True,
        logprobs=True,
    )
    return Request(request_id=name, prompt_token_ids=tuple(PROMPTS[index]), sampling=sampling, seed=index)


def answers(
    executor: EngineExecutor,
    order: Sequence[int],  # indices of PROMPTS
    drafts: dict[int, int],  # K by the number of decoding requests
    *,
    chunk: int | None = None,
    steps_between: int = 0,  # of one request's arrival and the next one's
    **loop: Any,
) -> list[Answer]:
    scheduler = Scheduler(executor.limits, SchedulerConfig(max_prefill_tokens=chunk), BatchSizeDraftLength(drafts))
    engine_loop = EngineLoop(executor, scheduler, **loop)
    streams = []
    for i, index in enumerate(order):
        streams.append(engine_loop.submit(make_request(index, str(i))))
        for _ in range(steps_between):
            engine_loop.step()
    while engine_loop.step():
        pass
    outputs = [stream.result(timeout_s=1) for stream in streams]
    if order == REPEATED:
        assert engine_loop.statistics().scheduler.num_prefix_hit_tokens > 0
    return [(output.token_ids, output.logprobs) for output in outputs]


def alone(executor: EngineExecutor) -> list[Answer]:
    """Each request by itself, without drafts, in one chunk."""
    return [answers(executor, [index], {1: 0})[0] for index in range(len(PROMPTS))]


def test_batch_mates_drafts_chunks_prefix_hits_and_chaining_change_no_bit(engine: EngineDir) -> None:
    executor = opened(engine, deterministic=True)
    expected = alone(executor)
    lengths = st.integers(0, BLOCK_SIZE - 1)

    @given(
        order=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=12),
        drafts=st.fixed_dictionaries({1: lengths, 2: lengths, 5: lengths}),
        chunk=st.none() | st.integers(1, 40),
        steps_between=st.integers(0, 3),
        overlaps=st.booleans(),
    )
    @example(order=REPEATED, drafts={1: 5, 2: 2, 5: 0}, chunk=17, steps_between=9, overlaps=False)
    @settings(max_examples=5, deadline=None)
    def check(order: list[int], **how: Any) -> None:
        assert answers(executor, order, **how) == [expected[index] for index in order]

    check()


def test_without_the_setting_the_batch_changes_texts_or_their_probabilities(engine: EngineDir) -> None:
    """The negative control."""
    executor = opened(engine, deterministic=False)
    together = answers(executor, range(len(PROMPTS)), {1: BLOCK_SIZE - 1}, chunk=7)
    changed = [a != b for a, b in zip(together, alone(executor), strict=True)]
    make_ops = getattr(executor, "_make_ops", None)
    if isinstance(getattr(make_ops, "func", None), type):  # the CPU kernels add in order in any case
        assert not any(changed)
        return
    assert sum(changed) >= 3


def test_blocks_on_disk_are_not_shared_with_an_engine_that_is_not_deterministic(tmp_path: Path) -> None:
    make_target(tmp_path / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    engine = build(tmp_path, tmp_path / "engine", max_draft_len=0)
    names = []
    for deterministic in (False, True):
        tiers = {"host_cache_bytes": 1 << 20, "disk_cache_dir": str(tmp_path / "blocks")}
        with LLM(engine.path, deterministic=deterministic, kv_cache_bytes=1 << 20, **tiers) as llm:
            llm.generate([{"prompt_token_ids": SHARED}], SamplingParams(max_new_tokens=1))
        names.append({path.name for path in (tmp_path / "blocks").iterdir()})
    assert len(names[0]) == 1 and len(names[1]) == 2
