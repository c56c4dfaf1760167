"""What ranks exchange inside a TensorRT network: one network per rank, in threads that meet at every collective."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt.collectives import NativeCollectives, SharedRows
from dflash_trt.backends.tensorrt.host_views import host_tensor
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.mapping import Mapping
from dflash_trt.network.decoder import embedded
from dflash_trt.network.ops import OF_TOKENS
from tests.engines import make_executor
from tests.traces import GREEDY, SAMPLED, integers, logprobs, trace
from tests.trt import networks
from tests.trt.networks import MAX_SEQ_LEN
from tests.trt.ranks import InterpretedRanks, RankThreads, interpreted_ranks
from tests.trt.test_step_tokens import make_pair


@pytest.mark.parametrize("op", ["gathered_columns", "all_reduce"])
def test_two_ranks_exchange_what_plain_pytorch_exchanges(trt: ModuleType, op: str) -> None:
    def run(rank: int, threads: RankThreads) -> torch.Tensor:
        logger = make_logger(trt)
        network = trt.Builder(logger).create_network(0)
        layers = Layers(trt, network, logger)
        x = layers.add_input("x", "float32", (-1, 4), ("N", "V"))
        ops = TrtOps(layers, None, None, {}, NativeCollectives(layers, 2))  # type: ignore[arg-type]
        layers.mark_output(getattr(ops, op)(x), "out")
        return threads.interpreter(rank, trt, network, {}).run({"x": parts[rank]})["out"]

    parts = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) + 100
    threads = RankThreads(2)
    expected = parts[0] + parts[1] if op == "all_reduce" else torch.cat(parts, dim=1)
    for found in threads.run(lambda rank: run(rank, threads)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_in_order", [False, True])
def test_two_ranks_with_requests_of_their_own_exchange_rows(trt: ModuleType, is_in_order: bool) -> None:
    """Each has 3 rows, and half of an embedding of 8 tokens."""

    def run(rank: int, threads: RankThreads) -> dict[str, torch.Tensor]:
        logger = make_logger(trt)
        network = trt.Builder(logger).create_network(0)
        layers = Layers(trt, network, logger)
        sizes = {"x": (-1, 2), "parts": (-1, 2), "token_ids": (-1,)}
        given = {
            name: layers.add_input(
                name, "int32" if name == "token_ids" else "float32", shape, (name, "C")[: len(shape)]
            )
            for name, shape in sizes.items()
        }
        table = host_tensor("table", tables[rank])
        shared = SharedRows(layers, NativeCollectives(layers, 2), rank=rank, is_in_order=is_in_order)
        ops = TrtOps(layers, None, None, {}, None, shared)  # type: ignore[arg-type]
        made = {
            "rows": ops.all_gather_rows(given["x"], OF_TOKENS),
            "ids": ops.all_gather_rows(given["token_ids"], OF_TOKENS),
            "sums": ops.reduce_scatter_rows(given["parts"], OF_TOKENS),
            "logits": ops.all_gather_vocab(given["parts"], OF_TOKENS),
            "embedded": embedded(ops, table, given["token_ids"], 1.0, OF_TOKENS),
        }
        for name, tensor in made.items():
            layers.mark_output(tensor, name)
        own = {"x": x[rank], "parts": parts[rank], "token_ids": ids[rank]}
        return threads.interpreter(rank, trt, network, {"table": tables[rank]}).run(own)

    x, parts = torch.randn(2, 3, 2), torch.randn(2, 6, 2)
    ids, tables = torch.tensor([[0, 5, 7], [3, 4, 0]], dtype=torch.int32), torch.randn(2, 4, 2)
    threads = RankThreads(2)
    for rank, found in enumerate(threads.run(lambda rank: run(rank, threads))):
        own = slice(3 * rank, 3 * rank + 3)
        expected = {
            "rows": x.flatten(0, 1),
            "ids": ids.flatten(),
            "sums": parts.sum(0)[own],
            "logits": torch.cat((parts[0][own], parts[1][own]), 1),
            "embedded": tables.flatten(0, 1)[ids[rank].long()],
        }
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


class _Order:
    """A layer that notes in which order it is used."""

    def __init__(self, layer: Any, events: list[str]) -> None:
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_events", events)

    def __getattr__(self, name: str) -> Any:
        self._events.append(name)
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._events.append(f"{name} = {value}")
        setattr(self._layer, name, value)


def test_the_number_of_ranks_is_set_before_anything_is_read(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT derives the output's shape from it, when the output is first read."""
    events: list[str] = []
    add_layer = Layers.add_layer
    monkeypatch.setattr(Layers, "add_layer", lambda self, *arguments: _Order(add_layer(self, *arguments), events))
    logger = make_logger(trt)
    layers = Layers(trt, trt.Builder(logger).create_network(0), logger)
    x = layers.add_input("x", "float32", (6, 4), ("N", "V"))
    gathered = NativeCollectives(layers, 4).all_gather(x)
    assert events[0] == "num_ranks = 4"
    assert tuple(gathered.shape) == (24, 4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """2 K/V heads of the target and 1 of the drafter: ranks hold copies."""
    target, drafter = make_pair(tmp_path_factory.mktemp("pair"), num_key_value_heads=1)
    assert drafter is not None
    return target, drafter


def open_ranks(
    trt: ModuleType, checkpoints: tuple[Path, Path], num_ranks: int, collectives: CollectiveMode = "native"
) -> tuple[InterpretedRanks, Any]:
    theirs = make_executor(*checkpoints, max_seq_len=MAX_SEQ_LEN)
    sizes = {"num_ranks": num_ranks, "num_pages": theirs.limits.num_pages}
    return interpreted_ranks(trt, *checkpoints, collectives=collectives, **sizes), theirs


@pytest.mark.parametrize(
    ("num_ranks", "samplings", "collectives"), [(2, GREEDY, "native"), (4, SAMPLED, "native"), (2, SAMPLED, "plugin")]
)
def test_the_networks_of_all_ranks_together_give_one_ranks_tokens(
    trt: ModuleType, checkpoints: tuple[Path, Path], num_ranks: int, samplings: Any, collectives: CollectiveMode
) -> None:
    ours, theirs = open_ranks(trt, checkpoints, num_ranks, collectives)
    expected, runs = trace(theirs, samplings, num_draft_tokens=(3, 0, 3))
    found, _ = trace(ours, samplings, num_draft_tokens=(3, 0, 3))
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    assert sum(sum(run.num_accepted) for run in runs) > 0


@pytest.mark.parametrize("split_length", [16, 0])
def test_two_ranks_of_a_deterministic_engine_give_the_same_bits_in_every_step(
    trt: ModuleType, checkpoints: tuple[Path, Path], split_length: int
) -> None:
    """Log probabilities of a request by itself, at several K and chunks, and tokens among others; else they change."""

    def run(samplings: Any, *lengths: int, chunk: int) -> Any:
        ranks = interpreted_ranks(trt, *checkpoints, num_ranks=2, num_pages=64, split_length=split_length)
        return trace(ranks, samplings, num_draft_tokens=lengths, chunk=chunk)

    length = 8  # of the tokens that all have
    expected, [alone] = run(SAMPLED[:1], 0, chunk=14)
    blocks, _ = run(SAMPLED[:1], 3, chunk=14)
    chunks, _ = run(SAMPLED[:1], 1, 3, 2, chunk=2)  # the first of two gives a token that nobody takes
    found = [logprobs(blocks)[:length], logprobs(chunks)[1 : 1 + length]]
    same = [torch.equal(part, logprobs(expected)[:length]) for part in found]
    assert all(same) if split_length else not any(same)
    if split_length:
        _, runs = run(SAMPLED, 3, 0, 2, chunk=4)
        assert runs[0].tokens[:length] == alone.tokens[:length]


@pytest.mark.parametrize("weight", ["target.layers.1.o", "draft.layers.0.down", "target.lm_head"])
def test_a_changed_weight_of_one_rank_changes_the_tokens(
    trt: ModuleType, checkpoints: tuple[Path, Path], weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = networks.open_spec

    def open_spec(*given: Any, **options: Any) -> Any:
        spec, tensors = honest(*given, **options)
        if spec.mapping.rank == 1:
            tensors[weight].neg_()
        return spec, tensors

    monkeypatch.setattr(networks, "open_spec", open_spec)
    ours, theirs = open_ranks(trt, checkpoints, 2)
    expected, _ = trace(theirs, GREEDY, num_draft_tokens=(3,), num_new=6)
    found, _ = trace(ours, GREEDY, num_draft_tokens=(3,), num_new=6)
    assert integers(found) != integers(expected)


def test_every_rank_of_two_and_of_four_holds_one_kv_head(checkpoints: tuple[Path, Path]) -> None:
    for num_ranks in (2, 4):
        mapping = Mapping(world_size=num_ranks, tp_size=num_ranks, rank=1)
        spec, tensors = networks.open_spec(*checkpoints, dtype="float32", mapping=mapping)
        assert {state.num_kv_heads for state in spec.states} == {1}
        assert len(tensors["draft.kv"]) == 2 * 2 * 8  # K and V of two layers, a head of 8
