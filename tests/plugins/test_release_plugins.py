"""Plugin libraries of published pairs, named for a release: which are made, what their names and the index say."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.plugin_build import headers_version
from scripts import release_plugins


def test_a_dry_run_names_each_recipe_with_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_plugins.main(["qwen3-8b-bf16", "qwen3-8b-nvfp4", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "qwen3-8b-bf16 sm_90a",
        "qwen3-8b-bf16 sm_103a",
        "qwen3-8b-nvfp4 sm_103a",
    ]
    assert release_plugins.main(["--dry-run", "--arch", "103a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and all(line.endswith(" sm_103a") for line in lines)
    assert not any(line.startswith("demo") for line in lines)  # no published pair


def test_an_unknown_recipe_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_plugins.main(["qwen3-9b"]) == 1
    assert "recipes: expected names of recipes, found qwen3-9b" in capsys.readouterr().err


def test_a_recipe_is_built_from_shapes_alone(tmp_path: Path) -> None:
    (recipe,) = release_plugins.chosen_recipes(["gpt-oss-120b-mxfp4"])
    fields = read_yaml(release_plugins.write_build_file(recipe, tmp_path))
    for part in ("target", "drafter"):
        assert (Path(str(fields[part])) / "config.json").is_file()
    written = {name: value for name, value in fields.items() if name not in ("target", "drafter")}
    own = read_yaml(recipe.path)
    assert written == {name: value for name, value in own.items() if name not in ("target", "drafter")}


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "include"
    directory.mkdir()
    (directory / "NvInferRuntime.h").touch()
    version = "#define TRT_MAJOR_ENTERPRISE 11\n#define TRT_MINOR_ENTERPRISE 4\n#define TRT_PATCH_ENTERPRISE 1\n"
    (directory / "NvInferVersion.h").write_text(version)
    monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(directory))
    return directory


def test_files_are_named_hashed_and_listed(
    headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler itself is that of build-plugin, which has tests of its own."""
    asked: list[list[str]] = []

    def build(options: list[str], output: Path) -> Path:
        asked.append(options)
        (output / "kernels").mkdir(parents=True)
        manifest = {"origin": {"triton": "3.9.0"}, "kernels": [{}, {}]}
        (output / "kernels/manifest.json").write_text(json.dumps(manifest))
        library = output / "libdflash_trt_plugin.so"
        library.write_bytes(" ".join(options[2:]).encode())
        return library

    monkeypatch.setattr(release_plugins, "build_plugin_library", build)
    output = tmp_path / "dist"
    assert release_plugins.main(["qwen3-8b-fp8", "-o", str(output)]) == 0
    assert [options[2:] for options in asked] == [["--arch", "90a"], ["--arch", "103a"]]
    rows = json.loads((output / "index.json").read_text())
    sums = dict(reversed(line.split("  ")) for line in (output / "SHA256SUMS").read_text().splitlines())
    for row, architecture, capability in zip(rows, ("90a", "103a"), ("9.0", "10.3"), strict=True):
        content = (output / row["file"]).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        assert row["file"] == f"libdflash_trt_plugin-qwen3-8b-fp8-sm_{architecture}-trt11.4-{sha256[:8]}.so"
        assert row["sha256"] == sums[row["file"]] == sha256 and row["size_bytes"] == len(content)
        found = (row["compute_capability"], row["tensorrt"], row["triton"], row["num_kernels"])
        assert found == (capability, "11.4", "3.9.0", 2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_kernel_compiler_that_fails_ends_it(
    headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: Any = lambda options, output: None  # noqa: E731
    monkeypatch.setattr(release_plugins, "build_plugin_library", failed)
    assert release_plugins.main(["qwen3-8b-bf16", "-o", str(tmp_path / "dist")]) == 1
    assert "recipe qwen3-8b-bf16: expected a library, found none" in capsys.readouterr().err


def test_headers_say_their_version(headers: Path) -> None:
    assert headers_version(headers) == ("11", "4")
    (headers / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 11\n#define NV_TENSORRT_MINOR 1\n")
    assert headers_version(headers) == ("11", "1")
    (headers / "NvInferVersion.h").write_text("")
    assert headers_version(headers) == ()
