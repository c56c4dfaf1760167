"""DFlash2 against PyPI `dflash`, used as it is: every draft block, the whole loop, and what sampled drafts follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.dflash2_files import make_dflash2_drafter
from tests.engines import Decoding, decode, make_executor
from tests.factories import make_target
from tests.parity.test_laws import chi_square_p, merge_rare

dflash = pytest.importorskip("dflash.model", reason="PyPI dflash is not installed: scripts/test installs it")

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 40
BLOCK = 6
TEMPERATURE = 1.3

DRAFTERS: dict[str, dict[str, Any]] = {
    "as published: windows in all layers, not causal": {},
    "causal, three taps, one group": {"is_causal": True, "kernel_size": 3, "group_size": 64, "top_k": 3},
    "full attention, a softcap and a multiplier": {
        "window": None,
        "keys": {"final_logit_softcapping": 2.0, "output_multiplier": 0.7, "input_embedding_scale": 0.5},
    },
    "one tap, every token a candidate": {"kernel_size": 1, "group_size": 1, "top_k": 12},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("pair") / "target", vocab_size=12, tokenizer=False)


def reference_models(target: Path, drafter: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return model, dflash.DFlash2DraftModel.from_pretrained(drafter, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_proposal(
    model: Any, draft: Any, context: list[int], anchor: int, *, temperature: float = 0.0, num_slots: int = BLOCK
) -> tuple[list[int], Any, Any]:
    """What the reference drafter proposes after `context` and `anchor`, its candidates and their probabilities."""
    hidden_states = model(torch.tensor([context]), output_hidden_states=True).hidden_states
    block = torch.tensor([[anchor] + [draft.mask_token_id] * (num_slots - 1)])
    hidden = draft(
        target_hidden=dflash.extract_context_feature(hidden_states, draft.target_layer_ids),
        noise_embedding=model.get_input_embeddings()(block)
        * float(draft.config.dflash_config.get("input_embedding_scale", 1.0)),
        position_ids=torch.arange(len(context) + num_slots)[None],
    )
    path, candidates, q = draft.propose(hidden[:, 1:], torch.tensor([anchor]), model.lm_head, temperature)
    return path[0].tolist(), candidates[0], q


def run_and_expected(target: Path, drafter: Path) -> tuple[Any, list[list[int]]]:
    """Our run, and the reference's block at every anchor of it."""
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    model, draft = reference_models(target, drafter)
    sequence, start, expected = PROMPT + run.tokens, len(PROMPT), []
    for num_accepted in run.num_accepted:
        path, *_ = reference_proposal(model, draft, sequence[:start], sequence[start])
        expected.append([sequence[start], *path])
        start += num_accepted + 1
    assert len(run.blocks) > 8
    return run, expected


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_every_draft_block_equals_that_of_the_reference(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    run, expected = run_and_expected(target, drafter)
    assert run.blocks == expected


def test_the_whole_loop_equals_that_of_the_reference(tmp_path: Path, target: Path) -> None:
    """Without windows, whose cache transformers cannot crop. The reference narrows its last blocks."""
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, window=None)
    run = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    model, draft = reference_models(target, drafter)
    calls: list[list[int]] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0][0].tolist()))
    ids = dflash.dflash_generate(draft, model, torch.tensor([PROMPT]), NUM_NEW, None)
    assert run.tokens[:NUM_NEW] == ids[0, len(PROMPT) :].tolist()
    blocks = [block for block in calls[1:] if len(block) == BLOCK]
    assert len(blocks) > 8
    assert run.blocks[: len(blocks)] == blocks


CHANGES = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.hidden_projection.weight",
    "layers.0.attention_conv.kernel_projection.weight",
    "layers.1.mlp_conv.base_kernel",
)


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_tensor_changes_drafts_and_no_token(tmp_path: Path, target: Path, name: str) -> None:
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK)
    run, expected = run_and_expected(target, drafter)
    tensors = load_file(drafter / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    changed = decode(make_executor(target, drafter), PROMPT, NUM_NEW, num_draft_tokens=BLOCK - 1)
    assert changed.tokens[:NUM_NEW] == run.tokens[:NUM_NEW]
    assert changed.blocks != expected


def test_fewer_drafts_are_the_reference_s_of_a_narrower_block(tmp_path: Path, target: Path) -> None:
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK)
    model, draft = reference_models(target, drafter)
    executor = make_executor(target, drafter)
    greedy = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=0).tokens
    for k in (1, 2):
        run = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=k)
        assert run.tokens[:NUM_NEW] == greedy[:NUM_NEW]
        path, *_ = reference_proposal(model, draft, PROMPT, run.tokens[0], num_slots=k + 1)
        assert run.blocks[0] == [run.tokens[0], *path]


def test_sampled_tokens_depend_neither_on_k_nor_on_chunks(tmp_path: Path, target: Path) -> None:
    executor = make_executor(target, make_dflash2_drafter(tmp_path / "d", target_dir=target, block_size=BLOCK))
    sampling = StepSampling(temperature=0.8, top_k=9, seed=3)
    none, *others = (
        decode(executor, PROMPT, NUM_NEW, num_draft_tokens=k, chunk=chunk, sampling=sampling)
        for k, chunk in ((0, None), (1, None), (5, None), (5, 5))
    )
    assert all(run.tokens[:NUM_NEW] == none.tokens[:NUM_NEW] for run in others)
    assert others[1].blocks[:5] == others[2].blocks[:5]
    assert sum(others[1].num_accepted) > 0


@pytest.mark.parametrize(("num_slots", "is_noticed"), [(3, False), (4, True)], ids=["as we draft", "a wider block"])
def test_sampled_drafts_follow_the_distribution_that_the_reference_samples(
    tmp_path: Path, target: Path, num_slots: int, is_noticed: bool
) -> None:
    """Pairs of first drafts behind one anchor, over seeds. The wider block is the negative control."""
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=4)
    drafts: dict[int, list[tuple[int, int]]] = {}
    executor = make_executor(target, drafter, max_batch_size=64)
    for seed in range(0, 64 * 40, 64):
        runs = [
            Decoding(executor, PROMPT, tuple(range(4 * i, 4 * i + 4)), StepSampling(temperature=TEMPERATURE, seed=s))
            for i, s in enumerate(range(seed, seed + 64))
        ]
        parts = tuple(run.prefill_part(len(PROMPT)) for run in runs)
        for result in run_batch(executor, StepBatch(requests=parts, num_draft_tokens=2)):
            drafts.setdefault(result.emitted_tokens[0], []).append(result.draft_tokens)
    anchor, pairs = max(drafts.items(), key=lambda item: len(item[1]))
    expected = reference_pairs(*reference_models(target, drafter), anchor, num_slots)
    counts = torch.zeros(12, 12)
    for pair in pairs:
        counts[pair] += 1
    assert counts[expected == 0].sum() == 0 or is_noticed
    cells = expected > 0
    found = chi_square_p(*merge_rare(counts[cells], expected[cells] * len(pairs)))
    assert found < 1e-6 if is_noticed else found > 1e-3  # fixed seeds: never flaky


def reference_pairs(model: Any, draft: Any, anchor: int, num_slots: int) -> torch.Tensor:
    """The probability of every pair of first drafts, [12, 12]."""
    expected = torch.zeros(12, 12)
    torch.manual_seed(0)
    for _ in range(40):  # until every first draft has come
        path, candidates, q = reference_proposal(
            model, draft, PROMPT, anchor, temperature=TEMPERATURE, num_slots=num_slots
        )
        first = q[0, 0][candidates[0] == path[0]]
        expected[path[0]] = torch.zeros(12).index_add(0, candidates[1], first * q[0, 1])
    assert abs(expected.sum() - 1) < 1e-4, "a first draft has not come"
    return expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_of_the_candidates_and_probabilities_of_the_reference(
    tmp_path: Path, target: Path, name: str
) -> None:
    """Every slot of a path, as soon as the reference samples the same one."""
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, block_size=3, **DRAFTERS[name])
    executor = make_executor(target, drafter)
    run = Decoding(executor, PROMPT, (0, 1, 2, 3), StepSampling(temperature=TEMPERATURE, seed=4, draft_stream=1))
    [result] = run_batch(executor, StepBatch(requests=(run.prefill_part(len(PROMPT)),), num_draft_tokens=2))
    models, [anchor] = reference_models(target, drafter), result.emitted_tokens
    torch.manual_seed(0)
    proposals = (reference_proposal(*models, PROMPT, anchor, temperature=TEMPERATURE, num_slots=3) for _ in range(2000))
    candidates, q = next((ids, q[0]) for path, ids, q in proposals if tuple(path) == result.draft_tokens)
    draft_topk_ids, draft_topk_probs = (
        x[0].view(2, -1) for x in (executor._slots.draft_topk_ids, executor._slots.draft_topk_probs)
    )
    found, expected = (
        torch.zeros(2, 12).scatter(1, ids.long(), weights)
        for ids, weights in ((draft_topk_ids, draft_topk_probs), (candidates, q))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # measured 2e-6
    assert (found - expected.flip(0)).abs().max() > 1e-3  # the negative control: the other slot's
