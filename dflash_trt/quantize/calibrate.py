"""The only module that imports ModelOpt: measures inputs of linear layers while the network runs.

ModelOpt calibrates `torch.nn.Linear`s. A LinearBank has one for each linear layer, sharing the weight; the network's
own forward passes go through the bank, so the activations are the engine's, block formats need no GPU kernel
(calibration only reads ranges), and no model class is patched.
"""

import contextlib
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.quantization import Calibration
from dflash_trt.formats.registry import weight_format


class LinearBank(nn.Module):
    """Linear layers by canonical name; a call computes the layer and lets ModelOpt observe its input."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({_key(name): _linear(weight) for name, weight in weights.items()})

    def __contains__(self, name: str) -> bool:
        return _key(name) in self.linears

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out].

        Raises:
            ConfigError: x has values that are not finite.
        """
        _require_finite(name, x)
        out: Tensor = self.linears[_key(name)](x)
        return out

    def observe(self, name: str, x: Tensor) -> None:
        """Let ModelOpt observe an input of one of the experts that share a name, and their range.

        Raises:
            ConfigError: x has values that are not finite.
        """
        _require_finite(name, x)
        self.linears[_key(name)].get_submodule("input_quantizer")(x)


def observe(
    weights: Mapping[str, Tensor],  # [out, in] by canonical name, or [experts, out, in]
    formats: Mapping[str, str],
    run: Callable[[LinearBank], None],
) -> dict[str, float]:
    """The largest magnitude that entered each linear during `run`, which calls the bank for each of them.

    Raises:
        ConfigError: ModelOpt is not installed, a value is not finite, or a linear was never used.
    """
    if not weights:
        return {}
    quantization = _modelopt_quantization()
    bank = LinearBank(weights)
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name in weights:
        pattern = f"linears.{_key(name)}.input_quantizer"
        rules.append({"quantizer_name": pattern, "cfg": dict(weight_format(formats[name]).modelopt_activation)})
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # ModelOpt prints its progress
        warnings.simplefilter("ignore")
        quantization.quantize(bank, {"quant_cfg": rules, "algorithm": "max"}, run)
    return {name: _range_of(name, bank.linears[_key(name)].input_quantizer) for name in weights}


def _require_finite(name: str, x: Tensor) -> None:
    if not bool(torch.isfinite(x).all()):
        hint = "Check the checkpoint; a bfloat16 or float32 `dtype` has the range that float16 lacks."
        subject = f"calibration: the input of {name}"
        raise ConfigError.about(subject, expected="finite values", found="NaN or infinity", hint=hint)


def modelopt_version() -> str:
    """Part of a calibration's identity."""
    return str(_import_modelopt().__version__)


def _modelopt_quantization() -> Any:
    _import_modelopt()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as quantization
    return quantization


def _import_modelopt() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt
    except ImportError as error:
        hint = (
            "Install it with `pip install 'dflash-trt[quantize]'`, use a weight-only format, or build from a "
            "checkpoint that ModelOpt has quantized already."
        )
        subject = "calibration"
        raise ConfigError.about(subject, expected="NVIDIA ModelOpt", found=str(error), hint=hint) from error
    return modelopt


def _range_of(name: str, quantizer: Any) -> float:
    amax = quantizer.amax
    if amax is None:
        subject, hint = f"calibration: {name}", "Give more prompts, or longer ones."
        raise ConfigError.about(subject, expected="activations", found="none", hint=hint)
    value = float(amax.float().max())
    if not 0.0 < value < float("inf"):
        hint = "Give more prompts, or keep this layer unquantized with an override."
        subject = f"calibration: the input of {name}"
        raise ConfigError.about(subject, expected="a finite, positive range", found=f"{value:g}", hint=hint)
    return value


def _linear(weight: Tensor) -> nn.Linear:
    """Shares the weight; `meta` keeps the constructor from allocating another."""
    if weight.dim() == 3:
        (weight,) = weight[:1]  # one of the experts that share a range: only their inputs are observed
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _key(name: str) -> str:
    return name.replace(".", "_")  # module names have no dots


CALIBRATION_VERSION = 1  # raise it whenever the same inputs would give other ranges


def cache_key(fields: Mapping[str, Any]) -> str:
    """SHA-256 of everything that the ranges depend on; `fields` must be plain JSON."""
    text = json.dumps({"calibration_version": CALIBRATION_VERSION, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_dir() -> Path:
    """Directory for calibrations between builds: the user's cache directory by the XDG convention."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash-trt" / "calibration"


def read_cached(key: str) -> Calibration | None:
    """None when there is none, or none that can be read: it is then measured again."""
    try:
        return Calibration.model_validate_json((cache_dir() / f"{key}.json").read_bytes())
    except (OSError, ValueError):
        return None


def write_cached(key: str, calibration: Calibration) -> None:
    """Write it whole or not at all. A cache that cannot be written only costs the next build time."""
    path = cache_dir() / f"{key}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(calibration.model_dump_json(indent=1))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
