"""Recipes: each is a sound configuration of a known pair, and a name for `build`."""

import json
from collections import Counter
from pathlib import Path

import pytest
from psutil import virtual_memory

from dflash_trt.backends import machine as machines
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.cli.recipes import fits
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.known_pairs import pair_of_drafter
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.engine_dir import EngineDir, PretrainedConfig, tensor_headers
from dflash_trt.recipes import Recipe, recipe_path, recipes
from tests.cli.calls import Recorder
from tests.cli.conftest import Invoke
from tests.published_pairs import write_config

PUBLISHED = [recipe for recipe in recipes() if recipe.name != "demo"]
GIB = 2**30


def config_of(recipe: Recipe) -> BuildConfig:
    return build_config_from(read_yaml(recipe.path), source=recipe.name)


def described(config: BuildConfig, base_dir: Path) -> PretrainedConfig:
    assert config.drafter is not None
    pair = read_specs(base_dir / config.target, base_dir / config.drafter)
    formats = QuantizationSpec(linears=pair.quantization.linears)
    return PretrainedConfig(
        target=pair.target, draft=pair.draft, dtype=config.dtype, mapping=config.mapping, quantization=formats
    )


def test_every_file_is_listed_and_every_recipe_has_a_file() -> None:
    names = [recipe.name for recipe in recipes()]
    assert sorted(names) == sorted(path.stem for path in recipes()[0].path.parent.glob("*.yaml"))
    assert {recipe_path(name) for name in names} == {recipe.path for recipe in recipes()}
    assert recipe_path("qwen3-8b") is None


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda recipe: recipe.name)
def test_a_recipe_is_a_known_pair_of_the_size_and_format_that_it_states(recipe: Recipe, tmp_path: Path) -> None:
    config = config_of(recipe)
    pair = pair_of_drafter(config.drafter or "")
    assert pair is not None
    assert pair.needs is None
    assert config.target in pair.targets
    for name in (config.target, pair.drafter):
        write_config(tmp_path, name)
    pretrained = described(config, tmp_path)
    headers = tensor_headers(pretrained)
    num_bytes = sum(header.num_bytes for header in headers.values()) * config.tp_size
    assert round(num_bytes / GIB, 1) == recipe.weights_gib
    formats = Counter[str]()
    for name, header in headers.items():
        assert pretrained.quantization is not None
        formats[pretrained.quantization.format_of(name) or config.dtype] += header.num_bytes
    if recipe.format != "bfloat16":
        del formats["bfloat16"]
    assert formats.most_common(1)[0][0] == recipe.format
    one = next((gpu for gpu in ("H200", "B300") if recipe.name.endswith(gpu.lower())), None)
    of_format = ("B300",) if recipe.format == "nvfp4" else ("H200", "B300")
    assert recipe.gpus == ((one,) if one else of_format)


def test_the_demo_is_built_by_its_name_wherever_the_command_runs(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    built = invoke("build", "demo", "-o", "engine")
    assert built.exit_code == 0, built.stderr
    engine = EngineDir.open(tmp_path / "engine")
    size_bytes = (engine.path / "rank0.safetensors").stat().st_size
    (demo,) = (recipe for recipe in recipes() if recipe.name == "demo")
    assert demo.weights_gib == pytest.approx(size_bytes / GIB, abs=0.05)
    assert engine.manifest.pretrained_config.dtype == demo.format


def test_a_recipes_name_wins_over_what_lies_at_a_path_of_that_name(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`build demo -o demo` works twice; only ./demo is the path."""
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--overwrite"]):
        built = invoke("build", "demo", "-o", "demo", *more)
        assert built.exit_code == 0, built.stderr
    engine = invoke("build", "./demo", "-o", "other")
    assert "./demo: expected a YAML file or a recipe's name, found a directory." in engine.stderr
    assert "It is an engine already: dflash-trt run ./demo" in engine.stderr
    assert invoke("plan", "demo", "--gpu", "h200").exit_code == 0
    Path("file").mkdir()
    Path("file/demo").write_text("nonsense: 1\n")
    monkeypatch.chdir("file")
    assert "key 'nonsense' is unknown" in invoke("build", "./demo", "-o", "engine").stderr
    assert invoke("build", "demo", "-o", "engine").exit_code == 0


def test_a_wrong_name_names_recipes(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = invoke("build", "qwen3-8b-fp9", "-o", "engine")
    assert wrong.exit_code == 2
    assert (
        "qwen3-8b-fp9: expected a YAML file or a recipe's name, found neither. Did you mean 'qwen3-8b" in wrong.stderr
    )


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["build", "Qwen/Qwen3-8B"], "dflash-trt build --target Qwen/Qwen3-8B -o qwen3-8b"),
        (["run", "Qwen/Qwen3-8B"], "dflash-trt build --target Qwen/Qwen3-8B -o qwen3-8b"),
        (["inspect", "Qwen/Qwen3-8B"], "dflash-trt build --target Qwen/Qwen3-8B -o qwen3-8b"),
        (["build", "Qwen3-8B"], "dflash-trt build --target Qwen3-8B -o qwen3-8b-engine"),  # a directory, as below
        (["run", "Qwen3-8B"], "dflash-trt build --target Qwen3-8B -o qwen3-8b-engine"),
        (["run", "built/engine"], "dflash-trt build CONFIG.yaml -o built/engine"),
    ],
)
def test_a_checkpoint_in_the_place_of_an_engine_names_the_command_that_builds_it(
    invoke: Invoke, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen3-8B").symlink_to(target)
    Path("built").mkdir()
    result = invoke(*words, *(["--prompt", "a"] if words[0] == "run" else []))
    assert result.exit_code != 0
    assert command in result.stderr
    assert ("--target" in command) == ("--target" in result.stderr)
    if words[1] == "Qwen3-8B":
        monkeypatch.setattr("dflash_trt.compile.build.build_engine", Recorder(build_engine))
        assert invoke(*command.split()[1:]).stderr == "error: recorded\n"  # the command is one that `build` takes


def test_the_list_says_what_fits_this_machine(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = machines.Machine(name="NVIDIA H200", memory_bytes=140 * GIB, num_devices=1, capability=(9, 0))
    monkeypatch.setattr(machines, "this_machine", lambda: gpu)
    listed = json.loads(invoke("recipes", "--json").stdout)
    fits = {recipe["name"]: recipe["fits"] for recipe in listed["recipes"]}
    assert fits["qwen3-8b-bf16"] == fits["gpt-oss-120b-mxfp4"] == "yes"
    assert fits["qwen3-8b-nvfp4"] == "no, nvfp4 needs compute capability 10.0 or later"
    assert listed["machine"] == "1 x NVIDIA H200, 140.0 GiB each"
    small = machines.Machine(name="small", memory_bytes=16 * GIB, num_devices=2, capability=(9, 0))
    monkeypatch.setattr(machines, "this_machine", lambda: small)
    listed = json.loads(invoke("recipes", "--json").stdout)
    fits = {recipe["name"]: recipe["fits"] for recipe in listed["recipes"]}
    assert fits["demo"] == "yes"
    assert fits["qwen3-8b-bf16"] == "no, 16.0 GiB of memory"
    first = listed["recipes"][1]
    assert (first["target"], first["drafter"]) == ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16")
    assert (first["gpus"], first["tp_size"], first["format"]) == (["H200", "B300"], 1, "bfloat16")


def test_a_format_runs_from_its_first_capability_on() -> None:
    recipe = Recipe(name="four bits", format="nvfp4", weights_gib=16)
    config = BuildConfig(target="t", drafter="d")
    for capability, answer in (((9, 9), "no, nvfp4 needs"), ((10, 0), "yes"), ((10, 3), "yes"), (None, "yes")):
        machine = machines.Machine(name="m", memory_bytes=100 * GIB, num_devices=1, capability=capability)
        assert fits(recipe, config, machine).startswith(answer), capability


def test_without_a_gpu_the_memory_of_the_host_counts(invoke: Invoke) -> None:
    printed = invoke("recipes").stdout
    for recipe in recipes():
        assert f"\n{recipe.name} " in f"\n{printed}"
    pair = "Qwen/Qwen3-8B with z-lab/Qwen3-8B-DFlash-b16"
    facts = "bfloat16, 1 rank on H200 or B300, 17.2 GiB of weights; fits: "
    assert [line.split(None, 1)[1] for line in printed.splitlines() if pair in line] == [pair]
    assert facts in printed
    machine = machines.this_machine()
    if machine.capability is None:
        assert machine.memory_bytes <= virtual_memory().total
        assert "no GPU" in printed


@pytest.mark.parametrize(
    ("capability", "num_devices", "memory_gib", "answer"),
    [
        ((9, 0), 1, 100, "no, 2 ranks for 1 GPUs"),
        ((9, 0), 2, 9, "yes"),
        ((9, 0), 2, 8, "no, 8.0 GiB of memory"),  # as much as the weights
        (None, 1, 9, "no, 9.0 GiB of memory"),  # all ranks are on the host
        (None, 1, 17, "yes"),
    ],
)
def test_ranks_share_the_weights_where_each_has_a_device(capability, num_devices, memory_gib, answer) -> None:
    recipe = Recipe(name="two", format="bfloat16", weights_gib=16)
    config = BuildConfig(target="t", drafter="d", tp_size=2)
    machine = machines.Machine(name="m", memory_bytes=memory_gib * GIB, num_devices=num_devices, capability=capability)
    assert fits(recipe, config, machine) == answer


def test_a_recipe_is_shown_as_a_file_that_builds_the_same(invoke: Invoke, tmp_path: Path) -> None:
    for recipe in recipes():
        shown = invoke("recipes", "show", recipe.name)
        assert shown.exit_code == 0
        heading, _, text = shown.stdout.partition("\n")
        assert heading.startswith(f"# {recipe.path}: {recipe.format}, ") and "GiB of weights" in heading
        (tmp_path / "shown.yaml").write_text(shown.stdout)
        assert text == recipe.path.read_text() and read_yaml(tmp_path / "shown.yaml") == read_yaml(recipe.path)
    for name, hint in (("dem", "Did you mean 'demo'?"), ("zzzzzzzz", "`dflash-trt recipes` lists them.")):
        refused = invoke("recipes", "show", name)
        assert refused.exit_code == 2
        assert f"RECIPE: expected a recipe's name, found {name}. {hint}" in refused.stderr
