"""The interface of a target family, and all families."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from dflash_trt.checkpoint import families
from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta

LayerFields = dict[str, Any]  # of a LayerSpec
ReadLayers = Callable[[ConfigReader, DecoderSizes], list[LayerFields]]
ExpertNames = Callable[[str, str, Moe, Collection[str]], ForeignTable]
DeltaNames = Callable[[str, str, GatedDelta, int], ForeignTable]
ReadModel = Callable[[ConfigReader, DecoderSizes], dict[str, Any]]
OwnNames = Callable[[str, TargetSpec], ForeignTable]


@dataclass(frozen=True, kw_only=True)
class Family:
    """`architectures` as in config.json. `read_layers` reads the keys that only this family has.

    `activation` is that of config.json. `read_model` gives fields of a TargetSpec that are no layers; `defaults` are
    those of transformers, for keys that published files leave out. `own_names(model, spec)` names tensors that only
    this family has, or names in its own way; `model` is the prefix of all names.

    `expert_names(canonical, foreign, moe, stored_names)` names the tensors of one layer's experts; canonical and
    foreign are the prefixes of the layer. None for a family without experts. `delta_names(canonical, foreign, mixer,
    hidden_size)` does so for one layer's gated delta net. `has_offset_norms`: see TargetSpec. Tensors whose names begin
    with one of `left_out` are of parts that an engine has no use for.
    """

    architectures: tuple[str, ...]
    read_layers: ReadLayers
    expert_names: ExpertNames | None = None
    delta_names: DeltaNames | None = None
    has_offset_norms: bool = False
    left_out: tuple[str, ...] = ()
    activation: str = "silu"
    read_model: ReadModel | None = None
    own_names: OwnNames | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@cache
def all_families() -> Mapping[str, Family]:
    """Families by model_type."""
    modules: dict[str, Any] = {
        module.name: import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)
    }
    return {name: module.FAMILY for name, module in modules.items() if hasattr(module, "FAMILY")}


def family_of(architecture: object) -> str | None:
    """The model_type of the family with this architecture, or None."""
    return next((name for name, family in all_families().items() if architecture in family.architectures), None)
