"""The CPU kernels of aarch64 under an emulator: they have AVX2's bits, and their tiles fit in the registers."""

import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.native import build
from dflash_trt.backends.torch.native.build import UnavailableError, instruction_sets, library_path
from dflash_trt.backends.torch.native.four_bits import four_bit_linear
from dflash_trt.backends.torch.native.library import CpuKernels, load_kernels
from dflash_trt.backends.torch.native.linear import integer_linear, panel_linear
from dflash_trt.network.ops import Linear
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.network.kernel_sets import ARM_SETS, COMPILER, NEEDS_ARM, arm_library, kernels_of
from tests.network.test_cpu_four_bits import FORMATS, quantized
from tests.network.test_cpu_integers import random_weight
from tests.network.test_cpu_kernels import HEAD_DIM, HEADS, MASKS, ROTARY, attended, make_gqa, make_ops
from tests.network.test_cpu_programs import PROMPTS, Counted, outputs_of, tokens_of

needs_avx2 = pytest.mark.skipif("avx2" not in instruction_sets(), reason="compares with AVX2")


@pytest.fixture(scope="module", params=ARM_SETS)
def arm(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    with kernels_of(request.param) as kernels:
        yield kernels


def products(kernels: CpuKernels) -> dict[str, Tensor]:
    """Tiles of all sizes, panels that are not full, and odd numbers of inputs."""
    found = {}
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 70):
        x = torch.randn(num_rows, 384)
        for num_out in (24, 160):
            float32 = Linear(weight=torch.randn(num_out, 37).bfloat16().float(), bias=torch.randn(num_out))
            integers = Linear(weight=random_weight((num_out, 37)), bias=torch.randn(num_out))
            layers = {"float32": panel_linear(float32, kernels), "int8": integer_linear(integers, kernels)}
            for name in FORMATS:
                weight = Linear(weight=quantized(name, (num_out, 384)))
                layers[name] = four_bit_linear(weight, kernels, rounds_inputs=False)
                layers[f"{name}, rounded inputs"] = four_bit_linear(weight, kernels, rounds_inputs=True)
            for name, layer in layers.items():
                assert layer is not None
                found[f"{name}, {num_rows} rows, {num_out} outputs"] = layer(x[:, : layer.weight.shape[1]])
    return found


def other_ops(kernels: CpuKernels) -> dict[str, Tensor]:
    """Whole vectors of them: what is left of a row is the C library's arithmetic."""
    ops, x = make_ops(kernels), torch.randn(5, 2 * 64) * 30
    extremes = torch.tensor([-torch.inf, -200.0, -104.5, -87.3, -0.0, 1e-42, 88.9, torch.inf])
    both = torch.cat((extremes.repeat(8), torch.randn(64)))[None]
    positions = torch.tensor([3, 500, 0, 77, 9], dtype=torch.int32)
    heads = torch.randn(5, HEADS, HEAD_DIM)
    found = {
        "norm": ops.rms_norm(x, torch.randn(128), 1e-6),
        "activation": ops.silu_mul(x),
        "activation of extremes": ops.silu_mul(both),
        "rotation": ops.norm_rope(heads, torch.randn(HEAD_DIM), 1e-6, ops.rope_table(ROTARY, positions)),
    }
    for name, mask in MASKS.items():
        for dtype in (torch.float32, torch.bfloat16):
            values, pages = attended(ops, make_gqa(mask), is_block=not mask.is_causal, dtype=dtype)
            found |= {f"{name}, {dtype}": values, f"pages, {name}, {dtype}": pages.float()}
    return found


@NEEDS_ARM
@needs_avx2
@pytest.mark.parametrize("compute", [products, other_ops])
def test_kernels_have_the_bits_of_avx2(arm: CpuKernels, compute) -> None:
    found, expected = {}, {}
    for results, kernels in ((found, arm), (expected, load_kernels(library_path("avx2")))):
        torch.manual_seed(0)
        results |= compute(kernels)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []
    first = next(iter(expected))
    found[first].view(torch.int32)[-1, -1] ^= 1  # the negative control
    assert not same_bits(found[first], expected[first])


def same_bits(x: Tensor, y: Tensor) -> bool:
    """A NaN is like any other."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(*(z.nan_to_num(7).view(torch.int32) for z in (x, y)))


@NEEDS_ARM
@needs_avx2
def test_an_engine_has_the_texts_and_the_logits_of_avx2(
    arm: CpuKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a pair with drafts, whose steps are recorded."""
    target = make_target(tmp_path / "target", vocab_size=16, head_dim=32, tokenizer=False, dtype=torch.bfloat16)
    drafter = make_zlab_drafter(
        tmp_path / "drafter", target_dir=target, block_size=6, dtype=torch.bfloat16, head_dim=32
    )
    monkeypatch.setattr("tests.network.test_cpu_programs.PROMPTS", PROMPTS[:2])
    monkeypatch.setattr("dflash_trt.backends.torch.executor.Programs", Counted)
    texts, logits = [], []
    for kernels in (arm, load_kernels(library_path("avx2"))):
        monkeypatch.setattr(Counted, "num_replayed", 0)
        monkeypatch.setattr("tests.engines.cpu_kernels", lambda kernels=kernels: kernels)
        executor = make_executor(target, drafter)
        texts.append(tokens_of(outputs_of(executor, {1: 3})))
        assert Counted.num_replayed > 5
        logits.append(executor.target_logits(PROMPTS[2] + PROMPTS[3]))
    assert texts[0] == texts[1]
    assert max(accepted for _, steps, _ in texts[0] for accepted in steps) > 0
    assert torch.equal(*logits)


_BRANCH = re.compile(r"(b|b\.\w+|cbn?z|tbn?z)$")


def tile_loops(assembly: str) -> list[list[tuple[str, str]]]:
    """Loops over panels without branches inside, as instructions and operands."""
    loops, found = [], re.compile(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)")
    lines = [match.groups() for match in map(found.match, assembly.splitlines()) if match]
    where = {address: index for index, (address, _, _) in enumerate(lines)}
    last = -1  # branch
    for index, (_, name, operands) in enumerate(lines):
        if not _BRANCH.match(name):
            continue
        to = re.search(r"([0-9a-f]+) <", operands)
        start = where.get(to[1], index) if to else index
        body = [line[1:] for line in lines[start:index]]
        if last < start < index and sum(is_product(*each) for each in body) >= 8:
            loops.append(body)
        last = index
    return loops


def is_product(name: str, operands: str) -> bool:
    """`stored_codes.cpp`, which has no panels, makes others: of 16-bit integers, into a new vector."""
    makes_shorts = operands.partition(",")[0].endswith(".8h")
    return name in ("fmla", "smlal", "smlal2", "sdot") or (name in ("smull", "smull2") and makes_shorts)


def spills(loop: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Moves of vectors between registers and the stack."""
    return [line for line in loop if line[0][:2] in ("ld", "st") and re.match(r"q\d+,.*\[(sp|x29)", line[1])]


def test_a_spill_is_found() -> None:
    lines = ["fmla v0.4s, v1.4s, v2.4s"] * 8 + ["ldp q1, q2, [sp, #16]", "ldr q3, [x1]", "b.ne 0 <f>"]
    [loop] = tile_loops("\n".join(f"  {4 * index:x}:\t{line}" for index, line in enumerate(lines)))
    assert spills(loop) == [("ldp", "q1, q2, [sp, #16]")]


@NEEDS_ARM
@pytest.mark.parametrize("instruction_set", ARM_SETS)
def test_tiles_keep_sums_and_operands_in_registers(instruction_set: str) -> None:
    version = subprocess.run([COMPILER, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if version.partition(".")[0].strip() != "12":
        pytest.skip(f"GCC {version.strip()} gives out registers in another way than GCC 12")
    disassembler = COMPILER.replace("g++", "objdump")
    command = [disassembler, "-d", "--no-show-raw-insn", str(arm_library(instruction_set))]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = tile_loops(assembly)
    assert [line for loop in loops for line in spills(loop)] == []
    has_dot = instruction_set == "neondot"
    kinds = {
        "four bits, rounded inputs": {"tbl", "sdot" if has_dot else "smull"},
        "int8": {"sdot" if has_dot else "smlal"},
        "four bits": {"tbl"},
        "bfloat16": {"prfm"},
    }
    shares = dict.fromkeys((*kinds, "float32"), 0.0)  # of products in the best loop of each
    for loop in loops:
        names = {name for name, _ in loop}
        weights = next((kind for kind, needed in kinds.items() if needed <= names), "float32")
        shares[weights] = max(shares[weights], sum(is_product(*each) for each in loop) / len(loop))
    expected = {"float32": 0.67, "bfloat16": 0.58, "int8": 0.62, "four bits": 0.31, "four bits, rounded inputs": 0.33}
    if has_dot:  # of four times as many products in an instruction, or twice as many
        expected |= {"int8": 0.52, "four bits, rounded inputs": 0.38}
    assert shares == pytest.approx(expected, abs=0.01)


def test_linux_on_aarch64_has_them_and_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = "processor\t: 0\nFeatures\t: fp asimd evtstrm\n\n"
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(build, "open", lambda _: io.StringIO(cpuinfo), raising=False)
    assert instruction_sets() == ["neon"]
    cpuinfo = cpuinfo.replace("evtstrm", "asimddp")
    assert instruction_sets() == ["neondot", "neon"]
    cpuinfo = cpuinfo.replace("asimd", "")
    with pytest.raises(UnavailableError, match="this CPU has no Advanced SIMD"):
        instruction_sets()
    for system, machine in (("Darwin", "arm64"), ("Linux", "riscv64"), ("Linux", "armv7l")):
        monkeypatch.setattr(build.platform, "system", lambda system=system: system)
        monkeypatch.setattr(build.platform, "machine", lambda machine=machine: machine)
        with pytest.raises(UnavailableError, match=f"this is {system} on {machine}"):
            instruction_sets()
