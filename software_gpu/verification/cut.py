"""An engine with few layers of another one: each kind at its full size, and those whose outputs the drafter reads."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.core.model.decoder import DecoderSpec, LayerSpec
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.engine_dir import EngineDir, EngineFile, PretrainedConfig, tensor_headers, weights_name
from dflash_trt.engine_dir.manifest import MANIFEST_NAME
from dflash_trt.engine_dir.provenance import PROVENANCE_NAME
from dflash_trt.engine_dir.tensor_file import write_tensor_file
from dflash_trt.engine_dir.writing import json_bytes

# Of a batch that an executor of PTX runs in minutes; most windows and chunks of attention are met.
MAX_BATCH_SIZE: Final = 2
MAX_SEQ_LEN: Final = 512
MAX_NUM_TOKENS: Final = 256
_LAYER_NAME: Final = re.compile(r"^(target|draft)\.layers\.(\d+)\.")

_Decoder = TypeVar("_Decoder", bound=DecoderSpec)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layers that are left, by their indices in the whole models."""

    target: tuple[int, ...]
    draft: tuple[int, ...] = ()

    @classmethod
    def of(cls, models: PretrainedConfig) -> "Cut":
        target, draft = set(_kinds(models.target)), models.draft
        if draft is None:
            return cls(target=tuple(sorted(target)))
        return cls(target=tuple(sorted(target | {*draft.target_layer_ids})), draft=tuple(sorted(set(_kinds(draft)))))

    def name(self, name: str) -> str:
        """Of a tensor of the cut engine, its name in the whole one."""
        return _LAYER_NAME.sub(lambda found: f"{found[1]}.layers.{getattr(self, found[1])[int(found[2])]}.", name)

    def part(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Of a tensor with a part for each layer, the parts that are left."""
        axis = next((i for i, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)) if have != want), None)
        if axis is None:
            return tensor
        layers = getattr(self, name.partition(".")[0])
        size = shape[axis] // len(layers)
        return torch.cat([tensor.narrow(axis, layer * size, size) for layer in layers], axis)

    def models(self, whole: PretrainedConfig) -> PretrainedConfig:
        target, draft = _cut(whole.target, self.target), whole.draft
        if draft is not None:
            taps = tuple(map(self.target.index, draft.target_layer_ids))
            fields = {"target_layer_ids": taps, "num_target_layers": len(self.target)}
            draft = _cut(draft, self.draft).model_copy(update=fields)
        quantization = whole.quantization and self._quantization(whole.quantization)
        return PretrainedConfig(
            target=target, draft=draft, dtype=whole.dtype, mapping=whole.mapping, quantization=quantization
        )

    def _quantization(self, whole: QuantizationSpec) -> QuantizationSpec:
        linears = {short: form for name, form in whole.linears.items() if (short := self._short_name(name)) is not None}

        def scales(of_all: Sequence[LayerKvScales] | None, layers: Sequence[int]) -> Any:
            return of_all and tuple(of_all[i] for i in layers)

        return QuantizationSpec(
            linears=linears, target_kv=scales(whole.target_kv, self.target), draft_kv=scales(whole.draft_kv, self.draft)
        )

    def _short_name(self, name: str) -> str | None:
        """Of a linear of the whole engine, its name in the cut one; None where it is not left."""
        found = _LAYER_NAME.match(name)
        if found is None:
            return name
        layers, index = getattr(self, found[1]), int(found[2])
        return f"{found[1]}.layers.{layers.index(index)}.{name[found.end() :]}" if index in layers else None


def _kinds(decoder: DecoderSpec) -> Iterator[int]:
    """The first layer of each kind, and the layers whose K and V they read."""
    seen: list[LayerSpec] = []
    for index, layer in enumerate(decoder.layers):
        source = _source(layer)
        kind = layer if source is None else _reading(layer, 0)
        if kind not in seen:
            seen.append(kind)
            yield index
            if source is not None:
                yield source


def _source(layer: LayerSpec) -> int | None:
    """The layer whose K and V this one reads; None: its own."""
    return layer.mixer.shares_kv_with if isinstance(layer.mixer, Gqa) else None


def _reading(layer: LayerSpec, source: int) -> LayerSpec:
    return layer.model_copy(update={"mixer": layer.mixer.model_copy(update={"shares_kv_with": source})})


def _cut(decoder: _Decoder, layers: Sequence[int]) -> _Decoder:
    def moved(layer: LayerSpec) -> LayerSpec:
        source = _source(layer)
        return layer if source is None else _reading(layer, layers.index(source))

    return decoder.model_copy(update={"layers": tuple(moved(decoder.layers[i]) for i in layers)})


def write_cut(engine: EngineDir, directory: Path) -> tuple[EngineDir, Cut]:
    """An engine of token ids in `directory`, with the weights of the layers that are left."""
    manifest = engine.manifest
    cut = Cut.of(manifest.pretrained_config)
    models, limits = cut.models(manifest.pretrained_config), manifest.build_config
    headers = tensor_headers(models)
    files = {}
    for rank in range(models.mapping.world_size):
        path = directory / weights_name(rank)
        with path.open("wb") as file, safe_open(engine.weights_path(rank), framework="pt") as whole:
            tensors = (
                (name, cut.part(name, whole.get_tensor(cut.name(name)), headers[name].shape)) for name in headers
            )
            write_tensor_file(file, headers, ((name, _bytes(tensor)) for name, tensor in tensors))
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = EngineFile(sha256=sha256, size_bytes=path.stat().st_size)
    sizes = {
        "max_batch_size": min(MAX_BATCH_SIZE, limits.max_batch_size),
        "max_seq_len": min(MAX_SEQ_LEN, limits.max_seq_len),
        "max_num_tokens": min(MAX_NUM_TOKENS, limits.max_num_tokens),
    }
    fields = {"pretrained_config": models, "build_config": limits.model_copy(update=sizes), "files": files}
    content = json_bytes(manifest.model_copy(update=fields).model_dump(mode="json"))
    (directory / MANIFEST_NAME).write_bytes(content)
    provenance = engine.provenance() | {"config_sha256": hashlib.sha256(content).hexdigest()}
    (directory / PROVENANCE_NAME).write_bytes(json_bytes(provenance))
    return EngineDir.open(directory), cut


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
