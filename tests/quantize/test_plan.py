"""Which linear gets which format, and what cannot be asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.config import build_config_from
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales, QuantizationConfig, QuantizationSpec
from dflash_trt.formats.registry import weight_formats
from dflash_trt.quantize.hardware import require_hardware
from dflash_trt.quantize.plan import QuantizationPlan, make_plan, sharding_problems
from dflash_trt.quantize.stream import joined, whole_weights
from tests.factories import make_speculators_drafter, make_target


@pytest.fixture(scope="module")
def specs(pair: tuple[Path, Path]) -> Any:
    return open_pair(*pair)


def plan_of(specs: Any, *, stored: QuantizationSpec | None = None, **choices: Any) -> QuantizationPlan:
    return make_plan(QuantizationConfig(**choices), specs.target, specs.draft, stored or QuantizationSpec())


def refusal(specs: Any, *, stored: QuantizationSpec | None = None, **choices: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_of(specs, stored=stored, **choices)
    return str(raised.value)


def test_without_choices_nothing_changes(specs: Any) -> None:
    plan = plan_of(specs)
    assert plan.formats == {} and plan.spec().is_empty and not plan.needs_calibration


def test_a_format_is_for_target_and_drafter_but_not_for_the_head(specs: Any) -> None:
    formats = plan_of(specs, target="fp8").formats
    assert set(formats.values()) == {"fp8"}
    assert {"target.layers.0.qkv", "draft.fc", "draft.kv", "draft.layers.1.down"} <= set(formats)
    assert "target.lm_head" not in formats


def test_the_drafter_can_have_another_format(specs: Any) -> None:
    formats = plan_of(specs, target="fp8", drafter="nvfp4").formats
    for name, weight_format in formats.items():
        assert weight_format == ("nvfp4" if name.startswith("draft.") else "fp8"), name
    assert {name.rpartition(".")[0] for name in formats} >= {"target.layers.0", "draft", "draft.layers.0"}


def test_the_last_override_that_matches_wins(specs: Any) -> None:
    overrides = {"target.layers.*": "nvfp4", "target.layers.0.*": "none", "*.qkv": "fp8"}
    formats = plan_of(specs, target="fp8", drafter="none", overrides=overrides).formats
    assert formats["target.layers.0.qkv"] == "fp8"
    assert "target.layers.0.down" not in formats
    assert formats["target.layers.1.down"] == "nvfp4"


def test_an_override_that_matches_nothing_is_refused_with_the_nearest_name(specs: Any) -> None:
    message = refusal(specs, target="fp8", overrides={"target.layers.0.qvk": "none"})
    assert "override 'target.layers.0.qvk': expected a pattern that matches a linear layer" in message
    assert "Did you mean 'target.layers.0.qkv'?" in message


def test_a_drafter_can_have_a_quantized_copy_of_the_head(specs: Any) -> None:
    plan = plan_of(specs, target="fp8", draft_lm_head="nvfp4")
    assert plan.formats["draft.lm_head"] == "nvfp4"
    size = next(size for size in plan.sizes("float32") if size.component == "draft_lm_head")
    assert size.plain_bytes == 0
    assert size.planned_bytes == 272 * 64 // 2 + 272 * 64 // 16 + 4 + 4


def test_a_pattern_never_makes_a_copy_of_the_head(specs: Any) -> None:
    assert "draft.lm_head" not in plan_of(specs, overrides={"draft.*": "fp8"}).formats
    assert plan_of(specs, overrides={"draft.lm_head": "fp8"}).formats == {"draft.lm_head": "fp8"}
    assert plan_of(specs, overrides={"draft.lm_head": "none"}, draft_lm_head="fp8").formats == {}


def test_a_tied_head_is_quantized_beside_the_embedding(tmp_path: Path) -> None:
    tied = open_pair(make_target(tmp_path / "tied", tie_word_embeddings=True), None)
    plan = make_plan(QuantizationConfig(lm_head="fp8"), tied.target, None, QuantizationSpec())
    assert plan.formats == {"target.lm_head": "fp8"}
    assert list(plan.table())[-1] == "target.lm_head"


def test_ranks_read_whole_what_is_quantized_and_the_head_that_is_copied(specs: Any, tmp_path: Path) -> None:
    tied = open_pair(make_target(tmp_path / "tied", tie_word_embeddings=True), None)
    assert whole_weights(plan_of(specs)) == frozenset()
    assert whole_weights(plan_of(specs, draft_lm_head="int4")) == {"draft.lm_head", "target.lm_head"}
    made = make_plan(QuantizationConfig(lm_head="int4"), tied.target, None, QuantizationSpec())
    assert whole_weights(made) == {"target.lm_head", "target.embedding"}
    stored = QuantizationSpec(linears={"target.layers.0.o": "fp8"})
    assert whole_weights(plan_of(specs, stored=stored, overrides={"draft.fc": "int4"})) == {"draft.fc"}


def test_parts_of_a_layer_that_came_apart_are_joined_in_their_order() -> None:
    parts = [torch.full((rows, 4), float(rows)) for rows in (2, 3, 1)]
    tensors = [("a", parts[0]), *((f"b/{i}", part) for i, part in enumerate(parts)), ("c", parts[2])]
    found = dict(joined(tensors, dtype=torch.bfloat16))
    assert list(found) == ["a", "b", "c"] and found["a"] is parts[0] and found["c"] is parts[2]
    assert torch.equal(found["b"], torch.cat(parts).bfloat16()) and found["b"].dtype == torch.bfloat16


def test_a_head_of_the_drafters_own_stays_unless_it_is_chosen(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    pair = open_pair(target, make_speculators_drafter(tmp_path / "drafter", target_dir=target))
    assert (
        "draft.lm_head"
        not in make_plan(QuantizationConfig(target="fp8"), pair.target, pair.draft, pair.quantization).formats
    )
    config = QuantizationConfig(draft_lm_head="fp8")
    assert make_plan(config, pair.target, pair.draft, pair.quantization).formats == {"draft.lm_head": "fp8"}


def test_nvfp4_needs_whole_blocks(tmp_path: Path) -> None:
    target = open_pair(make_target(tmp_path / "target", intermediate_size=72), None)
    with pytest.raises(ConfigError) as raised:
        make_plan(QuantizationConfig(target="nvfp4"), target.target, None, QuantizationSpec())
    message = str(raised.value)
    assert "target.layers.0.down: expected input features in blocks of 16 for nvfp4, found 72" in message
    assert "4 problems" in message


def test_int8_takes_as_many_input_features_as_its_sums_hold(tmp_path: Path) -> None:
    def plan(size: int, **choices: Any) -> QuantizationPlan:
        target = make_target(tmp_path / str(size), hidden_size=16, intermediate_size=size, num_hidden_layers=1)
        return plan_of(open_pair(target, None), **choices)

    assert not plan(65536, target="int8").needs_calibration
    with pytest.raises(ConfigError, match=r"0\.down: expected at most 65536 input features for int8, found 65537"):
        plan(65537, target="int8")
    assert "target.layers.0.down" not in plan(65537, target="int8", overrides={"*.down": "none"}).formats


def test_a_checkpoint_that_is_quantized_keeps_its_format(specs: Any) -> None:
    stored = QuantizationSpec(linears={"target.layers.0.qkv": "fp8"})
    plan = plan_of(specs, stored=stored, drafter="fp8")
    planned = {linear.name: linear for linear in plan.linears}
    assert planned["target.layers.0.qkv"].is_stored
    assert not planned["target.layers.0.qkv"].needs_activations
    assert planned["draft.fc"].needs_activations
    message = refusal(specs, stored=stored, target="nvfp4")
    assert "target.layers.0.qkv: expected fp8, as the checkpoint holds it, found nvfp4" in message


def test_stored_scales_of_pages_are_kept_and_need_no_calibration(specs: Any) -> None:
    scales = tuple(LayerKvScales(k=0.5 + i, v=2.0 + i) for i in range(specs.target.num_layers))
    plan = plan_of(specs, stored=QuantizationSpec(target_kv=scales))
    assert plan.has_fp8_target_kv and not plan.needs_calibration
    calibrated = (LayerKvScales(k=9.0, v=9.0),) * specs.target.num_layers
    assert plan.spec(calibrated).target_kv == scales
    assert plan_of(specs, kv_cache="fp8").needs_calibration


def test_weight_only_formats_need_no_calibration(specs: Any) -> None:
    assert not plan_of(specs, target="nvfp4_w4a16").needs_calibration
    assert plan_of(specs, target="nvfp4").needs_calibration
    assert plan_of(specs, kv_cache="fp8").needs_calibration


def test_draft_pages_follow_the_target_unless_told(specs: Any) -> None:
    both, one = plan_of(specs, kv_cache="fp8"), plan_of(specs, kv_cache="fp8", draft_kv_cache="none")
    assert (both.has_fp8_target_kv, both.has_fp8_draft_kv) == (True, True)
    assert (one.has_fp8_target_kv, one.has_fp8_draft_kv) == (True, False)
    alone = make_plan(QuantizationConfig(kv_cache="fp8"), specs.target, None, QuantizationSpec())
    assert (alone.has_fp8_target_kv, alone.has_fp8_draft_kv, alone.spec().draft_kv) == (True, False, None)


def test_draft_pages_have_the_scales_that_were_calibrated_and_need_a_calibration(specs: Any) -> None:
    stored = QuantizationSpec(target_kv=(LayerKvScales(k=3.0, v=3.0),) * specs.target.num_layers)
    plan = plan_of(specs, stored=stored, draft_kv_cache="fp8")
    assert plan.needs_calibration
    scales = tuple(LayerKvScales(k=0.5 + i, v=2.0 + i) for i in range(specs.draft.num_layers))
    assert plan.spec(draft_kv=scales).draft_kv == scales
    assert plan.spec().draft_kv == (LayerKvScales(),) * specs.draft.num_layers


@pytest.mark.parametrize("choice", ["drafter", "draft_kv_cache", "draft_lm_head"])
def test_drafter_choices_without_a_drafter_are_refused(specs: Any, choice: Any) -> None:
    def plan(value: str) -> QuantizationPlan:
        return make_plan(QuantizationConfig(**{choice: value}), specs.target, None, QuantizationSpec())

    with pytest.raises(ConfigError, match="no drafter choices"):
        plan("fp8")
    assert plan("none").formats == {}


def test_a_copy_of_a_head_that_is_quantized_already_is_refused(specs: Any, tmp_path: Path) -> None:
    stored = QuantizationSpec(linears={"target.lm_head": "fp8"})
    message = refusal(specs, stored=stored, draft_lm_head="nvfp4")
    assert "draft_lm_head: expected none, found nvfp4, but the target's head is fp8 already" in message
    assert plan_of(specs, stored=stored).formats == {"target.lm_head": "fp8"}
    drafter = make_speculators_drafter(tmp_path / "drafter", target_dir=make_target(tmp_path / "target"))
    both = open_pair(tmp_path / "target", drafter)
    heads = {"target.lm_head": "fp8", "draft.lm_head": "fp8"}
    config = QuantizationConfig(draft_lm_head="fp8")
    assert make_plan(config, both.target, both.draft, QuantizationSpec(linears=heads)).formats == heads


def test_experts_that_are_stored_keep_their_format_beside_another_one_for_the_rest(tmp_path: Path) -> None:
    moe = open_pair(make_target(tmp_path / "moe", family="qwen3_5_moe_text"), None)

    def formats(stored: dict[str, str], **choices: Any) -> dict[str, str]:
        return make_plan(QuantizationConfig(**choices), moe.target, None, QuantizationSpec(linears=stored)).formats

    names = [name for name in formats({}, target="fp8") if ".experts." in name]
    stored = dict.fromkeys(names, "nvfp4")
    assert len(names) == 2 * moe.target.num_layers
    mixed = formats(stored, target="fp8")
    assert {mixed[name] for name in names} == {"nvfp4"} and mixed["target.layers.2.o"] == "fp8"
    with pytest.raises(ConfigError, match="expected nvfp4, as the checkpoint holds it, found fp8"):
        formats(stored, experts="fp8")
    assert set(formats({}, experts="fp8")) == set(names)
    kinds = (".router", ".ba", ".shared_gate")  # few rows, on which much depends
    assert not any(name.endswith(kinds) for name in formats({}, target="fp8"))
    named = formats({}, overrides={f"*{kind}": "fp8" for kind in kinds})
    assert {f".{name.rpartition('.')[2]}" for name in named} == set(kinds)


def test_ranks_split_no_block(specs: Any, tmp_path: Path) -> None:
    """The drafter's 80 intermediate features are 5 blocks of 16."""

    def refused(tp_size: int, *, of: Any = specs, **choices: Any) -> list[str]:
        plan = make_plan(QuantizationConfig(drafter="none", **choices), of.target, of.draft, QuantizationSpec())
        return sharding_problems(plan, Mapping(world_size=tp_size, tp_size=tp_size))

    down = {"overrides": {"draft.layers.*.down": "nvfp4"}}
    assert [len(refused(tp_size, **down)) for tp_size in (1, 2)] == [0, 2]
    assert refused(2, **down)[0] == (
        "draft.layers.0.down: expected input features per rank in blocks of 16 for nvfp4, found 40 with tp_size 2. "
        "Choose a smaller tp_size, or add the override 'draft.layers.0.down: fp8'."
    )
    assert refused(2, target="nvfp4") == refused(2, target="fp8") == refused(1, target="fp8_block") == []
    qkv, o, gate_up, _ = refused(2, overrides={"target.layers.0.*": "fp8_block"})
    assert ("output features" in qkv, "input features" in o, "output features" in gate_up) == (True, True, True)
    assert ["found 32" in qkv, "found 32" in o, "found 48" in gate_up] == [True] * 3
    wide = make_target(tmp_path / "wide", num_attention_heads=16, num_key_value_heads=1)
    assert refused(2, of=open_pair(wide, None), overrides={"*.qkv": "fp8_block"}) == [], "every rank has all of K and V"
    moe = open_pair(make_target(tmp_path / "moe", family="qwen3_moe"), None)
    first = refused(2, of=moe, experts="int4")[0]
    assert first.startswith("target.layers.0.experts.down: ") and ", or set ep_size to 2, or add the override" in first


def test_segments_share_a_scale_in_experts_and_where_the_format_says_so(tmp_path: Path) -> None:
    moe = open_pair(make_target(tmp_path / "moe", family="qwen3_moe"), None)
    for weight_format in ("fp8", "nvfp4"):
        plan = make_plan(QuantizationConfig(target=weight_format), moe.target, None, QuantizationSpec())
        shares = {linear.name: linear.shares_weight_scale for linear in plan.linears if linear.format}
        assert shares["target.layers.0.experts.gate_up"]
        assert shares["target.layers.0.qkv"] == (weight_format == "nvfp4")


def test_sizes_are_those_of_the_formats(specs: Any) -> None:
    sizes = {size.component: size for size in plan_of(specs, target="fp8").sizes("float32")}
    target = sizes["target"]
    num_scales = 4 * (3 + 1 + 2 + 1) * 2  # of weights and inputs, per layer qkv, o, gate_up, down
    assert target.planned_bytes == target.plain_bytes // 4 + 4 * num_scales
    assert sizes["lm_head"].planned_bytes == sizes["lm_head"].plain_bytes


@pytest.mark.parametrize(
    ("weight_format", "capability", "instead"),
    [("nvfp4", (9, 0), "Use `fp8`"), ("nvfp4", (8, 0), "`nvfp4_w4a16`"), ("fp8", (8, 0), "Use `none`")],
)
def test_a_gpu_without_the_units_is_refused_with_what_to_use_instead(
    weight_format: Any, capability: tuple[int, int], instead: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        require_hardware({"target.layers.0.qkv": weight_format}, capability)
    assert f"found {capability[0]}.{capability[1]}" in str(raised.value)
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    ("weight_format", "capability"), [("nvfp4", (10, 0)), ("fp8", (9, 0)), ("nvfp4_w4a16", (8, 0))]
)
def test_a_gpu_with_the_units_is_accepted(weight_format: Any, capability: tuple[int, int]) -> None:
    require_hardware({"target.layers.0.qkv": weight_format}, capability)


def test_one_word_in_the_yaml_is_the_format_of_the_target() -> None:
    config = build_config_from({"target": "t", "quantization": "fp8"}, source="test")
    assert config.quantization == QuantizationConfig(target="fp8")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"targt": "fp8"}, "key 'quantization.targt' is unknown. Did you mean 'target'?"),
        ({"calibration": {"num_prompt": 3}}, "Did you mean 'num_prompts'?"),
        ({"calibration": {"num_prompts": 0}}, "key 'quantization.calibration.num_prompts'"),
    ],
)
def test_a_wrong_key_or_value_is_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config_from({"target": "t", "quantization": section}, source="test")
    assert words in str(raised.value)


def test_an_unknown_format_is_named_with_the_known_ones(specs: Any) -> None:
    for part in ("experts", "drafter", "draft_lm_head"):
        assert f"format of {part}: expected none, " in refusal(specs, **{part: "fp4"})
    words = refusal(specs, target="fp4", lm_head="nvfp", overrides={"draft.fc": "fp9"})
    assert f"format of target: expected none, {', '.join(weight_formats())}, found fp4" in words
    assert "format of lm_head" in words and "Did you mean 'nvfp4'?" in words
    assert "override 'draft.fc'" in words
