"""What TensorRT understood computes what torch computes: the network is read back and run, over whole traces."""

from pathlib import Path

import pytest
import torch

import dflash_trt
from dflash_trt.backends.tensorrt.ops import TrtOps
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


def make_executors(trt, root, *, pages=None, perturb=lambda nodes: None, **options):
    """Ours, over the interpreted network, whose plugin nodes may be perturbed, and torch's."""
    target, drafter = make_pair(root, **options)
    theirs = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN, quantization=pages)
    defined = define_pair(trt, target, drafter, pages=pages)
    perturb(defined.nodes)
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


def test_nodes_with_another_scale_of_keys_are_noticed(trt, tmp_path):
    def rescale(nodes):
        for node in nodes:
            if node.name == "AttendPages":
                node.fields["k_scale"] /= 50  # codes saturate

    ours, theirs = make_executors(trt, tmp_path, pages=FP8_PAGES, perturb=rescale)
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


def _exchange(first, second, *, name):
    """Of the inputs of all nodes of this name."""

    def perturb(nodes):
        for node in nodes:
            if node.name == name:
                node.given[first], node.given[second] = node.given[second], node.given[first]

    return perturb


def _set(field, change, *, name):
    def perturb(nodes):
        for node in nodes:
            if node.name == name:
                node.fields[field] = change(node.fields[field])

    return perturb


WINDOWS = "non-causal sliding draft layers"
PERTURBED = {
    "K and V of the target": (_exchange(1, 2, name="AttendPages"), WINDOWS),
    "K and V of a block": (_exchange(3, 4, name="AttendDraft"), WINDOWS),
    "one state twice": (_set("state", lambda state: state // 2, name="AttendPages"), WINDOWS),
    "a wider window": (_set("window", lambda window: window + 1, name="AttendDraft"), WINDOWS),
    "a window of the target": (_set("window", lambda window: window + 1, name="AttendPages"), "sliding target layers"),
    "a causal window from each slot": (
        _set("is_window_anchored", lambda is_anchored: 0, name="AttendDraft"),
        "causal window from the anchor",
    ),
    "a window from each slot": (
        _set("is_window_anchored", lambda is_anchored: 0, name="AttendDraft"),
        "non-causal window from the anchor",
    ),
}


@pytest.mark.parametrize("change", PERTURBED)
def test_a_perturbed_node_computes_something_else(trt, tmp_path, change):
    perturb, name = PERTURBED[change]
    ours, theirs = make_executors(trt, tmp_path, perturb=perturb, **PAIRS[name])
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3,), num_new=4)
    found, _ = trace(ours, GREEDY, num_draft_tokens=(3,), num_new=4)
    assert integers(found) != integers(expected)


def test_a_rope_that_turns_the_other_way_is_noticed(trt, tmp_path, monkeypatch):
    honest = TrtOps.rope
    monkeypatch.setattr(
        TrtOps, "rope", lambda self, x, table: honest(self, x, (table[0], self._layers.unary("NEG", table[1])))
    )
    ours, theirs = make_executors(trt, tmp_path)
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3,), num_new=4)
    found, _ = trace(ours, GREEDY, num_draft_tokens=(3,), num_new=4)
    assert integers(found) != integers(expected)
