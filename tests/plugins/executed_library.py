"""The plugin library's launches, executed on a CPU.

    python -m tests.plugins.executed_library LIBRARY DRIVER MANIFEST

A stand-in for the CUDA driver hands every launch back, and the PTX that its cubin was assembled from is executed
with the parameters and the grid that the library passed. So what is compared with PyTorch is what ships: the compiled
kernels, and the C++ that chooses variants, arguments, grids and workspace. It runs in a process of its own, because
the stand-in answers to the name libcuda.so.1. Prints one JSON object.
"""

import ctypes
import hashlib
import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.aot.compile import NUM_SCRATCH_POINTERS
from plugins.aot.manifest import PTX_DIR
from software_gpu.ptx.library import PtxKernel
from tests.plugins.c_api import LibraryError, PluginLibrary
from tests.plugins.delta_cases import CASES as DELTA_CASES
from tests.plugins.delta_cases import DeltaCase, kept_state
from tests.plugins.expert_cases import CASES as EXPERT_CASES
from tests.plugins.expert_cases import ExpertsCase
from tests.plugins.fixed_cases import FixedCase
from tests.plugins.fixed_cases import cases as fixed_cases
from tests.plugins.latent_cases import CASES as LATENT_CASES
from tests.plugins.latent_cases import LatentCase
from tests.plugins.node_inputs import (
    ANCHORED,
    CASES,
    NODES,
    PAIRS,
    READ_RULES,
    SAMPLING_NODES,
    SCORE_FIELDS,
    NodeInputs,
    StepCase,
    defined,
)
from tests.trt.plugin_reference import PluginReference


class _Launch(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_void_p),
        ("entry", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    )


class ExecutingDriver:
    """Runs launches; `launched` names them. Asynchronous work of a kernel is done at the last moment it may be."""

    def __init__(self, driver: Path, manifest: Path) -> None:
        self._driver = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
        self._variants = json.loads(manifest.read_text())["kernels"]
        self._ptx_dir = manifest.parent / PTX_DIR
        self._kernels: dict[str, PtxKernel] = {}  # by the cubin's hash
        self.launched: list[str] = []
        self.errors: list[str] = []
        self._callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))(self._on_launch)
        self._driver.fake_set_callback(self._callback)
        self.set_device(9, 0)

    def set_device(self, major: int, minor: int, *, num_multiprocessors: int = 1) -> None:
        self._driver.fake_set_device(major, minor, num_multiprocessors)

    def set_failing(self, function: str) -> None:
        self._driver.fake_set_failing(function.encode())

    def _on_launch(self, pointer: Any) -> None:
        try:
            self._execute(pointer.contents)
        except Exception as error:  # noqa: BLE001  (an exception cannot pass through C)
            self.errors.append(f"{type(error).__name__}: {error}")

    def _execute(self, launch: _Launch) -> None:
        variant = self._variant(launch)
        self.launched.append(variant["variant"])
        assert tuple(launch.block) == (32 * variant["num_warps"], 1, 1)
        assert launch.shared_bytes == variant["shared_bytes"]
        kernel = self._kernel(variant)
        last_offset, last_size = kernel.parameters[-1]
        parameters = bytearray(last_offset + last_size)
        for i, (offset, size) in enumerate(kernel.parameters):
            parameters[offset : offset + size] = ctypes.string_at(launch.arguments[i], size)
        assert not any(parameters[kernel.parameters[-NUM_SCRATCH_POINTERS][0] :]), "Triton's scratch areas are empty"
        kernel.launch(tuple(launch.grid), launch.block[0], launch.shared_bytes, bytes(parameters))

    def _kernel(self, variant: dict[str, Any]) -> PtxKernel:
        sha256 = variant["sha256"]
        if sha256 not in self._kernels:
            self._kernels[sha256] = PtxKernel((self._ptx_dir / f"{sha256}.ptx").read_text(), variant["entry"])
        return self._kernels[sha256]

    def _variant(self, launch: _Launch) -> dict[str, Any]:
        """By the cubin's bytes: what the driver would have executed."""
        for variant in self._variants:
            if variant["entry"].encode() == launch.entry:
                image = ctypes.string_at(launch.image, variant["num_bytes"])
                if hashlib.sha256(image).hexdigest() == variant["sha256"]:
                    return dict(variant)
        raise AssertionError(f"no variant of the manifest has the cubin of {launch.entry!r}")


def compare(
    library: Any, node: str, case: StepCase, *, spoil: bool = False, other_fields: dict[str, float] | None = None
) -> float:
    """The largest difference of any output from PyTorch's. `spoil` changes one input of the library's only; with
    `other_fields` of the library's only, the first output alone is compared: not what was written, but what was read.
    """
    make = NODES[node]
    theirs, ours = (NodeInputs(case, torch.device("cpu")) for _ in range(2))
    inputs, fields = getattr(theirs, make)()
    expected = [*reference(node, inputs, fields), *theirs.written]
    given, _ = getattr(ours, make)()
    if spoil:
        name = {"AttendPages": "k", "PreviousRows": "x"}.get(node, "logits" if node in SAMPLING_NODES else "context_v")
        given[name][0] = given[name][0].flip(-1)
    if other_fields is not None:
        found = library(node, given, fields | other_fields)[:1]
        return float((found[0].double() - expected[0].double()).abs().max())
    found = [*library(node, given, fields), *ours.written]
    pairs = zip(defined(node, found), defined(node, expected), strict=True)
    differences = [(a.double() - b.double()).abs() for a, b in pairs]
    return max(float(x.max()) if x.numel() else 0.0 for x in differences)


def without_rules(library: Any, name: str) -> float:
    """The largest difference from PyTorch's where the library gets zeros for one tensor of the rules and masks."""
    theirs, ours = (NodeInputs(CASES["rules and masks"], torch.device("cpu")).sample_and_accept() for _ in range(2))
    expected = reference("SampleAndAccept", *theirs)
    ours[0][name].zero_()
    found = library("SampleAndAccept", *ours)
    return largest_difference([x.double() for x in found], [x.double() for x in expected])


def run_experts(library: Any, driver: ExecutingDriver, case: ExpertsCase) -> dict[str, Any]:
    """The largest difference from PyTorch's, of the largest result; also with one expert's codes corrupted."""
    inputs, fields = case.node()
    [expected] = reference("Experts", inputs, fields)
    driver.launched.clear()
    [found] = library("Experts", inputs, fields)
    launched = list(driver.launched)
    inputs["down_codes"] = inputs["down_codes"].flip(1).contiguous()
    [corrupted] = library("Experts", inputs, fields)
    scale = expected.abs().max()
    return {
        "difference": float((found - expected).abs().max() / scale),
        "corrupted": float((corrupted - expected).abs().max() / scale),
        "launches": launched,
    }


def run_delta(library: Any, driver: ExecutingDriver, case: DeltaCase, node: str) -> dict[str, Any]:
    """The largest difference of results and of the state behind them; also with every third row's decay corrupted.

    Records behind the last row of a block, and those of prompts, mean nothing.
    """
    inputs, fields, theirs = case.node()
    [expected] = reference(node, inputs, fields)
    has_unit_keys = node == "GatedDelta"  # in order, their lengths are computed where they are used
    expected_state = kept_state(case, theirs, has_unit_keys=has_unit_keys)
    driver.launched.clear()
    inputs, fields, ours = case.node()
    [found] = library(node, inputs, fields)
    launched = list(driver.launched)
    parts = zip(kept_state(case, ours, has_unit_keys=has_unit_keys), expected_state, strict=True)
    inputs, fields, _state = case.node()  # which lives as long as its addresses are used
    inputs["ba"][::3] += 1.0
    [corrupted] = library(node, inputs, fields)
    return {
        "difference": float((found - expected).abs().max()),
        "state": max(float((a - b).abs().max()) for a, b in parts),
        "corrupted": float((corrupted - expected).abs().max()),
        "launches": launched,
    }


def run_fixed(library: Any, driver: ExecutingDriver, case: FixedCase) -> dict[str, Any]:
    """The largest difference from PyTorch's, and if rows have other bits alone than among others."""
    inputs, fields, _owner = case.make()
    expected = reference(case.node, inputs, fields)
    inputs, fields, _pages = case.make()
    driver.launched.clear()
    found = library(case.node, inputs, fields)
    launched = list(driver.launched)
    driver.launched.clear()
    alone = library(case.node, case.alone(inputs), fields)
    scale = max(float(x.abs().max()) for x in expected)
    return {
        "difference": largest_difference(found, expected) / scale,
        "has_same_bits": all(torch.equal(a, b[case.rows]) for a, b in zip(alone, found, strict=True)),
        "launches": launched,
        "alone": list(driver.launched),
    }


def run_latents(library: Any, driver: ExecutingDriver, case: LatentCase) -> dict[str, Any]:
    """The largest difference of results and of pages; also with one row corrupted, or the key's factor, which only
    prompts that begin are attended with. No address: pages stay as they are. Behind the queries there is no memory.
    """
    inputs, fields, theirs = case.node()
    expected = reference("AttendLatents", inputs, fields)
    driver.launched.clear()
    driver.set_device(9, 0, num_multiprocessors=case.num_multiprocessors)
    inputs, fields, ours = case.node()
    inputs["q"] = at_the_end_of_memory(inputs["q"])
    found = library("AttendLatents", inputs, fields)
    launched, pages = list(driver.launched), ours.float().clone()
    library("AttendLatents", inputs | {"own": inputs["own"] + 1}, fields | {"state": 0})
    is_unchanged = bool((ours.float() == pages).all())
    other = inputs | {"k_factor": inputs["k_factor"].flip(1).contiguous()}
    of_other_factor = library("AttendLatents", other, fields) if len(launched) > 4 else found  # else nothing reads it
    inputs["own"][0] = inputs["own"][0].flip(-1)
    corrupted = library("AttendLatents", inputs, fields)
    driver.set_device(9, 0)
    offsets = inputs["token_offsets"].tolist()
    return {
        "difference": largest_difference(found, expected),
        "pages": float((pages - theirs.float()).abs().max()),
        "corrupted": largest_difference(corrupted, expected),
        "of_other_factor": [
            largest_difference(*([x[offsets[r] : offsets[r + 1]] for x in both] for both in (of_other_factor, found)))
            for r in range(len(case.num_rows))
        ],
        "is_unchanged": is_unchanged,
        "launches": launched,
    }


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of any output; NaN counts as infinitely wrong."""
    differences = [(a - b).abs().nan_to_num(torch.inf) for a, b in zip(found, expected, strict=True)]
    return max((float(x.max()) for x in differences if x.numel()), default=0.0)


def at_the_end_of_memory(x: Tensor) -> Tensor:
    """A copy: to read one byte more ends the process."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    end = ctypes.c_char.from_buffer(memory, size)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(end)), mmap.PAGESIZE, 0) == 0
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=x.nbytes, offset=size - x.nbytes)
        .view(x.dtype)
        .view(x.shape)
        .copy_(x)
    )


def reference(name: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
    node_ = type("Node", (), {"name": name, "fields": fields})
    programs = PluginReference().programs
    outputs = PluginReference()(node_, [inputs[key].clone() for key in programs[name].input_names])
    return [] if name == "WriteDraftContext" else outputs  # its output has no value


def main() -> dict[str, Any]:
    library_path, driver_path, manifest_path = (Path(argument) for argument in sys.argv[1:])
    driver = ExecutingDriver(driver_path, manifest_path)
    library = PluginLibrary(library_path)
    results: dict[str, Any] = {"differences": {}, "spoilt": {}, "launches": {}}
    for node, case_name in PAIRS:
        driver.launched.clear()
        results["differences"][f"{node}, {case_name}"] = compare(library, node, CASES[case_name])
        results["launches"][f"{node}, {case_name}"] = list(driver.launched)
    for node in NODES:
        small = CASES["verify" if node == "ScoreRows" else "one token" if node in SAMPLING_NODES else "one head"]
        results["spoilt"][node] = compare(library, node, small, spoil=True)
    for node in ("AttendPages", "AttendDraft"):
        for name in ("k_scale", "v_scale"):
            case = CASES["FP8 pages"]
            other_fields = {name: 1.5 * case.scales[name]}
            results["spoilt"][f"{node}, {name}"] = compare(library, node, case, other_fields=other_fields)
    for (node, name), (case_name, value) in SCORE_FIELDS.items():
        found = compare(library, node, CASES[case_name], other_fields={name: value})
        results["spoilt"][f"{node}, {name}"] = found
    for name in ANCHORED:
        other_fields = {"is_window_anchored": 0.0}
        results["spoilt"][name] = compare(library, "AttendDraft", CASES[name], other_fields=other_fields)
    results["spoilt"] |= {name: without_rules(library, name) for name in READ_RULES}
    results["experts"] = {name: run_experts(library, driver, case) for name, case in EXPERT_CASES.items()}
    for node in ("GatedDelta", "GatedDeltaInOrder"):
        results[node] = {name: run_delta(library, driver, case, node) for name, case in DELTA_CASES.items()}
    results["latents"] = {name: run_latents(library, driver, case) for name, case in LATENT_CASES.items()}
    results["fixed"] = {name: run_fixed(library, driver, case) for name, case in fixed_cases().items()}
    results["errors"] = driver.errors
    results["refusals"] = refusals(library, driver)
    return results


def refusals(library: Any, driver: ExecutingDriver) -> dict[str, str]:
    """What the library says of what it cannot do."""
    case = CASES["verify"]

    def message(changed: StepCase = case, *, misplaced: str = "") -> str:
        inputs, fields = NodeInputs(changed, torch.device("cpu")).attend_pages()
        if misplaced:
            moved = torch.empty(inputs[misplaced].numel() + 1, dtype=inputs[misplaced].dtype)[1:]
            inputs[misplaced] = moved.view(inputs[misplaced].shape).copy_(inputs[misplaced])
        try:
            library("AttendPages", inputs, fields)
        except LibraryError as error:
            return str(error)
        return "accepted"

    def message_of_experts(**changed: float) -> str:
        inputs, fields = EXPERT_CASES["groups of experts"].node()
        try:
            library("Experts", inputs, fields | changed)
        except LibraryError as error:
            return str(error)
        return "accepted"

    found = {
        "no groups": message_of_experts(num_groups=0),
        "uneven groups": message_of_experts(num_groups=3),
        "groups": message_of_experts(num_chosen_groups=1),
        "head_dim": message(replace(case, head_dim=48)),
        "score_scale": message(replace(case, score_scale=-1.0)),
        "softcap": message(replace(case, softcap=-1.0)),
        "odd head_dim": message(replace(case, head_dim=24)),
        "dtype": message(replace(case, dtype=torch.bfloat16)),
        "page_size": message(replace(case, page_size=6)),
        "heads": message(replace(case, heads=3)),
        "requests": message(replace(case, num_tokens=(1,) * 17, context_lens=(0,) * 17, width=1)),
        "address": message(misplaced="q"),
    }
    driver.set_device(7, 5)
    found["architecture"] = message()
    driver.set_device(9, 0)
    for function in ("cuCtxGetDevice", "cuLaunchKernel"):
        driver.set_failing(function)
        found[function] = message()
    driver.set_failing("")
    found["then"] = message()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
