"""Sinks, score scales and soft caps of attention: the TensorRT network gives torch's tokens with them."""

import pytest
import torch

from dflash_trt.backends.tensorrt import lowering_attention as trt_attention
from tests import engines
from tests.engines import make_executor
from tests.scored_pairs import SCORES, score_as
from tests.traces import GREEDY, integers, logprobs, trace
from tests.trt import networks
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair
from tests.trt.test_plugins import PluginReference, define_with_plugins
from tests.trt.test_step_tokens import PAIRS, make_pair


def make_scored_executors(trt, root, monkeypatch, fields, *, name):
    """Ours, over the interpreted network of plain layers, and torch's."""
    score_as(monkeypatch, fields, engines, networks)
    pair = make_pair(root, **PAIRS[name])
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    return InterpretedExecutor(define_pair(trt, *pair), num_pages=theirs.limits.num_pages), theirs


def make_nodes(trt, root, monkeypatch, fields, **options):
    """An executor over plugin nodes, the nodes, and torch's executor."""
    score_as(monkeypatch, fields, engines, networks)
    pair = make_pair(root, **PAIRS["sliding target layers"])
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    defined, nodes = define_with_plugins(trt, *pair, **options)
    plugins = (nodes, PluginReference())
    return InterpretedExecutor(defined, num_pages=theirs.limits.num_pages, plugins=plugins), nodes, theirs


def greedy_trace(executor):
    return trace(executor, GREEDY, num_draft_tokens=(3, 0, 3))


@pytest.mark.parametrize("pair", ["sliding target layers", "non-causal window from the anchor"])
@pytest.mark.parametrize("name", SCORES)
def test_plain_layers_give_torchs_tokens(trt, tmp_path, monkeypatch, name, pair):
    ours, theirs = make_scored_executors(trt, tmp_path, monkeypatch, SCORES[name], name=pair)
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


def _swap_sinks(monkeypatch):
    honest = trt_attention.attend_pages

    def swapped(layers, index, q, pages, gqa, sinks):
        return honest(layers, index, q, pages, gqa, sinks and layers.gather(sinks, layers.ints([1, 0, 3, 2], (4,))))

    monkeypatch.setattr(trt_attention, "attend_pages", swapped)


def _without(**fields):
    def perturb(monkeypatch):
        honest = trt_attention._attend

        def attend(layers, q, keys, values, mask, gqa, *rest):
            return honest(layers, q, keys, values, mask, gqa.model_copy(update=fields), *rest)

        monkeypatch.setattr(trt_attention, "_attend", attend)

    return perturb


@pytest.mark.parametrize(
    ("name", "perturb"),
    [("sinks", _swap_sinks), ("a scale", _without(scale=None)), ("a soft cap", _without(softcap=None))],
)
def test_layers_that_score_otherwise_are_noticed(trt, tmp_path, monkeypatch, name, perturb):
    perturb(monkeypatch)
    ours, theirs = make_scored_executors(trt, tmp_path, monkeypatch, SCORES[name], name="sliding target layers")
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert (logprobs(found[:1]) - logprobs(expected[:1])).abs().max() > 1e-3  # the first step has the same inputs


@pytest.mark.parametrize("name", SCORES)
def test_plugin_nodes_that_keep_their_contract_give_torchs_tokens(trt, tmp_path, monkeypatch, name):
    ours, _, theirs = make_nodes(trt, tmp_path, monkeypatch, SCORES[name])
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert integers(found) == integers(expected)


@pytest.mark.parametrize(
    ("name", "other"), [("sinks", {"has_sinks": 0}), ("a scale", {"score_scale": 0.25}), ("a soft cap", {"softcap": 0})]
)
def test_a_node_with_another_field_is_noticed(trt, tmp_path, monkeypatch, name, other):
    ours, nodes, theirs = make_nodes(trt, tmp_path, monkeypatch, SCORES[name])
    for node in nodes:
        if node.name == "AttendPages":
            assert set(other) <= set(node.fields)
            node.fields |= other
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert (logprobs(found[:1]) - logprobs(expected[:1])).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_has_its_own_sinks_in_float32(trt, tmp_path, monkeypatch, dtype):
    _, nodes, _ = make_nodes(trt, tmp_path, monkeypatch, SCORES["sinks"], dtype=dtype)
    readers = [node for node in nodes if node.name == "AttendPages"]
    assert len({node.inputs[-1] for node in readers}) == len(readers) == 4
    assert {(node.given[-1].dtype, tuple(node.given[-1].shape)) for node in readers} == {(trt.float32, (4,))}
