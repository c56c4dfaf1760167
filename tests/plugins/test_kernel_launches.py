"""The C++ launchers against PyTorch, with every launch's PTX executed; see executed_library.py."""

import json
import re
from typing import Any

import pytest

from tests.plugins.building import BuiltLibrary, run_python
from tests.plugins.delta_cases import CASES as DELTA_CASES
from tests.plugins.expert_cases import CASES as EXPERT_CASES
from tests.plugins.latent_cases import CASES as LATENT_CASES
from tests.plugins.node_inputs import ANCHORED, CHUNK, NODES, PAIRS, READ_RULES, SCORE_FIELDS

# float32 sums in another order: 3.6e-7 measured on the x86-64 CPU that the tests were written on.
TOLERANCE = 5e-6
SPOILT = 0.1
DELTA_TOLERANCE = 5e-5  # of numbers up to 10


@pytest.fixture(scope="module")
def results(built: BuiltLibrary) -> dict[str, Any]:
    done = run_python("tests.plugins.executed_library", built.kernels, built.fake_driver, built.manifest)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["errors"] == []
    return found


@pytest.mark.parametrize(("node", "case"), PAIRS)
def test_a_node_gives_what_pytorch_gives(results: dict[str, Any], node: str, case: str) -> None:
    assert results["differences"][f"{node}, {case}"] <= TOLERANCE


@pytest.mark.parametrize("node", NODES)
def test_a_changed_input_is_noticed(results: dict[str, Any], node: str) -> None:
    assert results["spoilt"][node] > SPOILT


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
@pytest.mark.parametrize("node", ["AttendPages", "AttendDraft"])
def test_another_scale_of_fp8_pages_is_noticed(results: dict[str, Any], node: str, scale: str) -> None:
    assert results["spoilt"][f"{node}, {scale}"] > SPOILT


@pytest.mark.parametrize(("node", "field"), SCORE_FIELDS)
def test_another_score_is_noticed(results: dict[str, Any], node: str, field: str) -> None:
    assert results["spoilt"][f"{node}, {field}"] > SPOILT


@pytest.mark.parametrize("name", READ_RULES)
def test_each_tensor_of_rules_and_masks_is_read(results: dict[str, Any], name: str) -> None:
    assert results["spoilt"][name] > SPOILT


def test_a_soft_cap_takes_the_kernels_made_for_it(results: dict[str, Any]) -> None:
    for node in ("AttendPages", "AttendDraft"):
        for case, is_capped in (("soft cap", True), ("score scale", False)):
            launched = results["launches"][f"{node}, {case}"]
            assert any("softcap" in name for name in launched) == is_capped


def test_chunks_take_the_kernels_made_for_them(results: dict[str, Any]) -> None:
    launched = results["launches"]["AttendPages, chunks"][1:]
    assert all(f"_chunk{CHUNK}_step_" in name for name in launched)
    assert not any("chunk" in name for name in results["launches"]["AttendPages, verify"])


def test_a_chain_takes_the_kernels_made_for_it(results: dict[str, Any]) -> None:
    for case, is_chain in (("chain", True), ("verify", False)):
        launched = results["launches"][f"AttendDraft, {case}"]
        assert any("chain" in name for name in launched) == is_chain


@pytest.mark.parametrize("case", ANCHORED)
def test_a_window_counted_from_each_slot_is_noticed(results: dict[str, Any], case: str) -> None:
    assert results["spoilt"][case] > SPOILT


@pytest.mark.parametrize(
    ("node", "case", "kernels"),
    [
        ("AttendPages", "verify", ["rotate_and_store", "attention", "attention_reduction"]),
        ("AttendPages", "long prefill", ["rotate_and_store", *["attention", "attention_reduction"] * 2]),
        ("AttendDraft", "verify", ["rotate_and_store", "attention", "attention_reduction"]),
        ("AttendDraft", "K and V of another layer", ["attention", "attention_reduction"]),
        ("WriteDraftContext", "verify", ["rotate_and_store"]),
        ("PreviousRows", "verify", ["previous_rows"]),
        (
            "SampleAndAccept",
            "verify",
            [
                *("tile_statistics", "row_bounds", "collect", "row_threshold", "kept_mass", "test_drafts"),
                *("tile_draw", "draw", "accept"),
            ],
        ),
        (
            "SampleAndAccept",
            "rules and masks",
            [
                *("count_tokens", "adjust"),
                *("tile_statistics", "row_bounds", "collect", "row_threshold", "kept_mass", "test_drafts"),
                *("tile_draw", "draw", "accept"),
                "raw_logprobs",
            ],
        ),
        ("ScoreRows", "verify", ["tile_top", "row_top"]),
        ("ScoreRows", "one token", []),
        ("DraftTokens", "verify", ["tile_argmax", "combine_argmax"]),
    ],
)
def test_an_operation_is_these_launches(results: dict[str, Any], node: str, case: str, kernels: list[str]) -> None:
    launched = results["launches"][f"{node}, {case}"]
    assert len(launched) == len(kernels)
    assert all(f"{variant}_".startswith(f"{kernel}_") for variant, kernel in zip(launched, kernels, strict=True))


# Sums of float32 in another order; where activations are rounded, one at the border of two codes may go either way.
EXPERTS_TOLERANCE = {True: 0.02, False: 1e-5}


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_experts_give_what_pytorch_gives(results: dict[str, Any], case: str) -> None:
    found = results["experts"][case]
    has_codes = bool(EXPERT_CASES[case].input_scales) or EXPERT_CASES[case].form == "int8"
    assert found["difference"] <= EXPERTS_TOLERANCE[has_codes]
    assert found["corrupted"] > SPOILT


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_experts_are_five_launches_and_in_int8_seven(results: dict[str, Any], case: str) -> None:
    known = EXPERT_CASES[case]
    rows, hidden = [["entry_codes" if known.scales_inputs else "token_codes"], ["token_codes"]]
    if known.form != "int8":
        rows = hidden = []
    kernels = ["reset_ticket", "routing", *rows, "expert_gate_up", *hidden, "expert_down", "expert_sum"]
    launched = results["experts"][case]["launches"]
    assert all(variant.startswith(kernel) for variant, kernel in zip(launched, kernels, strict=True))


@pytest.mark.parametrize("node", ["GatedDelta", "GatedDeltaInOrder"])
@pytest.mark.parametrize("case", DELTA_CASES)
def test_a_delta_net_gives_what_pytorch_gives_and_leaves_its_state(
    results: dict[str, Any], case: str, node: str
) -> None:
    found = results[node][case]
    assert max(found["difference"], found["state"]) <= DELTA_TOLERANCE
    assert found["corrupted"] > SPOILT


@pytest.mark.parametrize("case", DELTA_CASES)
def test_a_delta_net_looks_for_prompts_where_there_may_be_one(results: dict[str, Any], case: str) -> None:
    prompts = [] if case == "a block alone" else ["delta_prompt"]
    kernels = ["convolve", "delta_verify", *prompts, "finish"]
    launched = results["GatedDelta"][case]["launches"]
    assert len(launched) == len(kernels)
    assert all(variant.startswith(f"{kernel}_") for variant, kernel in zip(launched, kernels, strict=True))
    in_order = results["GatedDeltaInOrder"][case]["launches"]
    assert [name.partition("_float32")[0] for name in in_order] == ["convolve", "delta_in_order", "finish_in_order"]


FIXED_LAUNCHES = {
    "Linear, unquantized": ["linear"],
    "Linear, fp8": ["quantize_rows", "linear"],
    "Linear, nvfp4_w4a16": ["linear"],
    "Linear, int4": ["linear"],
    "Int8Linear": ["token_codes", "int8_linear"],
    "RmsNorm": ["rms_norm"],
    "HeadProduct": ["head_product"],
    "AttendInSplits": ["rotate_and_store", "attention_plan", "attention", "attention_reduction"],
    "AttendLatentsInSplits": ["write_latents", "attention_plan", "latent_attention", "latent_reduction"],
}


@pytest.mark.parametrize("case", FIXED_LAUNCHES)
def test_nodes_of_deterministic_engines_give_the_same_bits_in_every_step(results: dict[str, Any], case: str) -> None:
    found = results["fixed"][case]
    tolerance = EXPERTS_TOLERANCE[case == "Linear, fp8"]  # where activations are rounded
    assert found["difference"] <= tolerance and found["has_same_bits"]
    kernels = FIXED_LAUNCHES[case]
    assert len(found["launches"]) == len(kernels)
    assert all(name.startswith(f"{kernel}_") for name, kernel in zip(found["launches"], kernels, strict=True))


def test_a_layer_of_integers_has_the_bits_of_its_definition_in_the_tile_for_its_rows(results: dict[str, Any]) -> None:
    found = results["fixed"]["Int8Linear"]
    assert found["difference"] == 0.0
    assert found["launches"][1].endswith("_t128") and found["alone"][1].endswith("_t16")


def test_more_rows_take_larger_tiles_of_experts(results: dict[str, Any]) -> None:
    for case, tile in (
        ("half of the experts", "t16"),
        ("tiles of 32", "t32"),
        ("tiles of 64", "t64"),
        ("INT8, tiles of 64, half of the experts", "t64"),
        ("fixed tiles", "t16"),
    ):
        products = [
            name for name in results["experts"][case]["launches"] if re.match("routing|expert_(gate|down)", name)
        ]
        assert len(products) == 3 and all(name.endswith(tile) for name in products)


def test_prefill_chunks_get_larger_tiles_than_verify_blocks(results: dict[str, Any]) -> None:
    small, _, large, _ = results["launches"]["AttendPages, long prefill"][1:]
    assert "_t16_" in small and "_t64_" in large


def test_a_draft_vocabulary_takes_the_kernels_made_for_it(results: dict[str, Any]) -> None:
    for case, has_map in (("verify", False), ("window", True)):
        assert [name.endswith("_map") for name in results["launches"][f"DraftTokens, {case}"]] == [has_map] * 2


def test_a_vocabulary_of_a_multiple_of_16_takes_the_kernels_made_for_it(results: dict[str, Any]) -> None:
    assert "tile_statistics_float32" in results["launches"]["SampleAndAccept, verify"]
    assert "tile_statistics_float32_v16" in results["launches"]["SampleAndAccept, one token"]


@pytest.mark.parametrize("case", LATENT_CASES)
def test_a_node_over_latents_gives_what_pytorch_gives(results: dict[str, Any], case: str) -> None:
    """Results and pages; rows of no request stay as they were, and so do pages without an address."""
    found = results["latents"][case]
    assert found["difference"] <= TOLERANCE and found["pages"] <= TOLERANCE < SPOILT < found["corrupted"]
    assert found["is_unchanged"]


@pytest.mark.parametrize("case", LATENT_CASES)
def test_prompts_that_begin_are_looked_for_where_there_may_be_one(results: dict[str, Any], case: str) -> None:
    """They alone are attended with the factors of K and V."""
    found, direct = results["latents"][case], LATENT_CASES[case].direct_requests
    assert [r for r, difference in enumerate(found["of_other_factor"]) if difference > SPOILT] == direct
    assert all(difference == 0.0 for r, difference in enumerate(found["of_other_factor"]) if r not in direct)
    kernels = ["write_latents", "attention_plan", "latent_attention", "latent_reduction"]
    if direct:
        kernels += ["attention_plan", "latent_kv", "latent_chunk"]
    assert [re.match("[a-z_]+?(?=_(float32|step))", name)[0] for name in found["launches"]] == kernels  # type: ignore[index]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("head_dim", r"expected .*HEAD_DIM = 48.*, found only rotate_and_store_float32_"),
        ("score_scale", "score_scale: expected more than 0, found -1"),
        ("softcap", "softcap: expected 0 or more, found -1"),
        ("no groups", "field num_groups: expected 1 to 4096, found 0"),
        ("uneven groups", "groups of experts: expected some of equal groups, with 3 experts, found 2 of 3"),
        ("groups", "groups of experts: expected some of equal groups, with 3 experts, found 1 of 4"),
        ("odd head_dim", "head_dim: expected a multiple of 16, found 24"),
        ("dtype", r"expected k \*bf16"),
        ("page_size", "page_size: expected a power of two, found 6"),
        ("heads", "q: expected a multiple of 2 heads, found 3"),
        ("requests", "REQUESTS >= 17"),
        ("address", "argument q: expected a multiple of 16"),
        ("architecture", "GPU of compute capability 7.5: expected one of sm_90a, found no kernels for it"),
        ("cuCtxGetDevice", "cuCtxGetDevice: expected success, found CUDA_ERROR_UNKNOWN"),
        ("cuLaunchKernel", "cuLaunchKernel of rotate_and_store"),
        ("then", "^accepted$"),
    ],
)
def test_what_cannot_be_done_is_said(results: dict[str, Any], what: str, message: str) -> None:
    assert re.search(message, results["refusals"][what]), results["refusals"][what]
