"""The plugin library as TensorRT sees it: symbols, the real registry, and every interface function."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.kernels.attention_launch import work_slots, workspace_size
from dflash_trt.kernels.programs import NAMESPACE, PROGRAMS, VERSION
from dflash_trt.kernels.programs.program import TensorRule, flag
from plugins.aot.programs import contract
from tests.plugins.building import ROOT, BuiltLibrary, cuda_headers, run_python, tensorrt_headers
from tests.plugins.c_api import PluginLibrary
from tests.plugins.latent_cases import LATENT_DIM, NOPE_DIM, ROPE_DIM, VALUE_DIM, LatentCase
from tests.plugins.node_inputs import CASES, NODES, NodeInputs

# The C and C++ run-time libraries, and nothing of CUDA or TensorRT.
NEEDED = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0"}
LOADERS = re.compile(r"ld-linux.*\.so\.\d")


def symbols(library: Path, *options: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def needed(library: Path) -> set[str]:
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed))


def test_the_library_and_the_network_know_the_same_contract(built: BuiltLibrary) -> None:
    assert PluginLibrary(built.kernels).contract == contract(PROGRAMS)


@pytest.mark.parametrize(
    "change",
    [
        lambda program: replace(program, inputs=(program.inputs[1], program.inputs[0], *program.inputs[2:])),
        lambda program: replace(program, inputs=(TensorRule("q", "F [T, heads]"), *program.inputs[1:])),
        lambda program: replace(program, outputs=(TensorRule("seen", program.outputs[0].text),)),
        lambda program: replace(program, fields=(flag("states"), *program.fields[1:])),
        lambda program: replace(program, fields=program.fields[::-1]),
        lambda program: replace(program, name="AttendPage"),
    ],
)
def test_a_contract_that_differs_anywhere_is_noticed(built: BuiltLibrary, change: Any) -> None:
    changed = (change(PROGRAMS[0]), *PROGRAMS[1:])
    assert PluginLibrary(built.kernels).contract != contract(changed)


def test_the_library_says_what_is_inside(built: BuiltLibrary) -> None:
    library = PluginLibrary(built.kernels)
    assert library.architectures == "sm_90a"
    assert library.manifest_sha256 == hashlib.sha256(built.manifest.read_bytes()).hexdigest()


def test_the_library_without_plugins_exports_its_c_interface_alone(built: BuiltLibrary) -> None:
    assert all(name.startswith("dflash_trt_") for name in symbols(built.kernels, "--defined-only"))
    assert {name for name in needed(built.kernels) if not LOADERS.match(name)} <= NEEDED


def test_the_plugin_library_exports_what_tensorrt_asks_for_and_needs_neither_it_nor_cuda(
    built_plugin: BuiltLibrary,
) -> None:
    assert built_plugin.plugin is not None
    defined = symbols(built_plugin.plugin, "--defined-only")
    assert {"getCreators", "setLoggerFinder"} == {name for name in defined if not name.startswith("dflash_trt_")}
    undefined = symbols(built_plugin.plugin, "--undefined-only")
    assert undefined
    assert not [name for name in undefined if re.search("nvinfer|^cu[A-Z]|^cuda", name)]
    assert {name for name in needed(built_plugin.plugin) if not LOADERS.match(name)} <= NEEDED


@pytest.fixture(scope="module")
def registry(built_plugin: BuiltLibrary) -> dict[str, Any]:
    if importlib.util.find_spec("tensorrt_lean") is None:
        pytest.skip("needs TensorRT's lean runtime: pip install tensorrt-lean-cu13==11.4.0.106")
    assert built_plugin.plugin is not None
    done = run_python("tests.plugins.lean_registry", built_plugin.plugin)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_real_registry_finds_every_plugin_in_its_namespace_alone(registry: dict[str, Any]) -> None:
    names = [plugin.name for plugin in PROGRAMS]
    assert registry["missing_before"] == names
    assert registry["missing_after"] == []
    assert registry["found_elsewhere"] == []
    assert registry["version"].startswith("11.")


def test_the_real_registry_makes_every_plugin(registry: dict[str, Any]) -> None:
    assert registry["made"] == {plugin.name: [plugin.name, VERSION, NAMESPACE] for plugin in PROGRAMS}
    assert registry["fields"] == {
        plugin.name: [
            *([name, "INT32", 1] for name in plugin.integer_fields),
            *([name, "FLOAT32", 1] for name in plugin.real_fields),
        ]
        for plugin in PROGRAMS
    }


def test_the_real_registry_gets_no_plugin_for_wrong_fields(registry: dict[str, Any]) -> None:
    for plugin in PROGRAMS:
        refused = registry["refused"][plugin.name]
        assert set(refused) >= ({"unknown", "missing", "float32", "int64"} if plugin.integer_fields else {"unknown"})
        assert all(refused.values()), (plugin.name, refused)


def test_a_library_without_plugins_is_refused_by_the_real_registry(
    registry: dict[str, Any], built: BuiltLibrary
) -> None:
    done = run_python("tests.plugins.lean_registry", built.kernels)
    assert "getCreators and setLoggerFinder" in json.loads(done.stdout)["error"]


def test_headers_of_an_earlier_minor_version_make_a_library_for_a_later_registry(
    registry: dict[str, Any], built_plugin: BuiltLibrary
) -> None:
    output = run_host(built_plugin, "none").stdout
    headers = tuple(int(part) for part in re.findall(r"TensorRT headers (\d+)\.(\d+)", output)[0])
    runtime = tuple(int(part) for part in registry["version"].split(".")[:2])
    assert headers[0] == runtime[0] and headers <= runtime
    assert registry["missing_after"] == []


def run_host(built: BuiltLibrary, use: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if use != "none":
        environment["LD_LIBRARY_PATH"] = str(built.fake_driver.parent)
    return subprocess.run(
        [str(built.host), str(built.plugin), use],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("driver", ["none", "fake"])
def test_every_interface_function_keeps_the_contract(built_plugin: BuiltLibrary, driver: str) -> None:
    if driver == "none" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA driver")
    done = run_host(built_plugin, driver)
    assert done.returncode == 0, done.stdout + done.stderr
    [(num_passed, num_failed)] = re.findall(r"(\d+) passed, (\d+) failed", done.stdout)
    assert int(num_passed) > 20_000 and num_failed == "0"


MAX_ENQUEUE_US = 25  # five times the limit, for a machine with other work; 20 to 90 when every call searched the table


def test_a_repeated_step_costs_the_host_microseconds(built_plugin: BuiltLibrary) -> None:
    done = run_host(built_plugin, "small_times")
    assert done.returncode == 0, done.stdout + done.stderr
    times = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    launched = {
        plugin.name for plugin in PROGRAMS if "num_ranks" not in plugin.integer_fields
    }  # that is NCCL's own time
    assert set(times) == launched | {"AttendPages_with_a_prefill_chunk"}
    assert all(0 < enqueue_us <= MAX_ENQUEUE_US for enqueue_us in times.values()), times


# One word changed in what the host expects, and the check that must then fail.
WRONG_EXPECTATIONS = {
    '{"state_pools", {kStates}, i64}': ('{"state_pools", {kStates}, i32}', "AttendPages: state_pools, type"),
    "{attended(block)}, 3}": ("{attended(block)}, 4}", "AttendDraft: 3 launches"),
    'per_request("seed", i64)': ('per_request("seed", i32)', "SampleAndAccept: seed, type"),
    '{"emitted_tokens", {kRequests, kWidth}, i32}': (
        '{"emitted_tokens", {kWidth, kRequests}, i32}',
        "SampleAndAccept: shape of emitted_tokens",
    ),
    '{"WriteDraftContext", {state, page_type, {"page_size", 4},': (
        '{"WriteDraftContext", {state, page_type, {"page_length", 4},',
        "WriteDraftContext: made",
    ),
}


def test_a_host_that_expects_another_contract_says_what_differs(built_plugin: BuiltLibrary, tmp_path: Path) -> None:
    sources = tmp_path / "tests"
    shutil.copytree(ROOT / "plugins" / "tests", sources)
    nodes = (sources / "nodes.h").read_text()
    for right, (wrong, _) in WRONG_EXPECTATIONS.items():
        assert right in nodes
        nodes = nodes.replace(right, wrong)
    (sources / "nodes.h").write_text(nodes)
    headers = tensorrt_headers()
    assert headers is not None
    files = [str(sources / name) for name in ("host.cpp", "build_checks.cpp", "launch_times.cpp", "run_checks.cpp")]
    includes = ["-isystem", str(headers), "-isystem", str(cuda_headers())]
    command = ["c++", "-std=c++17", "-O0", *includes, *files, "-o", str(tmp_path / "host"), "-ldl"]
    subprocess.run(command, check=True, timeout=200)
    done = run_host(replace(built_plugin, host=tmp_path / "host"), "fake")
    assert done.returncode == 1
    for _, complaint in WRONG_EXPECTATIONS.values():
        assert complaint in done.stdout, complaint


@pytest.mark.parametrize("node", ["AttendPages", "AttendDraft"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_workspace_of_attention_serves_gpus_of_up_to_192_multiprocessors(
    built: BuiltLibrary, node: str, kv_heads: int
) -> None:
    """A plan carries the workspace's size to any GPU of its architecture: an H200 has 132, a B200 148."""
    case = replace(CASES["verify"], heads=kv_heads, kv_heads=kv_heads)
    inputs, fields = getattr(NodeInputs(case, torch.device("cpu")), NODES[node])()
    sizes = [
        workspace_size(
            tile=tile,
            kv_heads=kv_heads,
            head_dim=case.head_dim,
            num_slots=work_slots(kv_heads=kv_heads, num_multiprocessors=192),
        )
        for tile in (16, 64)  # those that the library was built with
    ]
    expected = 4 * max(size.num_elements for size in sizes)
    assert PluginLibrary(built.kernels).workspace_bytes(node, inputs, fields) == expected


@pytest.mark.parametrize("num_requests", [1, 4])
def test_the_workspace_of_latents_has_k_and_v_of_any_step_that_a_prompt_makes_long_enough(
    built: BuiltLibrary, num_requests: int
) -> None:
    """Whatever the number of requests: another of as many rows may have the prompt. Else it has FP8 rows alone."""

    def num_bytes(num_rows: int, *, has_fp8_pages: bool = False) -> int:
        rows = (num_rows - num_requests + 1, *[1] * (num_requests - 1))
        case = LatentCase(num_rows=rows, context_lens=(0,) * num_requests, num_heads=1, has_fp8_pages=has_fp8_pages)
        inputs, fields, _ = case.node()
        return PluginLibrary(built.kernels).workspace_bytes("AttendLatents", inputs, fields)

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 256) * 256

    plan = 32 * (64 // 32 + 1 + 1)  # tiles of 32 rows, the request's last, and a slot
    assert num_bytes(64) - num_bytes(63) == aligned(plan) + aligned(4 * 64 * (NOPE_DIM + VALUE_DIM))
    of_fp8 = [num_bytes(num_rows, has_fp8_pages=True) - num_bytes(num_rows) for num_rows in (63, 64)]
    assert of_fp8 == [aligned(4 * num_rows * (LATENT_DIM + ROPE_DIM)) for num_rows in (63, 64)]
