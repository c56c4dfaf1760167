import fcntl
from collections.abc import Iterator

import pytest

from tests.plugins.building import ROOT, SMALL_KERNELS, BuiltLibrary, build_library

NO_HEADERS = "needs NvInferRuntime.h of TensorRT 11: set TENSORRT_INCLUDE_DIR (no package registry carries it)"
COMPILING_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test asks first waits for the compiler: four minutes of two free cores, and more of busy ones."""
    for item in items:
        if "built" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILING_S + 120))


@pytest.fixture(scope="session")
def built() -> Iterator[BuiltLibrary]:
    """The library with few kernels; its plugins too where TensorRT's headers are."""
    out = ROOT / "build" / "test_plugins"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ("--arch", "90a", *SMALL_KERNELS)
        yield build_library(out, *options, module="tests.plugins.small_library", timeout_s=COMPILING_S)


@pytest.fixture(scope="session")
def built_plugin(built: BuiltLibrary) -> BuiltLibrary:
    if built.plugin is None:
        pytest.skip(NO_HEADERS)
    return built
