"""Pairs whose attention has sinks, a score scale or a soft cap, which no dense family has yet."""

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.core.model.decoder import DecoderSpec

SCORES: dict[str, dict[str, Any]] = {
    "sinks": {"has_sinks": True},
    "a scale": {"scale": 0.6},
    "a soft cap": {"softcap": 0.7},
    "sinks, a scale and a soft cap": {"has_sinks": True, "scale": 0.6, "softcap": 0.7},
}


class ScoredPair:
    """An opened pair whose layers have these fields of `Gqa`, with random sinks. Drafters have no sinks."""

    def __init__(self, pair: CheckpointPair, fields: dict[str, Any]) -> None:
        self._pair = pair
        self.quantization = pair.quantization
        self.target = scored(pair.target, fields)
        self.draft = None if pair.draft is None else scored(pair.draft, fields | {"has_sinks": False})

    def iter_weights(self, *, dtype: torch.dtype, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        random = torch.Generator().manual_seed(0)
        table = self.target.weights()
        sinks = ((name, 1.0 + torch.randn(table[name].shape, generator=random)) for name in table if "sinks" in name)
        given = self._pair.iter_weights(dtype=dtype, **options)
        return itertools.chain(given, ((name, tensor.to(dtype)) for name, tensor in sinks))


def scored(decoder: Any, fields: dict[str, Any]) -> Any:
    assert isinstance(decoder, DecoderSpec)
    mixers = [layer.mixer.model_copy(update=fields) for layer in decoder.layers]
    layers = zip(decoder.layers, mixers, strict=True)
    return decoder.model_copy(update={"layers": tuple(layer.model_copy(update={"mixer": m}) for layer, m in layers)})


def score_as(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], *modules: ModuleType) -> None:
    """Pairs that these modules open from now on."""
    for module in modules:
        monkeypatch.setattr(
            module, "open_pair", lambda *given, **options: ScoredPair(open_pair(*given, **options), fields)
        )
