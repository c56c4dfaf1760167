"""Programs against the kernels that they launch, and what their generator refuses."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dflash_trt.core.errors import BuildError
from dflash_trt.kernels.programs import ATTEND_PAGES, EXPERTS, GATED_DELTA, PROGRAMS, SAMPLE_AND_ACCEPT
from dflash_trt.kernels.programs.program import Check, Constant, Kernel, Launch, Program, Stage, TensorRule
from plugins.aot.programs import programs_source
from plugins.aot.variant import KernelVariant
from tests.plugins.small_library import SmallLibrarySpec


@pytest.fixture(scope="module")
def variants() -> dict[str, list[KernelVariant]]:
    """Of the library that tests build, by the kernel's name."""
    found: dict[str, list[KernelVariant]] = {}
    spec = SmallLibrarySpec(
        dtypes=("float32",),
        softcaps=("without", "with"),
        chains=("without", "with"),
        head_dims=(16,),
        max_requests=(16, 32),
        tiles=(16, 64),
    )
    for variant in spec.variants():
        found.setdefault(variant.kernel.__name__, []).append(variant)
    return found


def stages(program: Program) -> tuple[Stage, ...]:
    return program.stage, *program.passes


LAUNCHING = tuple(program for program in PROGRAMS if any(stage.launches for stage in stages(program)))


def kernels(program: Program) -> Iterator[Kernel]:
    for stage in stages(program):
        yield from (launch.kernel for launch in stage.launches)
        yield from (size.kernel for size in stage.sizes.values() if isinstance(size, Constant))


def fitting(kernel: Kernel, variants: dict[str, list[KernelVariant]]) -> list[KernelVariant]:
    """Variants of the constants that are the same in every launch."""
    fixed = {name: int(value) for name, value in kernel.equal.items() if value.isdecimal()}
    return [x for x in variants[kernel.name] if all(x.constexprs[name] == value for name, value in fixed.items())]


@pytest.mark.parametrize("program", LAUNCHING, ids=lambda program: program.name)
def test_kernels_have_the_constants_and_types_that_choose_a_variant(program: Program, variants) -> None:
    for kernel in kernels(program):
        for variant in variants[kernel.name]:
            assert {*kernel.equal, *kernel.sized, *kernel.at_least} <= set(variant.constexprs), kernel.name
            assert set(kernel.types) <= set(variant.signature), kernel.name


@pytest.mark.parametrize("program", LAUNCHING, ids=lambda program: program.name)
def test_a_launch_decides_all_that_distinguishes_variants(program: Program, variants) -> None:
    """Marks of multiples of 16 apart, which a launch's sizes decide."""
    for launch in (launch for stage in stages(program) for launch in stage.launches):
        kernel, known = launch.kernel, {}
        for variant in variants[kernel.name]:
            chosen = {name: variant.constexprs[name] for name in (*kernel.equal, *kernel.sized, *kernel.at_least)}
            types = [variant.signature[name].split(":")[0] for name in kernel.types]
            same = known.setdefault(str((chosen, types)), variant)
            assert same.constexprs == variant.constexprs, (same.name, variant.name)
            assert [word.split(":")[0] for word in same.signature.values()] == [
                word.split(":")[0] for word in variant.signature.values()
            ]


@pytest.mark.parametrize("program", LAUNCHING, ids=lambda program: program.name)
def test_every_argument_and_size_of_a_grid_has_a_value(program: Program, variants) -> None:
    own = {*program.input_names, *program.output_names, *program.integer_fields, *program.real_fields}
    own |= {axis for rule in program.inputs for axis in rule.shape}
    own |= {*program.stage.sizes, *program.stage.scratch, *program.stage.arguments}
    for stage in stages(program):
        for launch in stage.launches:
            known = own | {*stage.sizes, *stage.scratch, *stage.arguments, *launch.arguments}
            for variant in fitting(launch.kernel, variants):
                grid = re.findall(r"[A-Za-z_]\w*", " ".join(variant.grid))
                missing = {*variant.signature, *grid} - known - set(variant.constexprs)
                assert not missing, (program.name, variant.name)


def changed(**stage: object) -> Program:
    return replace(SAMPLE_AND_ACCEPT, stage=replace(SAMPLE_AND_ACCEPT.stage, **stage))


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (changed(sizes={"tiles": "num_tiles + 1"}), "num_tiles"),
        (changed(sizes={"b": "a + 1", "a": "1"}), "a"),
        (changed(scratch={"bins": "rows"}), "rows"),
        (changed(arguments={"bins": "bin"}), "bin"),
        (changed(launches=(Launch(kernel=Kernel(name="draw_kernel", equal={"TILES": "tiles"})),)), "tiles"),
        (replace(GATED_DELTA, outputs=(TensorRule("out", "F [T, columns]"),)), "columns"),
        (replace(GATED_DELTA, inputs=GATED_DELTA.inputs[:2] + GATED_DELTA.inputs[3:]), "C"),
        (replace(EXPERTS, checks=(Check(subject="x", holds="1", expected="{y}", found="", hint=""),)), "y"),
        (replace(ATTEND_PAGES, inputs=(TensorRule("q", "F [T, heads + 1, D]"), *ATTEND_PAGES.inputs[1:-1])), "heads"),
    ],
)
def test_a_name_that_is_not_defined_before_is_refused(program: Program, name: str) -> None:
    with pytest.raises(BuildError, match=f"program {program.name}.*found {name}"):
        programs_source((program,))


@pytest.mark.parametrize("text", ["R ** 2", "R / 2", "round(R)", "[R]", "R.real"])
def test_more_than_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match="program SampleAndAccept: expected arithmetic"):
        programs_source((changed(sizes={"num_tiles": text}),))


def test_what_a_pass_defines_is_its_own() -> None:
    first, *others = ATTEND_PAGES.passes
    second = replace(first, sizes={"slots": "work_slots"})
    with pytest.raises(BuildError, match="found work_slots"):
        programs_source((replace(ATTEND_PAGES, passes=(first, second, *others)),))


def test_an_axis_that_is_always_read_names_its_size() -> None:
    """K and V are one row in a layer that shares another's."""
    source = programs_source((ATTEND_PAGES,))
    assert '{"T", []([[maybe_unused]] Values const& v) -> int64_t { return v.size_of("q", 0); }' in source
    assert '{"kv_heads", []([[maybe_unused]] Values const& v) -> int64_t { return v.size_of("k", 1); }' in source


def test_every_expression_is_python() -> None:
    for program in PROGRAMS:
        for axis in (axis for rule in (*program.inputs, *program.outputs) for axis in rule.shape):
            ast.parse(axis, mode="eval")
