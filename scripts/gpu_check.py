"""Build the demo engine for torch and for TensorRT, and qualify the second against the first. See scripts/gpu_check."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.tensorrt.self_test import Finding, qualify
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.quantization import PageChoice
from dflash_trt.core.runtime_config import RuntimeConfig

PAGES: dict[PageChoice, str] = {"none": "pages of float32", "fp8": "FP8 pages"}
DEMO = Path(__file__).resolve().parents[1] / "dflash_trt" / "demo"


def main() -> int:
    console = Console(highlight=False)
    library = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    findings: list[Finding] = []
    for pages, name in PAGES.items():
        try:
            findings += check(library, pages, console)
        except DFlashError as error:
            findings.append(Finding(name=f"{name}: build and open", has_passed=False, detail=str(error)))
    table = Table("check", "result", "detail")
    for finding in findings:
        style = "green" if finding.has_passed else "red"
        table.add_row(finding.name, f"[{style}]{'pass' if finding.has_passed else 'FAIL'}", finding.detail)
    console.print(table)
    return 0 if all(finding.has_passed for finding in findings) else 1


def check(library: Path | None, pages: PageChoice, console: Console) -> list[Finding]:
    """Every finding with K/V pages of this kind, with those of building and opening first."""
    limits = {"max_batch_size": 4, "max_seq_len": 512, "max_num_tokens": 128, "page_size": 16, "dtype": "float32"}
    models = {"target": str(DEMO / "target"), "drafter": str(DEMO / "drafter")}
    with tempfile.TemporaryDirectory() as root:
        engines = {}
        for backend in ("torch", "tensorrt"):
            console.print(f"building the demo engine for {backend}, {PAGES[pages]} ...")
            options = {"plugins": "plugin" if library else "layers", "plugin_library": library and str(library)}
            engines[backend] = build_engine(
                BuildConfig(**models, **limits, backend=backend, quantization={"kv_cache": pages}, **options),
                Path(root) / backend,
                base_dir=DEMO,
                overwrite=False,
                command=["scripts/gpu_check"],
                progress=lambda progress: None,
            )
        record = engines["tensorrt"].manifest.tensorrt
        assert record is not None
        reference = TorchExecutor.open(engines["torch"], RuntimeConfig(kv_cache_bytes=1 << 28))
        engine = TensorRTExecutor.open(engines["tensorrt"], RuntimeConfig(kv_cache_bytes=1 << 28))
        built = f"TensorRT {record.tensorrt_version} on {record.gpu_name}, {record.num_layers} layers, {record.plugins}"
        opened = Finding(name="build, open, inputs and outputs", has_passed=True, detail=built)
        vocab_size = engines["torch"].manifest.target.vocab_size
        findings = [opened, *qualify(reference, engine, vocab_size=vocab_size)]
        return [replace(finding, name=f"{PAGES[pages]}: {finding.name}") for finding in findings]


if __name__ == "__main__":
    sys.exit(main())
