"""Functions of the package stay short enough to read. Files hold one noun whole, however long that is."""

from scripts.code_size import ROOT, function_lengths

PACKAGE = ROOT / "dflash_trt"


def test_no_function_but_gpu_kernels_is_longer_than_60_lines() -> None:
    assert {name: length for name, length in function_lengths(PACKAGE).items() if length > 60} == {}
