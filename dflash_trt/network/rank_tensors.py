"""The canonical tensors of one rank, by name, as the network binds them. No names outlive the binding."""

from collections.abc import Callable
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

from dflash_trt.core.mapping import Mapping
from dflash_trt.formats.base import QuantizedWeight, slice_quantized
from dflash_trt.network.ops import Linear, T

_Weights = TypeVar("_Weights")
_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTensors(Generic[T]):
    """`quantized` has the quantized linear layers, including the copy of a tied embedding as lm_head.

    `slice_rows(tensor, start, stop)` should not copy. A missing tensor is a KeyError.
    """

    plain: AbcMapping[str, T]
    slice_rows: Callable[[T, int, int], T]
    quantized: AbcMapping[str, QuantizedWeight[T]] = field(default_factory=dict)
    mapping: Mapping = field(default_factory=Mapping)

    def __getitem__(self, name: str) -> T:
        return self.plain[name]

    def __contains__(self, name: str) -> bool:
        return name in self.plain or name in self.quantized

    def find(self, name: str) -> T | None:
        return self.plain.get(name)

    def linear(self, name: str) -> Linear[T]:
        weight = self.quantized[name] if name in self.quantized else self.plain[name]
        return Linear(weight=weight, bias=self.plain.get(f"{name}_bias"), name=name)

    def summed_linear(self, name: str, *, rank: int | None = None) -> Linear[T]:
        """A linear whose results the ranks add up: the bias must be added once, so only rank 0 keeps it.

        `rank` is that among the ranks which divide this linear (default: those of a group).
        """
        linear = self.linear(name)
        return replace(linear, bias=None) if (self.mapping.tp_rank if rank is None else rank) else linear

    def rows_of(self, linear: Linear[T], start: int, stop: int) -> Linear[T]:
        """The output features [start, stop) of a linear, as one of its own."""
        weight: T | QuantizedWeight[T]
        if isinstance(linear.weight, QuantizedWeight):
            weight = slice_quantized(linear.weight, start, stop, self.slice_rows)
        else:
            weight = self.slice_rows(linear.weight, start, stop)
        bias = None if linear.bias is None else self.slice_rows(linear.bias, start, stop)
        return Linear(weight=weight, bias=bias, name=linear.name, first_row=start)


def parts_of(weights: Any) -> dict[str, Any]:
    """Fields of a dataclass by name: for one with more of them."""
    return {item.name: getattr(weights, item.name) for item in fields(weights)}


def map_linears(weights: _Weights, change: Callable[[Linear[T]], Linear[T]]) -> _Weights:
    """The same weights with every Linear, however deep, replaced by `change` of it.

    Tensors stay unchanged.
    """
    return map_parts(weights, Linear, change)


def map_parts(weights: _Weights, kind: type[_Part] | tuple[type[Any], ...], change: Callable[[_Part], Any]) -> _Weights:
    """The same for parts of any kind, outermost first."""
    return cast(_Weights, _mapped(weights, kind, change))


def _mapped(value: Any, kind: type[_Part] | tuple[type[Any], ...], change: Callable[[_Part], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, kind, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _mapped(part, kind, change) for name, part in parts_of(value).items()})
    return value
