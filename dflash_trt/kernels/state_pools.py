"""Pages by address: a TensorRT engine has no input for its state, only one table of addresses.

`state_pools` is int64 [states] in device memory; an address of 0 is no state. Sources: docs/log.md.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl


@triton.jit
def pooled(state_pools, state_index, POINTER: tl.constexpr):
    """The start of a state's pages as a pointer of type `POINTER`, at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(state_pools + state_index).to(POINTER), 16)
