"""What TensorRT understood computes what torch computes: the network is read back and run, over whole traces."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dflash_trt
from dflash_trt.backends.tensorrt import lowering_attention as trt_attention
from dflash_trt.backends.tensorrt import lowering_pages as trt_pages
from dflash_trt.backends.tensorrt import lowering_sampling as trt_sampling
from dflash_trt.backends.tensorrt import ops as trt_ops
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.engines import make_executor
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter
from tests.gemma_targets import make_gemma
from tests.traces import GREEDY, SAMPLED, integers, logprobs, trace
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair

DEMO = Path(dflash_trt.__file__).parent / "demo"

PAIRS = {
    "Qwen3, two taps for two layers": {},
    "Llama": {"family": "llama"},
    "three taps for two layers, out of order": {"target_layer_ids": (2, 0, 1)},
    "causal sliding and full draft layers": {
        "num_layers": 3,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 5,
    },
    "non-causal sliding draft layers": {
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal window from the anchor": {
        "speculators": True,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 3,
    },
    "non-causal window from the anchor": {
        "speculators": True,
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 3,
        "sliding_window_non_causal": True,
    },
    "sliding target layers": {"target": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}},
    "Phi-4, half of a head rotated": {
        "family": "phi3",
        "target": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    },
    "Qwen2, windows in half of the layers": {
        "family": "qwen2",
        "target": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "seed": 3},
    },
    "Mistral, windows everywhere": {"family": "mistral"},
    "biases and a scaled embedding": {"attention_bias": True, "input_embedding_scale": 0.5},
    "a reduced draft vocabulary": {"speculators": True},
    "no drafter": {"has_drafter": False},
    "Gemma 3": {"gemma": "gemma3_text", "final_logit_softcapping": 2.0},
    "Gemma 4, two geometries of pages": {"gemma": "gemma4_text"},
}


def make_pair(root, *, family="qwen3", gemma=None, target=None, speculators=False, has_drafter=True, **options):
    """A target of twelve tokens, so that random drafts are accepted now and then, and its drafter."""
    if gemma is not None:
        path = make_gemma(root / "target", family=gemma)
    else:
        path = make_target(root / "target", vocab_size=12, tokenizer=False, family=family, **(target or {}))
    if not has_drafter:
        return path, None
    make = make_speculators_drafter if speculators else make_zlab_drafter
    sizes = {"block_size": 4} | ({"draft_vocab_size": 8} if speculators else {})
    return path, make(root / "drafter", target_dir=path, **(sizes | options))


FP8_PAGES = QuantizationSpec(
    target_kv=tuple(LayerKvScales(k=0.02 + 0.01 * i, v=0.01) for i in range(4)),
    draft_kv=(LayerKvScales(k=0.03, v=0.007), LayerKvScales()),
)


def make_executors(trt, root, *, pages=None, **options):
    """Ours, over the interpreted network, and torch's."""
    target, drafter = make_pair(root, **options)
    theirs = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN, quantization=pages)
    defined = define_pair(trt, target, drafter, pages=pages)
    return InterpretedExecutor(defined, num_pages=theirs.limits.num_pages), theirs


@pytest.mark.parametrize("name", PAIRS)
def test_every_step_of_a_mixed_trace_equals_torchs(trt, tmp_path, name):
    ours, theirs = make_executors(trt, tmp_path, **PAIRS[name])
    ks = (theirs.limits.max_draft_len,)
    expected, runs = trace(theirs, GREEDY, num_draft_tokens=ks)
    found, _ = trace(ours, GREEDY, num_draft_tokens=ks)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    if ks != (0,):
        accepted = [count for run in runs for count in run.num_accepted]
        assert 0 < sum(accepted) < sum(len(block) - 1 for run in runs for block in run.blocks)  # and rejections


@pytest.mark.skipif(not (DEMO / "target" / "config.json").is_file(), reason="the demo pair has not been trained")
def test_the_demo_pair_gives_torchs_tokens(trt):
    target, drafter = DEMO / "target", DEMO / "drafter"
    theirs = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN)
    ours = InterpretedExecutor(define_pair(trt, target, drafter), num_pages=theirs.limits.num_pages)
    ks = (theirs.limits.max_draft_len,)
    expected, runs = trace(theirs, GREEDY, num_draft_tokens=ks)
    found, _ = trace(ours, GREEDY, num_draft_tokens=ks)
    assert integers(found) == integers(expected)
    assert sum(sum(run.num_accepted) for run in runs) > 0


def test_pages_hold_what_torchs_hold_and_nothing_else_is_written(trt, tmp_path):
    ours, theirs = make_executors(trt, tmp_path)
    for step_executor in (ours, theirs):
        trace(step_executor, GREEDY, num_draft_tokens=(3,))
    for name, pages in ours.state.items():
        role, layer = name.split("_kv.")
        expected = getattr(theirs._state, f"{role}_kv")[int(layer)].tensor
        assert expected.count_nonzero() > 0
        torch.testing.assert_close(pages, expected, rtol=0, atol=1e-4)


def test_what_others_left_in_the_pages_changes_nothing_even_if_it_is_not_finite(trt, tmp_path):
    expected, _ = trace(make_executors(trt, tmp_path / "clean")[1], SAMPLED, num_draft_tokens=(3, 0, 3))
    ours, theirs = make_executors(trt, tmp_path / "used")
    caches = (*theirs._state.target_kv, *theirs._state.draft_kv)
    for pages in (*ours.state.values(), *(cache.tensor for cache in caches)):
        pages.fill_(torch.nan)
    for executor in (ours, theirs):
        found, _ = trace(executor, SAMPLED, num_draft_tokens=(3, 0, 3))
        assert integers(found) == integers(expected)


@pytest.mark.parametrize("pages", [FP8_PAGES, FP8_PAGES.model_copy(update={"draft_kv": None})])
def test_fp8_pages_hold_torchs_codes_and_give_torchs_tokens(trt, tmp_path, pages):
    ours, theirs = make_executors(trt, tmp_path, pages=pages)
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3, 0, 3))
    found, _ = trace(ours, GREEDY, num_draft_tokens=(3, 0, 3))
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    scaled = [state.name for state in ours._spec.states if state.scales is not None]
    kinds = {name: codes.dtype for name, codes in ours.state.items()}
    assert [name for name, dtype in kinds.items() if dtype == torch.float8_e4m3fn] == scaled
    differing = torch.cat([_codes(ours, name) != _codes(theirs, name) for name in scaled])
    assert differing.float().mean() < 1e-3  # values on the edge between two codes


def _codes(executor, name):
    if isinstance(executor, InterpretedExecutor):
        return executor.state[name].view(torch.uint8).flatten()
    role, layer = name.split("_kv.")
    return getattr(executor._state, f"{role}_kv")[int(layer)].tensor.view(torch.uint8).flatten()


def test_keys_written_with_another_scale_are_noticed(trt, tmp_path, monkeypatch):
    honest = trt_pages.Pages.rows

    def rescaled(self, layers, kv):
        scales = self.scales.model_copy(update={"k": 2 * self.scales.k})
        return honest(replace(self, scales=scales), layers, kv)

    monkeypatch.setattr(trt_pages.Pages, "rows", rescaled)
    ours, theirs = make_executors(trt, tmp_path, pages=FP8_PAGES)
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3,))
    found, _ = trace(ours, GREEDY, num_draft_tokens=(3,))
    assert (logprobs(found[:1]) - logprobs(expected[:1])).abs().max() > 1e-3  # the first step has the same inputs


def test_one_network_serves_every_k_of_a_wide_drafter(trt, tmp_path):
    ours, theirs = make_executors(trt, tmp_path, block_size=16)
    ks = (15, 1, 7, 0, 15)
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=ks)
    found, _ = trace(ours, GREEDY, num_draft_tokens=ks)
    assert integers(found) == integers(expected)


def test_sampled_tokens_equal_torchs_for_every_filter(trt, tmp_path):
    ours, theirs = make_executors(trt, tmp_path)
    expected, runs = trace(theirs, SAMPLED, num_draft_tokens=(3,), num_new=12)
    found, _ = trace(ours, SAMPLED, num_draft_tokens=(3,), num_new=12)
    assert integers(found) == integers(expected)
    assert sum(sum(run.num_accepted) for run in runs) > 0


def _shift_pages(monkeypatch):
    honest = trt_attention.index_step

    def shifted(layers, inputs, *, page_size):
        index = honest(layers, inputs, page_size=page_size)
        return replace(index, page_table_of_row=layers.binary("SUM", index.page_table_of_row, 1))

    monkeypatch.setattr(trt_attention, "index_step", shifted)


def _swap_keys_and_values(monkeypatch):
    honest = trt_attention.read_pages
    monkeypatch.setattr(trt_attention, "read_pages", lambda *given, **options: honest(*given, **options)[::-1])


def _group_heads_the_other_way(monkeypatch):
    honest = trt_attention._attend

    def regrouped(layers, q, *rest):
        if len(q.shape) != 4:
            return honest(layers, q, *rest)
        _, kv_heads, group, head_dim = q.shape
        swapped = layers.transpose(layers.reshape(q, (-1, group, kv_heads, head_dim)), (0, 2, 1, 3))
        return honest(layers, swapped, *rest)

    monkeypatch.setattr(trt_attention, "_attend", regrouped)


def _widen_windows(monkeypatch):
    for name in ("attend_pages", "attend_draft"):
        honest = getattr(trt_attention, name)

        def widened(layers, index, *given, honest=honest, **options):
            given = tuple(_widened(item) if isinstance(item, Gqa) else item for item in given)
            return honest(layers, index, *given, **options)

        monkeypatch.setattr(trt_attention, name, widened)


def _widened(gqa):
    if gqa.mask.window is None:
        return gqa
    return gqa.model_copy(update={"mask": gqa.mask.model_copy(update={"window": gqa.mask.window + 1})})


def _count_windows_from_each_slot(monkeypatch):
    honest = trt_attention._block_mask

    def unanchored(layers, index, context_lens, mask, block_width):
        per_slot = mask.model_copy(update={"is_window_anchored": False})
        return honest(layers, index, context_lens, per_slot, block_width)

    monkeypatch.setattr(trt_attention, "_block_mask", unanchored)


def _turn_rope_the_other_way(monkeypatch):
    honest = trt_ops.TrtOps.rope
    monkeypatch.setattr(
        trt_ops.TrtOps, "rope", lambda self, x, table: honest(self, x, (table[0], self._layers.unary("NEG", table[1])))
    )


def _compare_with_the_row_itself(monkeypatch):
    honest = trt_sampling.sample_and_accept

    def shifted(layers, logits, inputs, **options):
        rows = layers.binary("MAX", layers.binary("SUB", inputs.logit_rows, 1), 0)
        return honest(layers, logits, replace(inputs, logit_rows=rows), **options)

    monkeypatch.setattr(trt_sampling, "sample_and_accept", shifted)


TWINS = [
    _shift_pages,
    _swap_keys_and_values,
    _group_heads_the_other_way,
    _widen_windows,
    _turn_rope_the_other_way,
    _compare_with_the_row_itself,
]


@pytest.mark.parametrize(
    ("perturb", "name"),
    [
        *((perturb, "non-causal sliding draft layers") for perturb in TWINS),
        (_count_windows_from_each_slot, "causal window from the anchor"),
        (_count_windows_from_each_slot, "non-causal window from the anchor"),
    ],
)
def test_a_perturbed_lowering_computes_something_else(trt, tmp_path, monkeypatch, perturb, name):
    perturb(monkeypatch)
    ours, theirs = make_executors(trt, tmp_path, **PAIRS[name])
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3,), num_new=4)
    try:
        found, _ = trace(ours, GREEDY, num_draft_tokens=(3,), num_new=4)
    except (AssertionError, IndexError):
        return  # it could not even keep the step's invariants
    assert integers(found) != integers(expected)


def test_seed_and_position_exchanged_draw_other_tokens(trt, tmp_path, monkeypatch):
    honest = trt_sampling.noise_and_test_numbers

    def exchanged(layers, seed, position, size):
        return honest(layers, position, seed, size)

    monkeypatch.setattr(trt_sampling, "noise_and_test_numbers", exchanged)
    ours, theirs = make_executors(trt, tmp_path)
    expected, _ = trace(theirs, SAMPLED, num_draft_tokens=(3,), num_new=4)
    found, _ = trace(ours, SAMPLED, num_draft_tokens=(3,), num_new=4)
    assert integers(found) != integers(expected)
