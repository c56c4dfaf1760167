"""Specs whose layers are alike, from flat fields and seen as flat fields."""

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.core.model.decoder import DecoderSpec
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.gqa import AttentionMask, Gqa

_MIXER = set(Gqa.model_fields) - {"mask"}
_FEED_FORWARD = {"intermediate_size": "intermediate_size", "has_mlp_bias": "has_bias"}


def layered(
    masks: Iterable[AttentionMask | Mapping[str, Any]],
    *,
    moe: Mapping[str, Any] | None = None,
    moe_layer_ids: Iterable[int] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Fields of a DecoderSpec of one layer for each mask, with experts in the layers of `moe_layer_ids`."""
    mixer = {name: fields.pop(name) for name in _MIXER & set(fields)}
    dense = {ours: fields.pop(name) for name, ours in _FEED_FORWARD.items() if name in fields}
    kinds = [{"kind": "dense", **dense}, {"kind": "moe", **(moe or {})}]
    layers = [
        {"mixer": {"kind": "gqa", **mixer, "mask": mask}, "feed_forward": kinds[i in set(moe_layer_ids)]}
        for i, mask in enumerate(masks)
    ]
    return {**fields, "layers": tuple(layers)}


class Flat:
    """A spec's own fields, and those of its layers, which must be alike in them."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec

    @property
    def masks(self) -> tuple[AttentionMask, ...]:
        return tuple(layer.mixer.mask for layer in self._spec.layers)

    @property
    def moe(self) -> Moe | None:
        """None where no layer has experts."""
        kinds = {layer.feed_forward for layer in self._spec.layers if isinstance(layer.feed_forward, Moe)}
        assert len(kinds) <= 1
        return next(iter(kinds), None)

    @property
    def has_mlp_bias(self) -> bool:
        (dense,) = {layer.feed_forward for layer in self._spec.layers}
        assert isinstance(dense, Dense)
        return dense.has_bias

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._spec, name):
            return getattr(self._spec, name)
        (value,) = {getattr(layer.mixer, name) for layer in self._spec.layers}
        return value
