"""Embedding and head, of which each rank with requests of its own has a part of the vocabulary."""

from dflash_trt.network.ops import ExchangedRows, Linear, Ops, T


def embedded(ops: Ops[T], table: T, token_ids: T, scale: float, exchanged: ExchangedRows) -> T:
    """Token ids [N] -> [N, H]. Ranks with requests of their own each have a part of the vocabulary."""
    rows = ops.embedding(table, ops.all_gather_rows(token_ids, exchanged), scale)
    return ops.reduce_scatter_rows(rows, exchanged)


def head_logits(ops: Ops[T], x: T, head: Linear[T], exchanged: ExchangedRows) -> T:
    """Normed [N, H] -> [N, V], of a head that all ranks divide by vocabulary."""
    return ops.all_gather_vocab(ops.linear(ops.all_gather_rows(x, exchanged), head), exchanged)
