"""specdec_bench_engine.py as NVIDIA's harness calls it, and what the harness's formulas make of its answers.

The formulas are those of specdec_bench/metrics (acceptance_rate.py, timing.py), which is not on PyPI; the vectors and
what the harness computes of them by hand are recorded here.
"""

import asyncio
import importlib.util
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

import dflash_trt.demo
from dflash_trt import LLM, SamplingParams
from dflash_trt.core.acceptance import acceptance_length, specdec_bench_acceptance_length
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import GenerationOutput
from tests.docs.pages import ROOT
from tests.engine_dir.building import build

TEXTS = ("def main():\n", "import os\n", "class Node:\n")
# Chunk lengths of two requests, the second of two turns, and what acceptance_rate.py writes of them.
RECORDED: dict[tuple[int, int], list[int]] = {(0, 0): [1, 4, 2], (1, 0): [1, 1, 1, 3], (1, 1): [1, 2]}
AVERAGE_AL = (7 / 3 + 6 / 4 + 3 / 2) / 3
HISTOGRAM = {1: 5, 2: 2, 3: 1, 4: 1}
CONDITIONAL = {1: 1.0, 2: 4 / 9, 3: 2 / 4, 4: 1 / 2}


def example() -> ModuleType:
    path = ROOT / "examples" / "specdec_bench_engine.py"
    spec = importlib.util.spec_from_file_location("specdec_bench_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def average_al(turns: dict[Any, list[int]]) -> float:
    """`Average_AL`: the mean over turns of the mean chunk length."""
    return statistics.fmean(statistics.fmean(lengths) for lengths in turns.values())


def conditional_rates(turns: dict[Any, list[int]]) -> dict[int, float]:
    """`Conditional_Acceptance_Rate`: P(length >= k | length >= the k before), of the lengths that occur."""
    lengths = [length for turn in turns.values() for length in turn]
    rates, before = {}, len(lengths)
    for k in sorted(set(lengths)):
        at_least = sum(length >= k for length in lengths)
        rates[k], before = at_least / before, at_least
    return rates


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair, whose drafts are accepted more often than not."""
    [root] = map(Path, dflash_trt.demo.__path__)
    output = tmp_path_factory.mktemp("engines") / "demo"
    return build(root, output, drafter="drafter", max_batch_size=4, max_seq_len=128).path


def opened(engine: Path, **kwargs: Any) -> Any:
    usual = {"speculative_algorithm": "DFLASH", "speculative_num_steps": 3, "trust_remote_code": True}
    sampling = kwargs.pop("sampling", {"temperature": 0})
    return example().DFlashTrtModel(str(engine), kwargs.pop("concurrency", 2), sampling, **usual | kwargs)


def prompts(engine: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def answers(engine: Path, *, max_length: int, end_id: int, **kwargs: Any) -> list[dict[str, Any]]:
    model = opened(engine, **kwargs)

    async def all_of_them() -> list[dict[str, Any]]:
        turns = (model.run(prompt, max_length, end_id, index, 0) for index, prompt in enumerate(prompts(engine)))
        return await asyncio.gather(*turns)

    try:
        return asyncio.run(all_of_them())
    finally:
        model.stop()


def outputs(engine: Path, max_length: int, **fields: Any) -> list[GenerationOutput]:
    with LLM(engine, draft_length=3) as llm:
        rows = [{"prompt_token_ids": prompt} for prompt in prompts(engine)]
        return llm.generate(rows, SamplingParams(max_new_tokens=max_length, **fields))


def test_every_step_is_one_list_and_the_harness_counts_what_bench_reports(engine: Path) -> None:
    told = answers(engine, max_length=24, end_id=-1)
    expected = outputs(engine, 24, ignore_eos=True)
    for answer, output in zip(told, expected, strict=True):
        (steps,) = answer["output_ids"]
        assert [token for step in steps for token in step] == list(output.token_ids)
        assert steps == [list(event.token_ids) for event in output.steps if event.token_ids]
        assert len(answer["token_times"]) == len(steps) + 1
        assert answer["token_times"] == sorted(answer["token_times"])
    turns = {(index, 0): [len(step) for step in answer["output_ids"][0]] for index, answer in enumerate(told)}
    assert all(lengths[0] == 1 for lengths in turns.values()), "the token of the prefill"
    assert average_al(turns) == pytest.approx(specdec_bench_acceptance_length(expected))
    assert 1.5 < average_al(turns) < acceptance_length(expected), "which leaves the prefill's step out"
    merged = {key: [sum(lengths)] for key, lengths in turns.items()}
    assert average_al(merged) > average_al(turns), "steps that are merged would look like longer ones"


def test_the_formulas_are_those_of_the_harness() -> None:
    assert average_al(RECORDED) == pytest.approx(AVERAGE_AL)
    lengths = [length for turn in RECORDED.values() for length in turn]
    assert {length: lengths.count(length) for length in sorted(set(lengths))} == HISTOGRAM
    assert conditional_rates(RECORDED) == pytest.approx(CONDITIONAL)


def test_the_end_token_ends_the_text_and_is_left_out(engine: Path) -> None:
    end_id = outputs(engine, 24, ignore_eos=True)[0].token_ids[6]
    (first, *_) = answers(engine, max_length=24, end_id=end_id)
    (output, *_) = outputs(engine, 24, stop_token_ids=(end_id,))
    tokens = [token for step in first["output_ids"][0] for token in step]
    assert tokens == [token for token in output.token_ids if token != end_id] and len(tokens) <= 6
    assert all(first["output_ids"][0]), "no empty step"


def test_an_end_token_alone_is_one_step(engine: Path) -> None:
    """`Request_AL` is a mean over steps, which the harness does not take of none."""
    end_id = outputs(engine, 1, ignore_eos=True)[0].token_ids[0]
    (first, *_) = answers(engine, max_length=24, end_id=end_id)
    assert first["output_ids"] == [[[end_id]]] and len(first["token_times"]) == 2
    assert average_al({(0, 0): [len(step) for step in first["output_ids"][0]]}) == 1


def test_without_speculation_every_step_has_one_token(engine: Path) -> None:
    told = answers(engine, max_length=5, end_id=-1, speculative_algorithm="NONE")
    assert [answer["output_ids"][0] for answer in told] == [
        [[token] for token in output.token_ids] for output in outputs(engine, 5, ignore_eos=True)
    ]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "--speculative_algorithm: expected DFLASH or NONE"),
        ({"draft_model_dir": "d"}, "--draft_model_dir: expected none"),
        ({"tensor_parallel_size": 4}, "--tp_size: expected 1, that of the engine, found 4"),
        ({"moe_expert_parallel_size": 2}, "--ep_size: expected 1"),
        ({"concurrency": 5}, "--concurrency: expected at most 4"),
        ({"sampling": {"beam_width": 2}}, "sampling_kwargs: expected temperature, top_p, top_k, found beam_width 2"),
        ({"speculative_num_steps": 9}, "expected 0 to 7"),
        ({"speculative_num_draft_tokens": 9}, "expected 0 to 7, .*, found 8"),
        ({"async_scheduling": True}, "async_scheduling"),
    ],
)
def test_what_the_engine_would_not_do_as_asked_is_refused(engine: Path, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(engine, **kwargs)
