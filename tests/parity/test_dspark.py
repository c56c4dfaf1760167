"""DSpark against PyPI `speculators`, in the files that it writes itself: every block, and every confidence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepSampling
from tests.dspark_files import Listener, as_deepspec, as_nvidia, reference_block, save_dspark_drafter
from tests.engines import Decoding, decode, make_executor
from tests.factories import edit_json, make_target
from tests.parity.test_speculators import layer_outputs
from tests.speculators_files import open_speculators_drafter

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 30
BLOCK = 5
SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)  # of twelve tokens
CONFIDENCE_TOLERANCE = 1e-5  # measured 4e-7, and 0.03 with the tokens of another slot

MASKED: dict[str, Any] = {"sample_from_anchor": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "vanilla, the anchor's slot makes no draft": MASKED,
    "gated, the anchor's slot makes no draft": MASKED | {"markov_head_type": "gated"},
    "rnn, the anchor's slot makes no draft": MASKED | {"markov_head_type": "rnn"},
    "reduced vocabulary": {"draft_tokens": SOME, "markov_head_type": "gated"},
    "reduced vocabulary, the anchor's slot makes no draft": MASKED | {"draft_tokens": SOME},
    "confidence of the hidden state alone": {"confidence_head_with_markov": False},
    "no confidence head": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "causal windows": {"full_layers": (), "sliding_window": 4},
    "windows that are not causal": {"full_layers": (1,), "sliding_window": 3, "sliding_window_non_causal": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("pair") / "target", vocab_size=12, tokenizer=False)


def drafted(target: Path, drafter: Path, *, num_drafts: int | None = None) -> tuple[Decoding, list[Any]]:
    """A run of the largest K, and the confidences of the blocks that it verified."""
    executor = Listener(make_executor(target, drafter))
    run = decode(executor, PROMPT, NUM_NEW, num_draft_tokens=num_drafts or executor.limits.max_draft_len)  # type: ignore[arg-type]
    assert len(run.blocks) > 5
    return run, executor.confidences[: len(run.blocks)]  # of a step are those of the next one's block


def expected(target: Path, reference: Path, run: Decoding) -> tuple[list[list[int]], list[Any]]:
    """The reference's block and confidences at every anchor of our run."""
    sequence, start = PROMPT + run.tokens, len(PROMPT)
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    states, model = layer_outputs(target_model, torch.tensor([sequence])), open_speculators_drafter(reference)
    blocks, confidences = [], []
    for block, num_accepted in zip(run.blocks, run.num_accepted, strict=True):
        drafts, confidence = reference_block(model, states, sequence[: start + 1], block[1:])
        blocks.append([sequence[start], *drafts])
        confidences.append(confidence)
        start += num_accepted + 1
    return blocks, confidences


def assert_same_confidences(found: list[Any], reference: list[Any]) -> None:
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(ours), torch.tensor([theirs]), rtol=0, atol=CONFIDENCE_TOLERANCE, check_dtype=True
        )


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_every_block_and_its_confidences_equal_those_of_speculators(
    tmp_path: Path, target: Path, options: dict[str, Any]
) -> None:
    drafter = save_dspark_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, **options)
    run, confidences = drafted(target, drafter)
    blocks, reference = expected(target, drafter, run)
    assert {len(block) for block in blocks} == {BLOCK + options.get("sample_from_anchor", True)}
    assert run.blocks == blocks
    if not options.get("enable_confidence_head", True):
        assert confidences == reference == [None] * len(blocks)
        return
    assert_same_confidences(confidences, reference)
    wrong = [[*values[1:], values[0]] for values in reference]
    with pytest.raises(AssertionError):  # the negative control
        assert_same_confidences(confidences, wrong)


def test_a_block_is_as_wide_as_the_step_drafts(tmp_path: Path, target: Path) -> None:
    """A reference of that block size: slots see all others."""
    for width, options in ((3, {}), (4, MASKED)):
        root = tmp_path / str(width)
        wide = save_dspark_drafter(root / "wide", target_dir=target, block_size=BLOCK + 2, **options)
        narrow = save_dspark_drafter(root / "narrow", target_dir=target, block_size=width, **options)
        run, confidences = drafted(target, wide, num_drafts=3)
        blocks, reference = expected(target, narrow, run)
        assert run.blocks == blocks
        assert_same_confidences(confidences, reference)


@pytest.mark.parametrize("publish", [as_deepspec, as_nvidia])
def test_a_drafter_as_others_publish_it_drafts_the_same(tmp_path: Path, target: Path, publish: Any) -> None:
    own = save_dspark_drafter(tmp_path / "own", target_dir=target, block_size=BLOCK)
    drafter = publish(own, tmp_path / "drafter", num_target_layers=4)
    draft = open_pair(target, drafter).draft
    assert draft is not None and draft.source_format == "deepspec" and draft.max_draft_len == BLOCK
    run, confidences = drafted(target, drafter)
    blocks, reference = expected(target, own, run)
    assert run.blocks == blocks
    assert_same_confidences(confidences, reference)


def test_copies_of_the_target_s_matrices_in_the_file_change_no_draft(tmp_path: Path, target: Path) -> None:
    """As in DeepSpec's files."""
    own = save_dspark_drafter(tmp_path / "own", target_dir=target, block_size=BLOCK)
    drafter = as_deepspec(own, tmp_path / "drafter", num_target_layers=4)
    before, _ = drafted(target, drafter)
    tensors = load_file(target / "model.safetensors")
    copies = {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "lm_head.weight": tensors["lm_head.weight"]}
    save_file(load_file(drafter / "model.safetensors") | copies, drafter / "model.safetensors", {"format": "pt"})
    draft = open_pair(target, drafter).draft
    assert draft is not None and draft.has_own_embedding and draft.draft_vocab_size == 12
    after, _ = drafted(target, drafter)
    assert after.blocks == before.blocks


CHANGES = {
    "the previous draft's embedding": "markov_head.markov_w1.weight",
    "the bias": "markov_head.markov_w2.weight",
    "the gate": "markov_head.gate_proj.weight",
    "keys of the context": "layers.0.self_attn.k_proj.weight",
}


@pytest.mark.parametrize("name", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_matrix_drafts_something_else_and_changes_no_token(tmp_path: Path, target: Path, name: str) -> None:
    drafter = save_dspark_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK, markov_head_type="gated")
    run, _ = drafted(target, drafter)
    tensors = load_file(drafter / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    changed, _ = drafted(target, drafter)
    assert changed.tokens[:NUM_NEW] == run.tokens[:NUM_NEW]
    assert changed.blocks != run.blocks


def test_the_anchor_s_slot_is_read_as_the_file_says(tmp_path: Path, target: Path) -> None:
    drafter = save_dspark_drafter(tmp_path / "drafter", target_dir=target, block_size=BLOCK)
    edit_json(drafter / "config.json", sample_from_anchor=None)
    pair = open_pair(target, drafter)
    assert pair.draft is not None and pair.draft.max_draft_len == BLOCK
    assert any("sample_from_anchor' is null: true, as in Speculators" in note for note in pair.notes)
    blocks, _ = drafted(target, drafter, num_drafts=BLOCK - 1)
    edit_json(drafter / "config.json", sample_from_anchor=False)
    masked, _ = drafted(target, drafter)
    assert masked.blocks != blocks.blocks and masked.tokens[:NUM_NEW] == blocks.tokens[:NUM_NEW]


def test_every_k_gives_the_target_s_tokens(tmp_path: Path, target: Path) -> None:
    for options in ({}, MASKED | {"markov_head_type": "rnn", "draft_tokens": SOME}):
        path = tmp_path / str(len(options))
        executor = make_executor(target, save_dspark_drafter(path, target_dir=target, block_size=BLOCK, **options))
        for sampling in (StepSampling(), StepSampling(temperature=0.8, top_k=9, seed=3)):
            runs = [decode(executor, PROMPT, NUM_NEW, num_draft_tokens=k, sampling=sampling) for k in (0, 1, 2, 4)]
            assert all(run.tokens[:NUM_NEW] == runs[0].tokens[:NUM_NEW] for run in runs)
            assert sum(runs[3].num_accepted) > 0
