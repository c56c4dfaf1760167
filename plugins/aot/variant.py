"""A variant of a kernel to compile ahead of time: argument types, constants, warps, stages, grid.

Knows the words of a signature; compiles nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from dflash_trt.core.dtype import triton_type

Attributes = dict[tuple[int, ...], list[list[Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelVariant:
    """One entry of a compiled library.

    `signature` holds the run-time arguments in the kernel's own order: a type ("i32", "fp32", "*bf16"), and ":16"
    where the value or address is always a multiple of 16. `constexprs` are compiled in. A launch passes the run-time
    arguments, then two null pointers (Triton's scratch areas), with `32 * num_warps` threads.

    `grid` is three C expressions over names of run-time arguments and of the sizes that the kernel's file documents.
    """

    name: str  # unique, a C identifier
    kernel: Any  # triton.JITFunction; the package is not typed
    signature: Mapping[str, str]
    constexprs: Mapping[str, int | bool]
    num_warps: int
    num_stages: int
    is_fenced: bool = False  # its loops load ahead as `kernels.compiling.fenced_stages` says
    has_fp_fusion: bool = True  # products and sums become one operation, with one rounding
    grid: tuple[str, str, str]

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.has_fp_fusion}

    @property
    def arguments(self) -> tuple[tuple[str, str, bool], ...]:
        """Of a launch: name, type, is a multiple of 16."""
        return tuple((name, word.split(":")[0], word.endswith(":16")) for name, word in self.signature.items())

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, int(value)) for name, value in self.constexprs.items())

    @property
    def has_fp8(self) -> bool:
        return any(word.startswith(f"*{triton_type(torch.float8_e4m3fn)}") for word in self.signature.values())

    def types(self) -> dict[str, str]:
        """Of all arguments, constants included, as `triton.compiler.ASTSource` wants its `signature`."""
        names = cast("list[str]", self.kernel.arg_names)
        unknown = set(names) ^ (set(self.signature) | set(self.constexprs))
        assert not unknown, f"{self.name}: arguments {sorted(unknown)} are declared on one side only"
        declared = [name for name in names if name in self.signature]
        assert declared == list(self.signature), f"{self.name}: the signature is not in the kernel's order"
        return {name: self.signature[name].split(":")[0] if name in self.signature else "constexpr" for name in names}

    def attributes(self) -> Attributes:
        """The ":16" marks, as `triton.compiler.ASTSource` wants its `attrs`."""
        names = cast("list[str]", self.kernel.arg_names)
        aligned = [i for i, name in enumerate(names) if self.signature.get(name, "").endswith(":16")]
        return {(i,): [["tt.divisibility", 16]] for i in aligned}

    def source(self) -> Any:
        """Arguments of `triton.compile`."""
        from triton.compiler import ASTSource  # under the interpreter the compiler is not needed

        constants = {(list(self.kernel.arg_names).index(name),): value for name, value in self.constexprs.items()}
        return ASTSource(fn=self.kernel, signature=self.types(), constexprs=constants, attrs=self.attributes())


def pointer(dtype: torch.dtype) -> str:
    """The signature word of a 16-byte aligned tensor."""
    return f"*{triton_type(dtype)}:16"


def unique_variants(variants: Iterable[KernelVariant]) -> tuple[KernelVariant, ...]:
    """Ordered by name, without repetitions."""
    known: dict[str, KernelVariant] = {}
    for variant in variants:
        same = known.setdefault(variant.name, variant)
        assert same == variant, f"two kernel variants are called {variant.name}"
    return tuple(known[name] for name in sorted(known))
