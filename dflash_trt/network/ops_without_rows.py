"""The ops of a rank that has no rows in a step of ranks with requests of their own.

The network runs as ever; what it computes of this rank's rows is nothing, and of all ranks' rows this rank's part.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, cast

from dflash_trt.network.decoder import Layer
from dflash_trt.network.ops import ExchangedRows, Ops, T
from dflash_trt.network.rank_tensors import map_parts
from dflash_trt.network.state import StepState
from dflash_trt.network.step import Network, logits_at, run_drafter, run_layers


class NoRows:
    """A value without rows, and any part of one. `features` None are token ids."""

    def __init__(self, features: int | None = None) -> None:
        self.features = features

    def __getattr__(self, name: str) -> "NoRows":
        return self

    def __call__(self, *args: Any, **named: Any) -> "NoRows":
        return self


class OpsWithoutRows(Generic[T]):
    """Stands for `Ops[T]`: an op of values without rows has none either.

    `no_rows` makes the tensor [0, features] with which this rank takes part in an exchange, or of token ids [0].
    """

    def __init__(self, ops: Ops[T], no_rows: Callable[[int | None], T]) -> None:
        self._ops, self._no_rows = ops, no_rows

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def run(*args: Any, **named: Any) -> Any:
            found = _without_rows(chain(args, named.values()))
            return op(*args, **named) if found is None else found

        return run

    def token_rows(self) -> Any:
        return NoRows()

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        """The only op whose results are exchanged."""
        return NoRows(weight.shape[-1])

    def split(self, x: Any, sizes: Sequence[int]) -> Sequence[Any]:
        return [x] * len(sizes) if isinstance(x, NoRows) else self._ops.split(x, sizes)

    def all_gather_rows(self, x: Any, exchanged: ExchangedRows) -> T:
        return self._ops.all_gather_rows(self._no_rows(x.features), exchanged)

    def reduce_scatter_rows(self, x: T, exchanged: ExchangedRows) -> Any:
        self._ops.reduce_scatter_rows(x, exchanged)
        return NoRows()

    def exchanged_moe(self, x: Any, experts: Any, moe: Any, exchanged: ExchangedRows, routed: Any = None) -> Any:
        routed = None if routed is None else self._no_rows(routed.features)
        self._ops.exchanged_moe(self._no_rows(x.features), experts, moe, exchanged, routed)
        return NoRows()

    def all_gather_vocab(self, logits: T, exchanged: ExchangedRows) -> Any:
        self._ops.all_gather_vocab(logits, exchanged)
        return NoRows()


def without_mixers(network: Network[T]) -> Network[T]:
    """The network for `OpsWithoutRows`: mixers exchange nothing, and may have a backend's code in them."""

    def changed(layer: Layer[T]) -> Layer[T]:
        return replace(layer, mixer=cast(Any, NoRows()))

    return map_parts(network, Layer, changed)


def share_step(
    without_rows: OpsWithoutRows[T],
    network: Network[T],
    state: StepState[T],
    *,
    num_draft_tokens: int,
    num_prompt_parts: int,
) -> None:
    """A step on a rank that has no rows in it: what other ranks' rows need, in the order in which they need it.

    `network` is without mixers.
    """
    ops: Any = without_rows
    no_rows = ops.token_rows()
    target = run_layers(ops, network, no_rows, state)
    logits_at(ops, network, target.hidden, no_rows, ExchangedRows(num_draft_tokens + 1))
    for part in range(num_prompt_parts):
        logits_at(ops, network, target.hidden, no_rows, ExchangedRows(prompt_part=part))
    run_drafter(ops, network, no_rows, state, target, no_rows, num_draft_tokens=num_draft_tokens)


def _without_rows(values: Iterable[Any]) -> NoRows | None:
    for value in values:
        of_value = value if isinstance(value, list | tuple) else (value,)
        found = next((item for item in of_value if isinstance(item, NoRows)), None)
        if found is not None:
            return found
    return None
