"""EAGLE-3 chains against PyPI `speculators`, in the files that it writes itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.drafters import speculators as speculators_format
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.core.errors import ConfigError
from tests.eagle3_files import as_safeailab, convert_safeailab, open_eagle3_head, reference_chain, save_eagle3_head
from tests.engines import Decoding, decode, make_executor
from tests.factories import edit_json, make_target
from tests.parity.test_speculators import layer_outputs

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 30
K = 4
SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)  # of twelve tokens

HEADS: dict[str, dict[str, Any]] = {
    "Llama's layer, full vocabulary": {},
    "reduced vocabulary": {"draft_tokens": SOME},
    "Qwen3's layer, normed residual": {"architecture": "qwen3", "norm_before_residual": True, "draft_tokens": SOME},
    "norm of all taps, two of them": {"norm_before_fc": True, "aux_hidden_state_layer_ids": (3, 1)},
    "norm of each tap, normed features": {"fc_norm": True, "norm_output": True},
    "a window": {"sliding_window": 5, "draft_tokens": SOME},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("pair") / "target", vocab_size=12, tokenizer=False)


def expected_blocks(target: Path, reference: Path, run: Decoding) -> list[list[int]]:
    """The reference's chain at every anchor of our run."""
    sequence, start, expected = PROMPT + run.tokens, len(PROMPT), []
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    states, model = layer_outputs(target_model, torch.tensor([sequence])), open_eagle3_head(reference)
    for block, num_accepted in zip(run.blocks, run.num_accepted, strict=True):
        expected.append([sequence[start], *reference_chain(model, states, sequence[: start + 1], block[1:])])
        start += num_accepted + 1
    assert len(run.blocks) > 5
    return expected


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_every_chain_equals_that_of_speculators(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    head = save_eagle3_head(tmp_path / "head", target_dir=target, **options)
    run = decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K)
    assert run.blocks == expected_blocks(target, head, run)


def test_a_head_in_safeailab_s_names_drafts_as_speculators_converts_it(tmp_path: Path, target: Path) -> None:
    head = as_safeailab(save_eagle3_head(tmp_path / "own", target_dir=target, draft_tokens=SOME), tmp_path / "head")
    run = decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K)
    assert run.blocks == expected_blocks(
        target, convert_safeailab(head, tmp_path / "converted", target_dir=target), run
    )


def _change_tensor(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = load_file(head / "model.safetensors")
        tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, head / "model.safetensors", {"format": "pt"})

    return change


def _change_key(**changes: Any) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda head, monkeypatch: edit_json(head / "config.json", **changes)


def _show_the_row_of_the_first_token(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = speculators_format.read_chain_layer

    def wrong(*given: Any) -> list[dict[str, Any]]:
        [layer] = honest(*given)
        return [layer | {"mixer": layer["mixer"] | {"mask": layer["mixer"]["mask"] | {"first_key": 0}}}]

    monkeypatch.setattr(speculators_format, "read_chain_layer", wrong)


CHANGES = {
    "the head's norm of features": _change_tensor("layers.0.hidden_norm.weight"),
    "keys of the context": _change_tensor("layers.0.self_attn.k_proj.weight"),
    "a tap": _change_key(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
    "the residual": _change_key(norm_before_residual=True),
    "the features of drafts": _change_key(norm_output=True),
    "the row of the first token": _show_the_row_of_the_first_token,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_head_drafts_something_else_and_changes_no_token(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    head = save_eagle3_head(tmp_path / "head", target_dir=target)
    run = decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K)
    change(head, monkeypatch)
    changed = decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K)
    assert changed.tokens[:NUM_NEW] == run.tokens[:NUM_NEW]
    assert changed.blocks != run.blocks


def test_every_k_gives_the_target_s_tokens_and_the_same_chain_as_far_as_it_goes(tmp_path: Path, target: Path) -> None:
    executor = make_executor(target, save_eagle3_head(tmp_path / "head", target_dir=target, draft_tokens=SOME))
    for sampling in (StepSampling(), StepSampling(temperature=0.8, top_k=9, seed=3)):
        runs = [decode(executor, PROMPT, NUM_NEW, num_draft_tokens=k, sampling=sampling) for k in (0, 1, 3, 7)]
        assert all(run.tokens[:NUM_NEW] == runs[0].tokens[:NUM_NEW] for run in runs)
        assert runs[1].blocks[0] == runs[3].blocks[0][:2] and runs[2].blocks[0] == runs[3].blocks[0][:4]
        assert sum(runs[3].num_accepted) > 0


def test_a_draft_has_the_noise_of_its_own_position(tmp_path: Path) -> None:
    """Where all logits are equal the noise alone decides, and drafts of the same noise are the target's tokens."""
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False, tie_word_embeddings=False)
    head = save_eagle3_head(tmp_path / "head", target_dir=target)
    for directory in (target, head):
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    sampling = StepSampling(temperature=1.0, seed=3)
    run = decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K, sampling=sampling)
    assert len(set(run.tokens)) > 6
    assert set(run.num_accepted) == {K}


def test_chains_depend_neither_on_prompt_chunks_nor_on_steps_without_drafts(tmp_path: Path, target: Path) -> None:
    """Also behind a prompt of one token, whose row of features no draft sees."""
    executor = make_executor(target, save_eagle3_head(tmp_path / "head", target_dir=target))
    for prompt in (PROMPT, [7]):
        whole = decode(executor, prompt, NUM_NEW, num_draft_tokens=K)
        for chunk in (1, 5):
            assert decode(executor, prompt, NUM_NEW, num_draft_tokens=K, chunk=chunk).blocks == whole.blocks
    paused = Decoding(executor, PROMPT, tuple(range(14)))
    for k in (K, 0, 0, K, K):
        part = paused.verify_part(min(k, len(paused.drafts))) if paused.tokens else paused.prefill_part(100)
        paused.take(part, run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=k))[0])
    anchor_position = paused.context_len - paused.num_accepted[-1] - 1
    prompt = (PROMPT + paused.tokens)[:anchor_position]
    assert decode(executor, prompt, 2, num_draft_tokens=K).blocks[0] == paused.blocks[-1]


def test_features_that_pages_lose_between_two_chunks_change_the_context(tmp_path: Path, target: Path) -> None:
    executor = make_executor(target, save_eagle3_head(tmp_path / "head", target_dir=target))
    contexts = []
    for is_lost in (False, True):
        run = Decoding(executor, PROMPT, tuple(range(14)))
        while not run.tokens:
            part = run.prefill_part(1)
            run.take(part, run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=K))[0])
            if is_lost and not run.tokens:
                executor._state.draft_features.tensor.zero_()
        contexts.append(executor._state.draft_kv[0].tensor.clone())
    assert (contexts[0] - contexts[1]).abs().max() > 0.1


def test_taps_that_a_file_does_not_name_are_safeailab_s(tmp_path: Path) -> None:
    """Inputs of layers 2, N / 2 and N - 3, which are the outputs of those before."""
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False, num_hidden_layers=10)
    head = as_safeailab(save_eagle3_head(tmp_path / "own", target_dir=target), tmp_path / "head")
    edit_json(head / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": []})
    pair = open_pair(target, head)
    assert pair.draft is not None and pair.draft.target_layer_ids == (1, 4, 6)
    assert any("the inputs of layers 2, 5, 7" in note for note in pair.notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2),
        ("eagle_config", {"use_aux_hidden_state": False}),
        ("eagle_aux_hidden_state_layer_ids", [0, 2, 3]),
        ("draft_vocab_size", 13),
        ("parallel_drafting", True),
        ("fc_norm", 1),
    ],
)
def test_what_a_head_may_say_and_we_cannot_do_is_refused_by_name(
    tmp_path: Path, target: Path, key: str, value: Any
) -> None:
    head = as_safeailab(save_eagle3_head(tmp_path / "own", target_dir=target), tmp_path / "head")
    of_section = {"eagle_config": None} if key.startswith("eagle_aux") else {}
    edit_json(head / "config.json", **of_section | {key: value})
    with pytest.raises(ConfigError, match=key):
        open_pair(target, head)
