"""The recipes that change the kernels, done in copies of the tree: their own tests run there, and the compiler."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contributing.page import PAGE, ROOT, Recipe, apply, recipe

COMPILE = """
import sys
from plugins.aot.compile import compile_variant, prepare_compiler
from plugins.aot.rules import rules_header
from plugins.aot.variants import LibrarySpec, library_variants
prepare_compiler(sys.argv[1])
variants = {variant.name: variant for variant in library_variants(LibrarySpec())}
print([argument for argument, *_ in compile_variant(variants[sys.argv[2]], "90a").arguments])
print(rules_header())
"""


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return applied(recipe("A sampling parameter"), tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return applied(recipe("A GPU kernel"), tmp_path_factory.mktemp("kernel"))


def applied(done: Recipe, directory: Path) -> Path:
    apply(done, directory)
    return directory


def python(tree: Path, *words: str, interprets: bool = True) -> str:
    """In a process whose packages are those of the copy."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "1"}
    if not interprets:
        del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-P", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(tree: Path, done: Recipe) -> str:
    (path,) = [name for name in done.files if name.startswith("tests/")]
    return python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", path)


def compiled(tree: Path, variant: str, cache: Path) -> tuple[list[str], str]:
    """Arguments of a variant that the library lists, as compiled for one architecture; and `launch_rules.h`."""
    arguments, header = python(tree, "-c", COMPILE, str(cache), variant, interprets=False).split("\n", 1)
    return ast.literal_eval(arguments), header


def test_a_sampling_parameter_is_four_files_of_the_package_and_a_test() -> None:
    done = recipe("A sampling parameter")
    assert sorted(done.changed_files) == [
        "dflash_trt/backends/tensorrt/lowering_sampling.py",
        "dflash_trt/backends/torch/sampling.py",
        "dflash_trt/core/sampling.py",
        "dflash_trt/kernels/sampling.py",
    ]
    assert list(done.files) == ["tests/trt/test_epsilon_cutoff.py"]


def test_every_sampler_honours_the_new_parameter(sampling: Path) -> None:
    assert re.search("3 passed|2 passed, 1 skipped", run_tests(sampling, recipe("A sampling parameter")))


def test_the_new_parameter_is_an_option_of_run(sampling: Path) -> None:
    assert "--epsilon-cutoff FLOAT" in python(sampling, "-m", "dflash_trt.cli.main", "run", "--help")


def test_the_plugin_operation_takes_the_new_parameter(sampling: Path, tmp_path: Path) -> None:
    arguments, header = compiled(sampling, "row_bounds_tiles64", tmp_path)
    assert arguments[:5] == ["temperature", "top_k", "top_p", "min_p", "epsilon_cutoff"]
    assert '{"min_p", TensorType::kFloat32, 1}, {"epsilon_cutoff", TensorType::kFloat32, 1}' in header


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
