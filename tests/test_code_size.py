"""Files and functions of the package stay short enough to read."""

from scripts.code_size import ROOT, function_lengths

PACKAGE = ROOT / "dflash_trt"


def test_no_function_but_gpu_kernels_is_longer_than_60_lines() -> None:
    assert {name: length for name, length in function_lengths(PACKAGE).items() if length > 60} == {}


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
