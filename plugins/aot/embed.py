"""C++ for the plugin library: a table of its kernels and an assembly file that holds their cubins.

Knows `plugins/src/runtime/embedded_kernel.h`. Refuses a grid expression with names that a launch does not have.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from dflash_trt.core.errors import BuildError
from plugins.aot.compile import NUM_SCRATCH_POINTERS, CompiledKernel

CUBIN_ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_GRID: Final = re.compile(r"[\w\s+*/()-]+")


def assembly_source(image: str) -> str:
    """The bytes of `image`, found on the include path; read only, and local to the library."""
    return f"""\
// Written by dflash_trt.kernels.aot.
    .section .rodata
    .balign {CUBIN_ALIGNMENT}
    .global dflash_trt_embedded_cubins
    .hidden dflash_trt_embedded_cubins
    .type dflash_trt_embedded_cubins, %object
dflash_trt_embedded_cubins:
    .incbin "{image}"
    .byte 0
    .size dflash_trt_embedded_cubins, . - dflash_trt_embedded_cubins
    .section .note.GNU-stack, "", %progbits
"""


def table_source(kernels: Sequence[CompiledKernel], offsets: Mapping[str, int], *, manifest_sha256: str) -> str:
    """The definition of `embedded_kernels()`."""
    arguments = _Pool("KernelArgument", "arguments")
    constants = _Pool("KernelConstant", "constants")
    grids: dict[str, str] = {}
    rows = [_row(kernel, offsets[kernel.sha256], arguments, constants, grids) for kernel in kernels]
    return "\n".join(
        [
            "// Written by dflash_trt.kernels.aot.",
            '#include "runtime/embedded_kernel.h"',
            '#include "runtime/values.h"',
            "",
            'extern "C" unsigned char const dflash_trt_embedded_cubins[];',
            "",
            "namespace dflash_trt",
            "{",
            "namespace",
            "{",
            *arguments.lines(),
            *constants.lines(),
            *(f"Grid {name}([[maybe_unused]] Values const& values)\n{body}" for body, name in grids.items()),
            f"EmbeddedKernel const kernels[{max(len(rows), 1)}] = {{",
            *rows,
            "};",
            "} // namespace",
            "",
            "EmbeddedKernels const& embedded_kernels() noexcept",
            "{",
            "    static EmbeddedKernels const embedded{",
            f'        kernels, {len(rows)}, dflash_trt_embedded_cubins, "{manifest_sha256}"}};',
            "    return embedded;",
            "}",
            "",
            "} // namespace dflash_trt",
            "",
        ]
    )


class _Pool:
    """Arrays that many kernels share."""

    def __init__(self, type_: str, stem: str) -> None:
        self._type, self._stem = type_, stem
        self._names: dict[tuple[str, ...], str] = {}

    def name(self, items: Sequence[str]) -> str:
        if not items:
            return "nullptr"
        return self._names.setdefault(tuple(items), f"{self._stem}_{len(self._names)}")

    def lines(self) -> list[str]:
        return [f"{self._type} const {name}[] = {{{', '.join(items)}}};" for items, name in self._names.items()]


def _row(kernel: CompiledKernel, offset: int, arguments: _Pool, constants: _Pool, grids: dict[str, str]) -> str:
    architecture = kernel.architecture.removesuffix("a")
    is_specific = "true" if kernel.architecture.endswith("a") else "false"
    declared = [
        f'{{"{name}", "{type_}", {"true" if is_multiple else "false"}}}'
        for name, type_, is_multiple in kernel.arguments
    ]
    known = [f'{{"{name}", {value}}}' for name, value in kernel.constants]
    grid = grids.setdefault(_grid_body(kernel), f"grid_{len(grids)}")
    fields = [
        f'"{kernel.variant}"',
        f'"{kernel.kernel}"',
        f'"{kernel.entry}"',
        f"{{{architecture[:-1]}, {architecture[-1]}, {is_specific}}}",
        str(32 * kernel.num_warps),
        str(kernel.shared_bytes),
        arguments.name(declared),
        str(len(declared)),
        str(NUM_SCRATCH_POINTERS),
        constants.name(known),
        str(len(known)),
        grid,
        str(offset),
        str(len(kernel.cubin)),
    ]
    return f"    {{{', '.join(fields)}}},"


def _grid_body(kernel: CompiledKernel) -> str:
    """A C++ function body; names become look-ups, names of constants their values."""
    constants = dict(kernel.constants)
    pointers = {name for name, type_, _ in kernel.arguments if type_.startswith("*")}
    axes = []
    for axis in kernel.grid:
        if not _GRID.fullmatch(axis) or pointers & set(_NAME.findall(axis)):
            raise BuildError.about(
                f"grid of kernel {kernel.variant}",
                expected="sums, products and quotients of sizes",
                found=axis,
                hint="Write it with the names of run-time sizes.",
            )
        axes.append(
            _NAME.sub(lambda m: str(constants[m[0]]) if m[0] in constants else f'values.integer_of("{m[0]}")', axis)
        )
    return f"{{\n    return make_grid({', '.join(axes)});\n}}"
