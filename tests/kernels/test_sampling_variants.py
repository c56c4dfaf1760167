"""What the plugin library compiles ahead is what the launchers launch, and it compiles for every architecture."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.logit_rules import mask_tensors
from dflash_trt.kernels import (
    argmax,
    logit_rules,
    norm_launch,
    rejection,
    row_codes_launch,
    sampling,
    sampling_launch,
    top_logprobs,
)
from dflash_trt.kernels.row_codes import AS_THEY_ARE, FP8, NVFP4, NVFP4_TILED
from dflash_trt.kernels.row_codes_launch import RowCodes
from dflash_trt.kernels.rule_tensors import RuleTensors
from dflash_trt.kernels.sampling_launch import workspace_shapes
from dflash_trt.kernels.sampling_scratch import num_tiles
from plugins.aot.sampling_variants import draft_variants, rule_variants, sampling_variants, score_variants
from plugins.aot.variant import pointer
from tests.kernels.small_kernel_variants import norm_variants, quantize_variant
from tests.kernels.test_attention_variants import Recorder
from tests.kernels.test_sampling_kernels import make_inputs

VOCAB_SIZE = 5000
WIDTH = 4
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def recorded(monkeypatch, module, name):
    kernel, recorder = getattr(module, name), Recorder()
    recorder.arg_names = kernel.arg_names
    monkeypatch.setattr(module, name, recorder)
    return recorder


def assert_is_launched_as(variant, recorder, sizes):
    """One launch with the variant's arguments, in type, and its constants, warps and grid."""
    ((grid, args, kwargs),) = recorder.launches
    given = dict(zip(recorder.arg_names, args, strict=False)) | kwargs
    for name, word in variant.signature.items():
        value = given[name]
        if isinstance(value, torch.Tensor):
            assert pointer(value.dtype) == word, name
        else:
            assert word.split(":")[0] == ("fp32" if isinstance(value, float) else "i32"), name
            assert not word.endswith(":16") or value % 16 == 0, name
    assert {name: given[name] for name in variant.constexprs} == dict(variant.constexprs)
    assert set(variant.signature) | set(variant.constexprs) == set(recorder.arg_names)
    assert given["num_warps"] == variant.num_warps
    named = sizes | {name: value for name, value in given.items() if isinstance(value, int)}
    declared = tuple(eval(axis.replace("/", "//"), {}, named) for axis in variant.grid)
    assert declared == (*grid, *(1,) * (3 - len(grid)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 8])
def test_sampling_variants_are_what_is_launched_in_this_order(monkeypatch, dtype, vocab_size):
    variants = sampling_variants(dtype, vocab_size=vocab_size, max_width=WIDTH)
    order, recorders = [], {}
    for variant in variants:
        recorders[variant.name] = recorder = recorded(monkeypatch, _module_of(variant.name), f"{variant.name}_kernel")
        original = recorder.launches
        recorder.launches = _Ordered(original, order, variant.name)
    inputs = make_inputs([(1.0, 0, 1.0, 0.0, 0)] * 3, width=WIDTH)
    draft_topk_ids = torch.zeros(3, (WIDTH - 1) * 8)
    inputs = replace(inputs, draft_topk_ids=draft_topk_ids.int(), draft_topk_probs=draft_topk_ids)
    outputs = sampling_launch.allocate_outputs(3, WIDTH, torch.device("cpu"))
    workspace = sampling_launch.allocate_workspace(3 * WIDTH, vocab_size, torch.device("cpu"))
    logits = torch.zeros(3 * WIDTH, vocab_size, dtype=dtype)
    sampling_launch.sample_and_accept(logits, inputs, outputs, workspace)
    assert order == [variant.name for variant in variants]
    sizes = {"num_requests": 3, "num_rows": 3 * WIDTH, "num_tiles": num_tiles(vocab_size)}
    for variant in variants:
        assert_is_launched_as(variant, recorders[variant.name], sizes)


def _module_of(name):
    return rejection if hasattr(rejection, f"{name}_kernel") else sampling


class _Ordered(list):
    """A list of launches that also notes whose they are."""

    def __init__(self, launches, order, name):
        super().__init__(launches)
        self._order, self._name = order, name

    def append(self, launch):
        self._order.append(self._name)
        super().append(launch)


@pytest.mark.parametrize(
    ("form", "is_gelu"), [(AS_THEY_ARE, False), (FP8, False), (FP8, True), (NVFP4, False), (NVFP4_TILED, False)]
)
def test_norm_and_quantize_variants_are_what_is_launched(monkeypatch, form, is_gelu):
    hidden_size, ffn_size = 64, 5056
    norms = norm_variants(torch.float32, hidden_size=hidden_size, ffn_size=ffn_size, form=form, is_gelu=is_gelu)
    quantize = quantize_variant(torch.float32)
    modules = [norm_launch] * 3 + [row_codes_launch]
    variants = [*norms, quantize]
    recorders = [
        recorded(monkeypatch, module, f"{variant.kernel.fn.__name__}")
        for module, variant in zip(modules, variants, strict=True)
    ]
    x, weight = torch.zeros(3, hidden_size), torch.zeros(hidden_size)

    def codes(num_columns):
        return None if form == AS_THEY_ARE else RowCodes.allocate(form, torch.ones(1), 3, num_columns)

    norm_launch.rms_norm(x, weight, 1e-6, codes=codes(hidden_size))
    norm_launch.add_rms_norm(x, x, weight, 1e-6, codes=codes(hidden_size))
    gated_mul = norm_launch.gelu_mul if is_gelu else norm_launch.silu_mul
    gated_mul(torch.zeros(3, 2 * ffn_size), codes=codes(ffn_size))
    row_codes_launch.quantize_fp8(x, torch.ones(1))
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": 3})


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("vocab_size", [9000, 9008])
def test_draft_variants_are_what_is_launched(monkeypatch, vocab_size, has_map):
    variants = draft_variants(torch.float16, vocab_size=vocab_size, has_map=has_map)
    recorders = [recorded(monkeypatch, argmax, f"{variant.name}_kernel") for variant in variants]
    request, seed = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    mapped = torch.zeros(vocab_size, dtype=torch.int64) if has_map else None
    logits = torch.zeros(6, vocab_size, dtype=torch.float16)
    sampling_launch.draft_tokens(logits, torch.zeros(2), seed, request, request, mapped, draft_topk=8)
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": 6, "num_tiles": 3})


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 8])
def test_logit_rule_variants_are_what_is_launched(monkeypatch, vocab_size):
    variants = rule_variants(torch.float16, vocab_size=vocab_size)
    recorders = [recorded(monkeypatch, logit_rules, f"{variant.name}_kernel") for variant in variants]
    rules = RuleTensors.allocate(4, 77, torch.device("cpu"))
    masks = mask_tensors(None, num_rows=3 * WIDTH, vocab_size=vocab_size, device=torch.device("cpu"))
    logits, slot_ids = torch.zeros(3 * WIDTH, vocab_size, dtype=torch.float16), torch.zeros(3, dtype=torch.int64)
    rows = torch.zeros((3, WIDTH), dtype=torch.int32)
    scores = sampling_launch.adjusted_scores(
        logits, rules, masks, slot_ids=slot_ids, positions=rows.flatten(), logit_rows=rows
    )
    sampling_launch.write_raw_logprobs(
        logits, scores, rules, masks, slot_ids=slot_ids, emitted_tokens=rows, emitted_logprobs=torch.zeros(3, WIDTH)
    )
    sizes = {"num_requests": 3, "num_rows": 3 * WIDTH, "num_tiles": 2}
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, sizes)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 8])
def test_score_variants_are_what_is_launched(monkeypatch, vocab_size):
    variants = score_variants(torch.float16, vocab_size=vocab_size)
    recorders = [recorded(monkeypatch, top_logprobs, f"{variant.name}_kernel") for variant in variants]
    rows = torch.zeros(3, dtype=torch.int64)
    sampling_launch.score_rows(torch.zeros(5, vocab_size, dtype=torch.float16), 7, rows=rows, tokens=rows)
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": 3})


def test_the_workspace_is_counted_by_row():
    one, many = workspace_shapes(1, VOCAB_SIZE), workspace_shapes(7, VOCAB_SIZE)
    assert all(many[name] == (dtype, (7, *shape[1:])) for name, (dtype, shape) in one.items())


COMPILE = """
import itertools, json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from dflash_trt.kernels.row_codes import AS_THEY_ARE, FP8, NVFP4, NVFP4_TILED
from tests.kernels.small_kernel_variants import norm_variants, quantize_variant, row_copy_variants
from plugins.aot.sampling_variants import draft_variants, rule_variants, sampling_variants, score_variants

def variants(dtype, vocab_size, forms):
    yield from sampling_variants(dtype, vocab_size=vocab_size, max_width=16)
    for form in forms:
        yield from norm_variants(dtype, hidden_size=4096, ffn_size=12288, form=form)
    for has_map in (False, True):
        yield from draft_variants(dtype, vocab_size=vocab_size, has_map=has_map)
    yield quantize_variant(dtype)
    yield from rule_variants(dtype, vocab_size=vocab_size)
    yield from score_variants(dtype, vocab_size=vocab_size)
    yield from row_copy_variants()

plan = [
    (90, torch.bfloat16, 151936, (AS_THEY_ARE, FP8)),
    (100, torch.bfloat16, 128256, (NVFP4, NVFP4_TILED)),
    (103, torch.float32, 262145, (AS_THEY_ARE, FP8)),
]
for arch, dtype, vocab_size, forms in plan:
    for variant in variants(dtype, vocab_size, forms):
        compiled = triton.compile(variant.source(), target=GPUTarget("cuda", arch, 32), options=variant.options)
        print(json.dumps({
            "arch": arch,
            "name": variant.name,
            "shared": compiled.metadata.shared,
            "num_bytes": len(compiled.asm["cubin"]),
            "spills": "st.local" in compiled.asm["ptx"],
        }))
"""


def test_every_kernel_compiles_ahead_of_time(tmp_path):
    """In a process of its own: under the interpreter there is no compiler. Never run here: there is no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    counts = {arch: len(list(group)) for arch, group in itertools.groupby(rows, key=lambda row: row["arch"])}
    assert counts == {90: 28, 100: 28, 103: 28}
    assert all(row["num_bytes"] > 1000 and row["shared"] <= 48 * 1024 and not row["spills"] for row in rows)
