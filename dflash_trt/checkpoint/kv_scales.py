"""K/V scales of a quantized checkpoint; `core/quantization` has the canonical form."""

from dataclasses import dataclass, replace

from safetensors import safe_open

from dflash_trt.checkpoint.names import model_prefix
from dflash_trt.checkpoint.producers.base import FLOATS, Scheme
from dflash_trt.checkpoint.quantized_reading import read_number
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors, listed
from dflash_trt.core.errors import problem
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.quantization import LayerKvScales

_EXPORT_AGAIN = "Export the checkpoint again."


@dataclass(frozen=True, kw_only=True, slots=True)
class KvScaleSource:
    """One layer's scales; None means 1."""

    k: StoredTensor | None
    v: StoredTensor | None


def resolve_kv_scales(
    spec: TargetSpec, stored: StoredTensors, scheme: Scheme | None, *, label: str, problems: list[str]
) -> tuple[tuple[KvScaleSource, ...] | None, StoredTensors]:
    """Return one source per layer for FP8 K/V (None without), and the remaining tensors.

    Producers write the scales of all layers or of none. Layers without K and V of their own have none.
    """
    if scheme is None or not scheme.has_fp8_kv:
        return None, stored
    prefix = model_prefix(stored.tensors)
    mixers = [layer.mixer for layer in spec.layers]
    owner_of = [mixer.state_owner(i) for i, mixer in enumerate(mixers)]
    owners = [i for i, mixer in enumerate(mixers) if mixer.is_paged and owner_of[i] == i]
    names = [f"{prefix}layers.{i}.{scheme.kv_scale.format(x=x)}" for i in owners for x in "kv"]
    found = {name: stored.tensors[name] for name in names if name in stored.tensors}
    missing = [name for name in names if name not in found]
    if found and missing:
        expected = "the K/V scales of every layer"
        found_text = f"no {listed(missing)}"
        problems.append(problem(f"{label} tensors", expected=expected, found=found_text, hint=_EXPORT_AGAIN))
    of_owner = {
        i: KvScaleSource(k=found.get(k_name), v=found.get(v_name))
        for i, k_name, v_name in zip(owners, names[0::2], names[1::2], strict=True)
    }
    no_kv = KvScaleSource(k=None, v=None)
    sources = tuple(of_owner.get(owner, no_kv) for owner in owner_of)
    problems += [
        problem(
            f"{label} tensor '{tensor.name}'",
            expected="F32 []",
            found=f"{tensor.dtype} {list(tensor.shape)}",
            hint=_EXPORT_AGAIN,
        )
        for tensor in found.values()
        if tensor.dtype not in FLOATS or tensor.shape not in ((), (1,))
    ]
    rest = {name: tensor for name, tensor in stored.tensors.items() if name not in found}
    return sources, replace(stored, tensors=rest)


def read_kv_scales(sources: tuple[KvScaleSource, ...]) -> tuple[LayerKvScales, ...]:
    """Raises CheckpointError on a scale that is not finite and positive."""
    return tuple(LayerKvScales(k=_read(source.k), v=_read(source.v)) for source in sources)


def _read(stored: StoredTensor | None) -> float:
    if stored is None:
        return 1.0
    with safe_open(stored.path, framework="pt", device="cpu") as file:
        return read_number(stored, lambda tensor: file.get_slice(tensor.name))
