"""The recipes that change the kernels, done in copies of the tree: their own tests run there, and the compiler."""

import ast
import re
from pathlib import Path

import pytest

from tests.contributing.copies import applied, python, run_tests
from tests.contributing.page import PAGE, ROOT, Recipe, add, apply, recipe

COMPILE = """
import sys
from plugins.aot.compile import compile_variant, prepare_compiler
from plugins.aot.programs import programs_source
from plugins.aot.variants import LibrarySpec, library_variants
prepare_compiler(sys.argv[1])
variants = {variant.name: variant for variant in library_variants(LibrarySpec())}
print([argument for argument, *_ in compile_variant(variants[sys.argv[2]], "90a").arguments])
print(programs_source())
"""


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return applied(recipe("A sampling parameter"), tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return applied(recipe("A GPU kernel"), tmp_path_factory.mktemp("kernel"))


def compiled(tree: Path, variant: str, cache: Path) -> tuple[list[str], str]:
    """Arguments of a variant that the library lists, as compiled for one architecture; and `launch_rules.h`."""
    arguments, header = python(tree, "-c", COMPILE, str(cache), variant, interprets=False).split("\n", 1)
    return ast.literal_eval(arguments), header


def test_a_sampling_parameter_is_three_files_of_the_package_and_a_test() -> None:
    done = recipe("A sampling parameter")
    assert sorted(done.changed_files) == [
        "dflash_trt/backends/torch/sampling.py",
        "dflash_trt/core/sampling.py",
        "dflash_trt/kernels/sampling.py",
    ]
    assert list(done.files) == ["tests/kernels/test_epsilon_cutoff.py"]


def test_every_sampler_honours_the_new_parameter(sampling: Path) -> None:
    assert "2 passed" in run_tests(sampling, recipe("A sampling parameter"))


def test_the_new_parameter_is_an_option_of_run(sampling: Path) -> None:
    assert "--epsilon-cutoff FLOAT" in python(sampling, "-m", "dflash_trt.cli.main", "run", "--help-all")


def test_the_plugin_operation_takes_the_new_parameter(sampling: Path, tmp_path: Path) -> None:
    arguments, header = compiled(sampling, "row_bounds_tiles64", tmp_path)
    assert arguments[:5] == ["temperature", "top_k", "top_p", "min_p", "epsilon_cutoff"]
    assert re.search(
        r'\{"min_p", TensorType::kFloat32, \w+, nullptr\}, \{"epsilon_cutoff", TensorType::kFloat32, ', header
    )


def test_a_kernel_is_two_files_of_the_package_one_of_the_library_a_row_and_a_test() -> None:
    done = recipe("A GPU kernel")
    assert done.changed_files == ["plugins/aot/variants.py"]
    folders = ["dflash_trt/kernels"] * 2 + ["plugins/aot", "tests/kernels"]
    assert [str(Path(name).parent) for name in done.files] == folders


def test_the_new_kernel_computes_what_pytorch_does(kernel: Path) -> None:
    assert "6 passed" in run_tests(kernel, recipe("A GPU kernel"))


def test_the_new_kernel_is_in_the_library_and_compiles(kernel: Path, tmp_path: Path) -> None:
    arguments, _ = compiled(kernel, "scaled_add_bfloat16", tmp_path)
    assert arguments == ["x", "y", "out", "scale", "num_elements"]


def test_an_operation_of_tensorrt_is_one_file_of_the_package_a_row_a_section_and_a_test() -> None:
    done = recipe("An operation of TensorRT engines")
    assert done.changed_files == ["dflash_trt/kernels/programs/__init__.py", "plugins/README.md"]
    assert list(done.files) == ["dflash_trt/kernels/programs/scaled_add.py", "tests/plugins/test_scaled_add_node.py"]


def test_the_new_operation_runs_in_the_library_and_is_documented(kernel: Path) -> None:
    done = recipe("An operation of TensorRT engines")
    add(done, kernel)
    assert "1 passed" in run_tests(kernel, done)
    readme = "test_the_readme_lists_every_field_and_tensor_with_its_type_and_shape[ScaledAdd]"
    assert "1 passed" in python(
        kernel, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/trt/test_plugins.py::{readme}"
    )


def test_a_patch_that_does_not_fit_the_tree_is_noticed(tmp_path: Path) -> None:
    """The negative control of `apply`."""
    done = recipe("A sampling parameter")
    wrong = Recipe(heading=done.heading, files={}, patch=done.patch.replace("    min_p: T\n", "    min_q: T\n"))
    with pytest.raises(AssertionError, match="does not apply"):
        apply(wrong, tmp_path)


def test_every_file_that_the_page_names_is_there_or_made_by_it() -> None:
    made = {name for section in PAGE.split("\n## ") if "\n```" in section for name in recipe(section[:40]).files}
    names = set(re.findall(r"`((?:docs|tests|scripts|plugins|backends|kernels|formats)/[\w./]+)`", PAGE))
    assert len(names) > 12
    assert not [n for n in names if not ((ROOT / n).exists() or (ROOT / "dflash_trt" / n).exists() or n in made)]
