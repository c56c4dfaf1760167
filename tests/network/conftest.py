"""The CPU kernels in every instruction set of this machine, and in that of aarch64 under an emulator."""

from collections.abc import Iterator

import pytest

from dflash_trt.backends.torch.native.library import CpuKernels
from tests.network.kernel_sets import kernel_sets, kernels_of


@pytest.fixture(scope="module", params=kernel_sets())
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    with kernels_of(request.param) as found:
        yield found
