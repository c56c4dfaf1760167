"""MTP heads against PyPI `speculators` (Qwen) and transformers' MtpModel (GLM), which read the same checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.checkpoint import mtp as mtp_checkpoint
from dflash_trt.core.batch import StepSampling
from dflash_trt.network.drafters.mtp import MtpDrafter
from tests.engines import Decoding, decode, make_executor
from tests.executor.rank_engines import build
from tests.mtp_files import MtpReference, make_mtp_target
from tests.parity.test_hybrids import NUM_NEW as NUM_HYBRID
from tests.parity.test_hybrids import PROMPTS, expected_tokens

PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW, K = 40, 4

TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"family": "qwen3_5_text"},
    "Qwen3.5, tied, biases": {"family": "qwen3_5_text", "tie_word_embeddings": True, "attention_bias": True},
    "Qwen3.5 with experts": {"family": "qwen3_5_moe_text"},
    "Qwen3-Next": {"family": "qwen3_next"},
    "Qwen3-Next, experts saved as they are computed": {"family": "qwen3_next", "save_original_format": False},
    "GLM-4.5": {"family": "glm4_moe"},
    "GLM-4.5 without norms of q and k": {"family": "glm4_moe", "use_qk_norm": False, "attention_bias": False},
}


def make(root: Path, name: str) -> Path:
    return make_mtp_target(root / "target", vocab_size=12, tokenizer=False, **TARGETS[name])


def drafted(target: Path, prompt: list[int] = PROMPT, **options: Any) -> Decoding:
    return decode(make_executor(target, target), prompt, NUM_NEW, num_draft_tokens=K, **options)


@pytest.mark.parametrize("name", TARGETS)
def test_every_chain_equals_that_of_speculators_or_transformers(tmp_path: Path, name: str) -> None:
    target = make(tmp_path, name)
    reference, num_accepted = MtpReference(target, tmp_path / "reference"), 0
    for prompt in (PROMPT, PROMPT[::-1]):
        run, expected = drafted(target, prompt), list[list[int]]()
        sequence, start = prompt + run.tokens, len(prompt)
        for accepted in run.num_accepted:
            expected.append([sequence[start], *reference.chain(sequence[: start + 1], K)])
            start += accepted + 1
        assert run.blocks == expected
        num_accepted += sum(run.num_accepted)
    assert num_accepted > 0


def _change_tensor(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = load_file(target / "model.safetensors")
        tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})

    return change


def _show_the_row_of_the_first_token(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mtp_checkpoint._layer

    def wrong(spec: Any) -> Any:
        layer = honest(spec)
        assert layer is not None
        mask = layer.mixer.mask.model_copy(update={"first_key": 0})
        return layer.model_copy(update={"mixer": layer.mixer.model_copy(update={"mask": mask})})

    monkeypatch.setattr(mtp_checkpoint, "_layer", wrong)


def _read_features_before_the_norm(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MtpDrafter, "context_features", lambda self, ops, run: run.hidden)


def _chain_features_before_the_norm(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = MtpDrafter.propose
    monkeypatch.setattr(
        MtpDrafter, "propose", lambda self, *given: honest(replace(self, has_normed_features=False), *given)
    )


CHANGES = {
    "the norm of embeddings": _change_tensor("mtp.pre_fc_norm_embedding.weight"),
    "the norm of features": _change_tensor("mtp.pre_fc_norm_hidden.weight"),
    "the projection": _change_tensor("mtp.fc.weight"),
    "keys of the context": _change_tensor("mtp.layers.0.self_attn.k_norm.weight"),
    "gates of the layer": _change_tensor("mtp.layers.0.self_attn.q_proj.weight"),
    "the last norm": _change_tensor("mtp.norm.weight"),
    "the row of the first token": _show_the_row_of_the_first_token,
    "the target's norm": _read_features_before_the_norm,
    "the norm of a draft's feature": _chain_features_before_the_norm,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen"), "Qwen3.5")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_head_drafts_something_else_and_changes_no_token(
    tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    run, target = drafted(qwen), make(tmp_path, "Qwen3.5")
    change(target, monkeypatch)
    changed = drafted(target)
    assert changed.tokens[:NUM_NEW] == run.tokens[:NUM_NEW]
    assert changed.blocks != run.blocks


def test_every_k_gives_the_target_s_tokens_and_the_same_chain_as_far_as_it_goes(qwen: Path) -> None:
    executor = make_executor(qwen, qwen)
    for sampling in (StepSampling(), StepSampling(temperature=0.8, top_k=9, seed=3)):
        runs = [decode(executor, PROMPT, NUM_NEW, num_draft_tokens=k, sampling=sampling) for k in (0, 1, 3, 7)]
        assert all(run.tokens[:NUM_NEW] == runs[0].tokens[:NUM_NEW] for run in runs)
        assert runs[1].blocks[0] == runs[3].blocks[0][:2] and runs[2].blocks[0] == runs[3].blocks[0][:4]
        assert sum(runs[3].num_accepted) > 0


def test_chains_depend_not_on_prompt_chunks(qwen: Path) -> None:
    """Also after a prompt of one token, whose row of features no draft sees."""
    for prompt in (PROMPT, [7]):
        whole = drafted(qwen, prompt)
        for chunk in (1, 5):
            assert drafted(qwen, prompt, chunk=chunk).blocks == whole.blocks


def test_hybrid_targets_give_the_texts_of_transformers_from_snapshots_on_two_ranks(tmp_path: Path) -> None:
    """Prefixes begin from snapshots of recurrent states, and pages with the head's keys and features."""
    target = make(tmp_path, "Qwen3.5 with experts")
    expected = expected_tokens(target)
    for tp_size in (1, 2):
        engine = build(tmp_path, tp_size=tp_size, drafter="mtp", max_seq_len=128)
        with LLM(engine.path, kv_cache_bytes=1 << 21, draft_length={1: K, 2: 1, 3: 0}) as llm:
            for first in (0, 3, 4):
                prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[first:]]
                outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_HYBRID, ignore_eos=True))
                assert [list(output.token_ids) for output in outputs] == expected[first:]
            statistics = llm.statistics.scheduler
            assert statistics.num_prefix_hit_tokens >= 68


def test_bfloat16_drafts_as_float32_at_the_first_anchor(qwen: Path) -> None:
    """Features and norms with offsets have dtypes of their own."""
    executor = make_executor(qwen, qwen, dtype=torch.bfloat16)
    assert drafted(qwen).blocks[0] == decode(executor, PROMPT, 2, num_draft_tokens=K).blocks[0]
