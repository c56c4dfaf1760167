"""Sinks, score scales and soft caps of attention: the TensorRT network gives torch's tokens with them."""

import pytest
import torch

from tests import engines
from tests.engines import make_executor
from tests.scored_pairs import SCORES, score_as
from tests.traces import GREEDY, integers, logprobs, trace
from tests.trt import networks
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair
from tests.trt.test_step_tokens import PAIRS, make_pair


def make_executors(trt, root, monkeypatch, fields, *, name="sliding target layers", **options):
    """Ours, over the interpreted network, its plugin nodes, and torch's."""
    score_as(monkeypatch, fields, engines, networks)
    pair = make_pair(root, **PAIRS[name])
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    defined = define_pair(trt, *pair, **options)
    return InterpretedExecutor(defined, num_pages=theirs.limits.num_pages), defined.nodes, theirs


def greedy_trace(executor):
    return trace(executor, GREEDY, num_draft_tokens=(3, 0, 3))


@pytest.mark.parametrize("pair", ["sliding target layers", "non-causal window from the anchor"])
@pytest.mark.parametrize("name", SCORES)
def test_nodes_give_torchs_tokens(trt, tmp_path, monkeypatch, name, pair):
    ours, _, theirs = make_executors(trt, tmp_path, monkeypatch, SCORES[name], name=pair)
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "other"), [("sinks", {"has_sinks": 0}), ("a scale", {"score_scale": 0.25}), ("a soft cap", {"softcap": 0})]
)
def test_a_node_with_another_field_is_noticed(trt, tmp_path, monkeypatch, name, other):
    ours, nodes, theirs = make_executors(trt, tmp_path, monkeypatch, SCORES[name])
    for node in nodes:
        if node.name == "AttendPages":
            assert set(other) <= set(node.fields)
            node.fields |= other
    expected, _ = greedy_trace(theirs)
    found, _ = greedy_trace(ours)
    assert (logprobs(found[:1]) - logprobs(expected[:1])).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_has_its_own_sinks_in_float32(trt, tmp_path, monkeypatch, dtype):
    _, nodes, _ = make_executors(trt, tmp_path, monkeypatch, SCORES["sinks"], dtype=dtype)
    readers = [node for node in nodes if node.name == "AttendPages"]
    assert len({node.inputs[-1] for node in readers}) == len(readers) == 4
    assert {(node.given[-1].dtype, tuple(node.given[-1].shape)) for node in readers} == {(trt.float32, (4,))}
