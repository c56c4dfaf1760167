"""The interface of a target family, and all families."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from dflash_trt.checkpoint import families
from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.core.model.decoder import LayerSpec, TargetSpec
from dflash_trt.core.model.feed_forward import Moe

LayerFields = dict[str, Any]  # fields of a LayerSpec
ReadLayers = Callable[[ConfigReader, DecoderSizes], list[LayerFields]]
ExpertNames = Callable[[str, str, Moe, Collection[str]], ForeignTable]
LayerNames = Callable[[str, str, LayerSpec, int], ForeignTable]
MaxPositions = Callable[[ConfigReader, int], int]
MixerNames = Callable[[str, str, Any, int], ForeignTable]
ReadModel = Callable[[ConfigReader, DecoderSizes], dict[str, Any]]
OwnNames = Callable[[str, TargetSpec], ForeignTable]


@dataclass(frozen=True, kw_only=True)
class MtpTensors:
    """Modules of an MTP head of one layer in a target's checkpoint; `count_key` of config.json counts its layers.

    All of them begin with `prefix`. `{layer}` stands for the layer after the target's last one. `shared` are copies of
    modules of the target.
    """

    count_key: str
    prefix: str
    layer: str
    fc: str
    embedding_norm: str
    feature_norm: str
    norm: str
    shared: tuple[str, ...] = ()

    def of_layer(self, layer: str) -> "MtpTensors":
        """The names in a checkpoint, where the layer after the last one is `layer`."""
        names = {item.name: getattr(self, item.name) for item in fields(self)}
        return MtpTensors(
            **{name: text.format(layer=layer) for name, text in names.items() if name != "shared"},
            shared=tuple(text.format(layer=layer) for text in self.shared),
        )


# transformers 5.14 and speculators 0.9 read these (`conversion_mapping.py`, `convert/mtp/converter.py`).
MTP_MODULE = MtpTensors(
    count_key="mtp_num_hidden_layers",
    prefix="mtp.",
    layer="mtp.layers.0",
    fc="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    feature_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)
MTP_LAYER = MtpTensors(
    count_key="num_nextn_predict_layers",
    prefix="{layer}.",
    layer="{layer}",
    fc="{layer}.eh_proj",
    embedding_norm="{layer}.enorm",
    feature_norm="{layer}.hnorm",
    norm="{layer}.shared_head.norm",
    shared=("{layer}.embed_tokens", "{layer}.shared_head.head"),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A target family. `architectures` as in config.json; `read_layers` reads this family's own keys.

    `other_model_types` are other spellings in published files of a language model that this family computes.

    `activation` is config.json's. `read_model` gives fields of a TargetSpec that are no layers; `defaults` are
    transformers' defaults for keys that published files omit. `own_names(model, spec)` names tensors that only this
    family has, or names in its own way; `model` is the prefix of all names.

    `expert_names(canonical, foreign, moe, stored_names)` names the tensors of one layer's experts; canonical and
    foreign are the prefixes of the layer. None for a family without experts. `mixer_names`, by kind of mixer, do so
    with (canonical, foreign, mixer, hidden_size) for kinds that each family names in its way, and
    `layer_names(canonical, foreign, layer, hidden_size)` for names that differ from Llama's. `has_offset_norms`: see
    TargetSpec. An engine omits tensors whose names begin with one of `left_out`, modules in `left_out_modules`, and
    layers after the last one, which draft (`has_drafting_layers`), unless they are an `mtp` head that is the drafter.

    `max_positions(reader, trained)` are the implemented positions out of those that the model was trained for.
    """

    architectures: tuple[str, ...]
    other_model_types: tuple[str, ...] = ()
    read_layers: ReadLayers
    expert_names: ExpertNames | None = None
    mixer_names: Mapping[str, MixerNames] = field(default_factory=dict)
    layer_names: LayerNames | None = None
    max_positions: MaxPositions | None = None
    has_offset_norms: bool = False
    has_drafting_layers: bool = False
    mtp: MtpTensors | None = None
    left_out: tuple[str, ...] = ()
    left_out_modules: tuple[str, ...] = ()
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


def family_of(architecture: object, model_type: object) -> str | None:
    """The family with this architecture, or None; of several the one of this model_type, or the first."""
    names = [name for name, family in all_families().items() if architecture in family.architectures]
    return next((name for name in names if name == model_type), next(iter(names), None))
