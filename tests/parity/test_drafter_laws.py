"""Every drafting algorithm through the engine: prefix hits, batch mates, ranks and CPU kernels change no draft."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.base import backend_of
from dflash_trt.backends.cuda.backend import model_problems
from dflash_trt.backends.torch.native.library import NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping
from tests.dflash2_files import make_dflash2_drafter
from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import decode, make_executor
from tests.executor.rank_engines import build, opened
from tests.factories import make_target
from tests.mtp_files import make_mtp_target
from tests.parity.test_serving_laws import PROMPTS, SHARED, make_loop, request, steps_of
from tests.traces import GREEDY, SAMPLED, integers, trace

K = 4


def make_pair(root: Path, algorithm: str, **target_fields: Any) -> tuple[Path, Path]:
    if algorithm == "mtp":
        target = make_mtp_target(root / "target", family="glm4_moe", vocab_size=12, tokenizer=False, **target_fields)
        return target, target
    target = make_target(root / "target", vocab_size=12, tokenizer=False, **target_fields)
    if algorithm == "dflash2":
        return target, make_dflash2_drafter(root / "drafter", target_dir=target, block_size=K + 1)
    if algorithm == "dspark":
        return target, save_dspark_drafter(root / "drafter", target_dir=target, block_size=K, markov_head_type="rnn")
    return target, save_eagle3_head(root / "drafter", target_dir=target, draft_tokens=(0, 1, 2, 4, 5, 7, 8, 10))


@pytest.fixture(scope="module", params=["dflash2", "dspark", "eagle3", "mtp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_a_prefix_hit_and_batch_mates_change_neither_tokens_nor_acceptance(
    pair: tuple[Path, Path], temperature: float
) -> None:
    executor = make_executor(*pair)
    requests = [request(str(i), prompt, temperature) for i, prompt in enumerate(PROMPTS)]
    uncached = make_loop(executor, enable_prefix_caching=False)
    alone = [steps_of(uncached, [each])[0] for each in requests]
    assert sum(accepted for _, steps in alone for *_, accepted in steps) > 0
    loop = make_loop(executor)
    assert [steps_of(loop, [each])[0] for each in requests] == alone
    assert loop.statistics().scheduler.num_prefix_hit_tokens >= 3 * (len(SHARED) // 4) * 4  # pages of four tokens
    together = steps_of(make_loop(executor, enable_prefix_caching=False), requests)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]


def test_two_ranks_make_the_drafts_of_one(pair: tuple[Path, Path]) -> None:
    root = pair[0].parent
    name = {"drafter": "mtp"} if pair[1] == pair[0] else {}
    engines = [build(root, tp_size=tp_size, **name) for tp_size in (1, 2)]
    with opened(engines[0]) as one, opened(engines[1]) as two:
        for samplings, ks in ((GREEDY, (3,)), (SAMPLED, (3, 0, 1))):
            expected, _ = trace(one, samplings, num_draft_tokens=ks)
            found, _ = trace(two, samplings, num_draft_tokens=ks)
            assert integers(found) == integers(expected)


@pytest.mark.parametrize("algorithm", ["dflash2", "dspark", "eagle3"])
def test_the_kernels_of_a_cpu_make_the_drafts_of_pytorch(tmp_path: Path, algorithm: str) -> None:
    """With heads of whole panels, for which they are."""
    if isinstance(cpu_kernels(), NoKernels):
        pytest.skip("no CPU kernels here")
    fields = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False, **fields)
    if algorithm == "eagle3":
        drafter = save_eagle3_head(tmp_path / "drafter", target_dir=target, sliding_window=9)
    elif algorithm == "dspark":
        drafter = save_dspark_drafter(tmp_path / "drafter", target_dir=target, block_size=K, markov_head_type="gated")
    else:
        drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=K + 1, **fields)
    with_kernels, without = (make_executor(target, drafter, has_kernels=has_kernels) for has_kernels in (True, False))
    assert with_kernels._make_ops.func is NativeOps
    for prompt in ([7], PROMPTS[0]):
        runs = [decode(executor, prompt, 30, num_draft_tokens=K) for executor in (with_kernels, without)]
        assert runs[0].blocks == runs[1].blocks


def test_bfloat16_drafts_as_well(pair: tuple[Path, Path]) -> None:
    """The features of a chain are kept in the engine's dtype."""
    executor = make_executor(*pair, dtype=torch.bfloat16)
    none, some = (decode(executor, PROMPTS[0], 30, num_draft_tokens=k) for k in (0, K))
    assert len(some.blocks) > 8 and some.blocks[0][0] == none.tokens[0]


def test_neither_tensorrt_nor_a_gpu_refuses_an_algorithm(pair: tuple[Path, Path]) -> None:
    checked = open_pair(*pair)
    draft = checked.draft
    assert draft is not None
    on_a_gpu = model_problems(checked.target, draft)
    assert all(text.startswith("head_dim") for text in on_a_gpu), "for which these are too small"
    assert backend_of("tensorrt").unsupported(checked.target, draft, None, Mapping()) == []
    if draft.selector is not None:
        wide = draft.model_copy(update={"selector": draft.selector.model_copy(update={"top_k": 65})})
        *_, problem = model_problems(checked.target, wide)
        assert problem.startswith("selector top_k of the drafter: expected at most 64 on a GPU, found 65")
