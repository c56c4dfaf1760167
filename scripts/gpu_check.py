"""Build the demo engine for torch and for TensorRT, and qualify the second against the first. See scripts/gpu_check."""

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.tensorrt.inspection import quantized_linear_problems
from dflash_trt.backends.tensorrt.module import load_tensorrt
from dflash_trt.backends.tensorrt.quantized_linear import GEMMS
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.quantization import PageChoice
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.formats.registry import weight_formats
from scripts.tensorrt_self_test import Finding, qualify

PAGES: dict[PageChoice, str] = {"none": "pages of float32", "fp8": "FP8 pages"}
DEMO = Path(__file__).resolve().parents[1] / "dflash_trt" / "demo"
RUNTIME = RuntimeConfig(kv_cache_bytes=1 << 28)
LIMITS = {"max_batch_size": 4, "max_seq_len": 512, "max_num_tokens": 128, "page_size": 16}


def main() -> int:
    console = Console(highlight=False)
    library = Path(sys.argv[1]).resolve()
    checks = [(name, partial(check_pages, pages)) for pages, name in PAGES.items()]
    checks += [(f"{name} linear layers", partial(check_linears, name)) for name in served_formats()]
    findings: list[Finding] = []
    for name, check in checks:
        console.print(f"building the demo engine with {name} ...")
        try:
            with tempfile.TemporaryDirectory() as root:
                found = check(Path(root), library)
        except DFlashError as error:
            found = [Finding(name="build and open", has_passed=False, detail=str(error))]
        findings += [replace(finding, name=f"{name}: {finding.name}") for finding in found]
    table = Table("check", "result", "detail")
    for finding in findings:
        style = "green" if finding.has_passed else "red"
        table.add_row(finding.name, f"[{style}]{'pass' if finding.has_passed else 'FAIL'}", finding.detail)
    console.print(table)
    return 0 if all(finding.has_passed for finding in findings) else 1


def served_formats() -> list[str]:
    """Of linear layers, those that this GPU has units for or that need none."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    lowered = [known for known in weight_formats().values() if known.weight_type in GEMMS]
    return [known.name for known in lowered if (known.first_capability or (0, 0)) <= capability]


def check_pages(pages: PageChoice, root: Path, library: Path) -> list[Finding]:
    """Both backends, step by step."""
    options = {"dtype": "float32", "quantization": {"kv_cache": pages}}
    engines = {backend: build(root / backend, library, backend=backend, **options) for backend in ("torch", "tensorrt")}
    reference = TorchExecutor.open(engines["torch"], RUNTIME)
    engine = TensorRTExecutor.open(engines["tensorrt"], RUNTIME)
    return [
        _opened(engines["tensorrt"]),
        *qualify(reference, engine, vocab_size=engines["torch"].manifest.target.vocab_size),
    ]


def check_linears(weight_format: str, root: Path, library: Path) -> list[Finding]:
    """By TensorRT's own account, that every quantized linear layer multiplies its codes."""
    quantization = {"target": weight_format, "drafter": weight_format}
    engine_dir = build(root / "engine", library, backend="tensorrt", dtype="bfloat16", quantization=quantization)
    spec = engine_dir.manifest.pretrained_config.quantization
    assert spec is not None
    engine = TensorRTExecutor.open(engine_dir, RUNTIME)
    problems = quantized_linear_problems(engine.inspect(load_tensorrt("tensorrt")), spec.linears)
    detail = "; ".join(problems) or f"{len(spec.linears)} layers"
    return [_opened(engine_dir), Finding(name="GEMMs of codes", has_passed=not problems, detail=detail)]


def build(output: Path, library: Path, **options: Any) -> EngineDir:
    if options["backend"] == "tensorrt":
        options |= {"plugin_library": str(library)}
    models = {"target": str(DEMO / "target"), "drafter": str(DEMO / "drafter")}
    return build_engine(
        BuildConfig(**models, **LIMITS, **options),
        output,
        base_dir=DEMO,
        overwrite=False,
        command=["scripts/gpu_check"],
        progress=lambda progress: None,
    )


def _opened(engine_dir: EngineDir) -> Finding:
    record = engine_dir.manifest.tensorrt
    assert record is not None
    built = f"TensorRT {record.tensorrt_version} on {record.gpu_name}, {record.num_layers} layers"
    return Finding(name="build, open, inputs and outputs", has_passed=True, detail=built)


if __name__ == "__main__":
    sys.exit(main())
