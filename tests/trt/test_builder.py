"""The whole step through TensorRT-RTX's real ahead-of-time builder, and what surrounds a build."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dflash_trt.backends.tensorrt.builder import PlanOptions, build_plan
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.network import state_tensors_of
from dflash_trt.backends.tensorrt.plan_stream import NoBytes
from dflash_trt.backends.tensorrt.profiles import profile_inputs, step_profiles
from dflash_trt.backends.tensorrt.timing_cache import load_timing_cache, store_timing_cache
from dflash_trt.cli.main import cli
from dflash_trt.core.errors import BuildError
from dflash_trt.core.mapping import Mapping
from dflash_trt.engine_dir import EngineLimits
from tests.engines import PAGE_SIZE
from tests.trt.networks import MAX_SEQ_LEN, define_pair, host_tensors, open_spec
from tests.trt.test_step_tokens import FP8_PAGES, PAIRS, make_pair

LIMITS = EngineLimits(
    max_batch_size=4, max_seq_len=MAX_SEQ_LEN, max_num_tokens=64, max_draft_len=3, page_size=PAGE_SIZE
)
CHECK = PlanOptions(flavor="tensorrt_rtx", compute_capability="SM120")

# One build covers several of the cases: the names of PAIRS, the dtype, and K.
BUILDS = {
    "Qwen3, fp32, K 15, three taps": (
        {**PAIRS["three taps for two layers, out of order"], "block_size": 16},
        "float32",
    ),
    "Llama, bf16, K 7, sliding draft layers": (
        {**PAIRS["causal sliding and full draft layers"], "family": "llama", "block_size": 8},
        "bfloat16",
    ),
    "Qwen3, fp16, K 1, reduced vocabulary": ({**PAIRS["a reduced draft vocabulary"], "block_size": 2}, "float16"),
    "Qwen3, bf16, no drafter, sliding target": ({**PAIRS["sliding target layers"], "has_drafter": False}, "bfloat16"),
}


def build(root, options, dtype, *, pages=None, limits=LIMITS, plan_options=CHECK, **more):
    spec, tensors = open_spec(*make_pair(root, **options), dtype=dtype)
    spec = replace(spec, quantization=pages)
    limits = limits.model_copy(update={"max_draft_len": spec.max_draft_len})
    rope_tables = host_rope_tables(spec, max_seq_len=limits.max_seq_len)
    more = {"sink": NoBytes()} | more
    return build_plan(spec, limits, host_tensors(tensors), rope_tables=rope_tables, options=plan_options, **more)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("Qwen3, fp")) for name in BUILDS]
)
def test_the_whole_step_compiles_with_both_profiles(trt, tmp_path, name):
    phases = set()
    built = build(tmp_path, *BUILDS[name], progress=lambda phase, done, total: phases.add((phase, done == total)))
    assert built.plan_bytes > 100_000
    assert [profile.name for profile in built.profiles] == ["decode", "mixed"]
    assert built.num_layers == sum(built.layer_counts.values())
    assert {done for _, done in phases} == {False, True}  # the progress monitor saw beginnings and ends
    assert "TF32" not in built.flags


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_whole_step_compiles_with_fp8_pages(trt, tmp_path, dtype):
    built = build(tmp_path, {}, dtype, pages=FP8_PAGES)
    assert "state_pools INT64 [6]" in built.inputs
    assert built.layer_counts["PLUGIN_V3"] == 4 + 2 + 3  # attention, the sampler, scores and drafts


def test_the_network_of_one_of_two_ranks_sums_and_gathers_where_it_must(trt, tmp_path):
    """Two all-reduces per layer, and one all-gather per head; q, k, v and the vocabulary are halved."""
    defined = define_pair(trt, *make_pair(tmp_path), mapping=Mapping(world_size=2, tp_size=2, rank=1))
    layers = [defined.network.get_layer(i) for i in range(defined.network.num_layers)]
    collectives = [layer for layer in layers if layer.type.name == "DIST_COLLECTIVE"]
    assert len(collectives) == 2 * (4 + 2) + 2
    assert {layer.num_ranks for layer in collectives} == {2}
    pages = next(tensor for tensor in state_tensors_of(defined.spec) if tensor.name == "target_kv.0")
    assert pages.shape == (-1, 2, PAGE_SIZE, 1, 16)


def test_profiles_cover_what_the_limits_allow_and_nothing_more(tmp_path):
    spec, _ = open_spec(*make_pair(tmp_path), dtype="float32")
    decode, mixed = step_profiles(spec, LIMITS)
    shapes = {tensor.name: decode.shapes_of(tensor) for tensor in profile_inputs(spec)}
    assert shapes["token_ids"] == ((1,), (16,), (16,))  # 4 requests of 3 drafts and an anchor
    assert shapes["logit_rows"] == ((1, 2), (4, 4), (4, 4))
    count = spec.draft_topk  # of each draft
    assert shapes["draft_topk_ids"] == shapes["draft_topk_probs"] == ((1, count), (4, 3 * count), (4, 3 * count))
    assert not {"draft_topk_ids", "draft_topk_probs"} & {
        tensor.name for tensor in profile_inputs(replace(spec, max_draft_len=0))
    }
    num_pages = MAX_SEQ_LEN // PAGE_SIZE + 1  # a chained row may reach past the end
    assert shapes["page_table"][2] == (4, num_pages)
    assert shapes["page_table"][1] == (4, num_pages // 4)
    assert shapes["state_pools"] == ((6,), (6,), (6,))  # pages are no tensors of the network
    assert mixed.axes["T"].max == LIMITS.max_num_tokens


def test_an_unknown_builder_flag_is_refused(trt, tmp_path):
    with pytest.raises(BuildError, match=r"builder flag: expected one of .*TF32.*, found FASTER"):
        build(
            tmp_path,
            {},
            "float32",
            plan_options=PlanOptions(flavor="tensorrt_rtx", compute_capability="SM120", flags=("FASTER",)),
        )


class FakeCacheConfig:
    """The timing-cache calls of IBuilderConfig; a cache that starts with "stale" is refused."""

    def __init__(self):
        self.cache = None

    def create_timing_cache(self, content):
        return SimpleNamespace(content=bytes(content), serialize=lambda: bytes(content) + b"+timed")

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        self.cache = None if cache.content.startswith(b"stale") else cache
        return self.cache is not None

    def get_timing_cache(self):
        return self.cache


def test_the_timing_cache_is_kept_between_builds_and_a_stale_one_is_replaced(tmp_path):
    path = tmp_path / "deep" / "timing.cache"
    for content in (b"+timed", b"+timed+timed"):
        config = FakeCacheConfig()
        load_timing_cache(config, path)
        store_timing_cache(config, path)
        assert path.read_bytes() == content
    path.write_bytes(b"stale")
    config = FakeCacheConfig()
    load_timing_cache(config, path)
    assert config.cache.content == b""


def run_cli(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_check_reports_layers_inputs_profiles_size_and_time(trt, tmp_path):
    target, _ = make_pair(tmp_path, has_drafter=False)
    result = run_cli(
        "build", "--target", target, "--check", "--json", "--max-batch-size", 4, "--max-num-tokens", 64,
        "--max-seq-len", 64, "--page-size", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert "token_ids INT32 [-1]" in report["inputs"]
    assert "emitted_tokens INT32 [-1, 1]" in report["outputs"]
    assert report["layer_counts"]["PLUGIN_V3"] == 1 + 2  # attention, the sampler and scores
    assert report["profiles"]["mixed"]["T"] == [1, 64, 64]
    assert (report["layer_ids"], report["num_model_layers"], report["ranks"]) == ({"target": [0]}, {"target": 4}, [0])
    assert min(report["num_layers"], report["build_time_s"], report["peak_memory_bytes"]) > 0
    assert list(tmp_path.iterdir()) == [target]  # nothing was written


def test_check_without_tensorrt_rtx_says_how_to_get_it(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    target, _ = make_pair(tmp_path, has_drafter=False)
    result = run_cli("build", "--target", target, "--check")
    assert result.exit_code == 1
    assert "pip install 'dflash-trt[check]'" in result.output


def test_building_for_tensorrt_without_tensorrt_names_what_is_missing(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    target, _ = make_pair(tmp_path, has_drafter=False)
    output = tmp_path / "engine"
    result = run_cli("build", "--target", target, "--backend", "tensorrt", "-o", output)
    assert result.exit_code == 1
    assert "tensorrt: expected an importable Python package" in result.output
    assert not output.exists()


def test_build_without_an_output_is_a_usage_error(tmp_path):
    result = run_cli("build", "--target", tmp_path)
    assert result.exit_code == 2
    assert "Pass -o DIR, or --check." in result.output
