"""No spec can be made that would compute something without a word, whoever makes it."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, check_pair, engine_states
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.state_spec import PagedKv, PagedRows
from tests.specs import layered

DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": {"theta": 1e4},
    "masks": ({}, {}),
    "has_qk_norm": True,
    "max_position_embeddings": 512,
}
TARGET = DECODER | {"family": "qwen3", "vocab_size": 272, "is_embedding_tied": False}
DRAFT = DECODER | {
    "source_format": "z-lab",
    "target_layer_ids": (0, 1),
    "target_hidden_size": 64,
    "target_vocab_size": 272,
    "draft_block_size": 4,
    "mask_token_id": 1,
}
MOE = {"num_experts": 8, "num_experts_per_token": 2, "intermediate_size": 32, "routing": "softmax_top_k"}
YARN = {"theta": 1e4, "scaling": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CONV, SELECTOR = {"kernel_size": 2, "group_size": 16}, {"rank": 8, "top_k": 16}
DFLASH2 = DRAFT | {"algorithm": "dflash2", "conv": CONV, "selector": SELECTOR}
DSPARK = DRAFT | {"algorithm": "dspark", "heads": {"rank": 8}}
EAGLE3 = DRAFT | {"algorithm": "eagle3", "chain": {}, "mask_token_id": None, "masks": ({},)}
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -2, 2**31])
def test_a_size_is_a_positive_int32(name: str, value: int) -> None:
    _assert_refused(TargetSpec, TARGET | {name: value}, name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"rms_norm_eps": value}, "rms_norm_eps") for value in (0.0, -1e-6, 1e-13, 1e30, NAN, INFINITY, -INFINITY)]
    + [({"rope": {"theta": value}}, "rope.theta") for value in (0.0, 1.0, -1e4, 1e16, NAN, INFINITY)]
    + [
        ({"rope": YARN | {name: value}}, f"rope.{name}")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        for value in (0.0, -1.0, 1e7, NAN)
    ]
    + [
        ({"rope": YARN | {"original_max_position_embeddings": None}}, "rope"),
        ({"rope": YARN | {"beta_slow": 32.5}}, "rope"),
        ({"rope": {"theta": 1e4, "scaling": "llama3", "original_max_position_embeddings": 8}}, "rope"),
        ({"masks": ()}, "layers"),
        ({"masks": ({},) * 1001}, "layers"),
        ({"masks": ({"window": -1}, {})}, "mask.window"),
        ({"masks": ({}, {"window": 0})}, "mask.window"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"eos_token_ids": (5, 272)}, "eos_token_ids"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids.0"),
        ({"bos_token_id": 272}, "bos_token_id"),
        ({"moe": MOE | {"num_experts_per_token": 9}}, "moe.num_experts_per_token"),
        ({"moe": MOE | {"activation": "clamped_swiglu"}}, "moe"),
        ({"moe": MOE | {"activation": "clamped_swiglu", "limit": -7.0, "alpha": 1.7}}, "moe.limit"),
        ({"moe": MOE | {"activation": "clamped_swiglu", "limit": 7.0}}, "moe"),
        ({"moe": MOE | {"activation": "clamped_swiglu", "limit": 7.0, "alpha": 1.7, "shared_size": 8}}, "moe"),
        ({"moe": MOE | {"num_groups": 3}}, "moe"),
        ({"moe": MOE | {"num_groups": 8, "num_chosen_groups": 8}}, "moe"),
        ({"moe": MOE | {"num_groups": 2, "num_chosen_groups": 3}}, "moe"),
        ({"moe": MOE | {"num_groups": 4, "num_experts_per_token": 3}}, "moe"),
        ({"moe": MOE | {"has_own_norms": True}}, "moe"),
        ({"moe": MOE | {"has_own_norms": True, "shared_size": 8, "has_shared_gate": True}}, "moe"),
        ({"rotary_dim": 18}, "rotary_dim"),
        ({"rotary_dim": 3}, "rotary_dim"),
    ],
)
def test_a_target_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    _assert_refused(TargetSpec, TARGET | changes, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft_block_size": 1}, "draft_block_size"),
        ({"draft_block_size": 2**31 - 1}, "draft_block_size"),
        ({"mask_token_id": 272}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (0, -1)}, "target_layer_ids.1"),
        ({"draft_vocab_size": 273}, "draft_vocab_size"),
        ({"input_embedding_scale": NAN}, "input_embedding_scale"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    _assert_refused(DraftSpec, DRAFT | changes, field)


HEADS = "heads for algorithm dspark, and for no other"
MTP = EAGLE3 | {"algorithm": "mtp", "chain": None, "mtp": {}}
PARTS, CHAIN, HEAD = "conv and selector for algorithm dflash2", "chain for algorithm eagle3", "mtp for algorithm mtp"
MASK = "a mask_token_id for algorithms that draft a block"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (DRAFT | {"conv": CONV}, PARTS),
        (DRAFT | {"selector": SELECTOR}, PARTS),
        (DFLASH2 | {"conv": None}, PARTS),
        (DFLASH2 | {"selector": None}, PARTS),
        (DFLASH2 | {"conv": CONV | {"group_size": 48}}, "a conv.group_size that divides hidden_size 64"),
        (DFLASH2 | {"selector": SELECTOR | {"top_k": 273}}, "a selector.top_k of at most the vocabulary"),
        (DFLASH2 | {"draft_vocab_size": 15}, "a selector.top_k of at most the vocabulary"),
        (DRAFT | {"heads": {"rank": 8}}, HEADS),
        (DSPARK | {"heads": None}, HEADS),
        (DSPARK | {"logit_softcap": 2.0}, "no logit_softcap for algorithm dspark"),
        (DRAFT | {"chain": {}}, CHAIN),
        (DRAFT | {"mtp": {}}, HEAD),
        (DRAFT | {"mask_token_id": None}, MASK),
        (EAGLE3 | {"mask_token_id": 1}, MASK),
        (EAGLE3 | {"chain": None}, CHAIN),
        (EAGLE3 | {"masks": ({}, {})}, "one layer for algorithm eagle3"),
        (MTP | {"mtp": None}, HEAD),
        (MTP | {"chain": {}}, CHAIN),
        (MTP | {"mask_token_id": 1}, MASK),
        (MTP | {"masks": ({}, {})}, "one layer for algorithm mtp"),
    ],
)
def test_a_drafter_has_the_parts_of_its_algorithm_and_no_others(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        _built(DraftSpec, fields)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": (0, 2)}, "target_layer_ids below the target's 2 layers"),
        ({"target_hidden_size": 32}, "target_hidden_size as the target has it, 64"),
        ({"target_vocab_size": 300}, "target_vocab_size as the target has it, 272"),
        ({"hidden_size": 32}, "hidden_size .* as the target has it, 64"),
    ],
)
def test_a_pair_that_cannot_run_together_is_refused(changes: dict[str, Any], said: str) -> None:
    check_pair(_built(TargetSpec, TARGET), _built(DraftSpec, DRAFT))
    with pytest.raises(ValueError, match=said):
        check_pair(_built(TargetSpec, TARGET), _built(DraftSpec, DRAFT | changes))


@pytest.mark.parametrize(
    ("own", "is_accepted"),
    [
        ({"has_own_embedding": True, "draft_vocab_size": 100}, True),
        ({"has_own_embedding": True}, False),
        ({"draft_vocab_size": 100}, False),
    ],
)
def test_a_drafter_of_another_width_has_embedding_and_head_of_its_own(own: dict[str, Any], is_accepted: bool) -> None:
    target, draft = _built(TargetSpec, TARGET), _built(DraftSpec, DRAFT | {"hidden_size": 32} | own)
    if is_accepted:
        check_pair(target, draft)
        return
    with pytest.raises(ValueError, match=r"hidden_size .* as the target has it, 64"):
        check_pair(target, draft)


@pytest.mark.parametrize(
    "fields", [{"world_size": 10**9, "tp_size": 10**9}, {"world_size": 0, "tp_size": 0}, {"rank": 1}, {"rank": -1}]
)
def test_a_mapping_that_cannot_be_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Mapping(**fields)


def test_what_models_have_is_accepted() -> None:
    _built(TargetSpec, TARGET | {"moe": MOE, "eos_token_ids": (271, 0), "bos_token_id": 0})
    _built(DraftSpec, DRAFT | {"draft_vocab_size": 272, "mask_token_id": 271})
    RopeSpec(**YARN | {"attention_factor": 1.3, "theta": 4.56e10})
    AttentionMask(window=1)
    Moe(**MOE | {"activation": "clamped_swiglu", "limit": 7.0, "alpha": 1.702})
    Moe(**MOE | {"num_groups": 4, "num_chosen_groups": 1})
    Moe(**MOE | {"has_own_norms": True, "shared_size": 8})
    _built(DraftSpec, DFLASH2)
    _built(DraftSpec, DSPARK)
    _built(DraftSpec, EAGLE3)
    _built(TargetSpec, TARGET | {"rotary_dim": 16})


def test_drafts_are_drawn_from_as_many_tokens_as_there_are_or_as_the_selector_chooses() -> None:
    counts = [DRAFT, DRAFT | {"draft_vocab_size": 7}, DRAFT | {"target_vocab_size": 9}, DFLASH2]
    assert [_built(DraftSpec, fields).draft_topk for fields in counts] == [32, 7, 9, 16]
    masked = DSPARK | {"heads": {"rank": 8, "drafts_from_anchor": False}}
    specs = [_built(DraftSpec, fields) for fields in (DRAFT, EAGLE3, DSPARK, masked)]
    assert [(spec.max_draft_len, spec.num_passes(2)) for spec in specs] == [(3, 1), (3, 2), (4, 1), (3, 1)]
    assert [spec.computed_slots(2) for spec in specs] == [3, 3, 2, 3]


def test_pages_keep_the_largest_window_of_the_layers_that_read_them() -> None:
    """A layer reads its own, or those of the layer that it shares; all pages of a drafter keep the same."""
    target = _built(TargetSpec, TARGET | {"masks": ({"window": 8}, {"chunk": 16}, {"window": 32, "chunk": 24}, {})})

    def windows(shared: dict[int, int]) -> list[int | None]:
        layers = [
            layer.model_copy(update={"mixer": layer.mixer.model_copy(update={"shares_kv_with": shared.get(i)})})
            for i, layer in enumerate(target.layers)
        ]
        states = target.model_copy(update={"layers": tuple(layers)}).states(dtype="float32")
        return [getattr(state, "source", state).window for state in states]

    assert windows({}) == [8, 16, 24, None]
    assert windows({2: 0}) == [24, 16, 24, None]
    assert windows({3: 1}) == [8, None, 24, None]
    draft = _built(DraftSpec, DRAFT | {"masks": ({"window": 8}, {"window": 12})})
    assert [state.window for state in draft.states(dtype="float32")] == [12, 12]
    assert [state.window for state in _built(DraftSpec, DRAFT).states(dtype="float32")] == [None, None]


def test_a_gated_delta_net_has_whole_groups_of_value_heads_on_every_rank() -> None:
    sizes = {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 4, "value_head_dim": 8, "conv_size": 4}
    with pytest.raises(ValidationError, match="num_value_heads in multiples of num_key_heads 2"):
        GatedDelta(**sizes | {"num_value_heads": 5})
    share = GatedDelta(**sizes).shard(Mapping(world_size=2, tp_size=2))
    assert (share.num_key_heads, share.num_value_heads, share.num_channels) == (1, 3, 4 + 4 + 24)
    assert share.state("s", "float32", num_records=5).num_records == 5


@pytest.mark.parametrize(("tp_size", "heads"), [(1, (8, 2)), (2, (4, 1)), (4, (2, 1)), (8, (1, 1))])
def test_ranks_share_the_heads_of_keys_and_values_or_hold_one_that_others_hold_too(
    tp_size: int, heads: tuple[int, int]
) -> None:
    [gqa, *_] = _built(TargetSpec, TARGET | {"num_heads": 8}).attentions
    share = gqa.shard(Mapping(world_size=tp_size, tp_size=tp_size))
    assert (share.num_heads, share.num_kv_heads) == heads
    assert share.state("s", "float32", None).num_kv_heads == heads[1]


def test_records_of_recurrent_states_are_those_of_a_step_with_all_drafts() -> None:
    delta = GatedDelta(num_key_heads=1, num_value_heads=1, key_head_dim=4, value_head_dim=4, conv_size=4)
    target, draft = _built(TargetSpec, TARGET), _built(DraftSpec, DRAFT)
    layers = (target.layers[0].model_copy(update={"mixer": delta}), target.layers[1])
    target = target.model_copy(update={"layers": layers})
    assert [engine_states(target, x, dtype="float32").target[0].num_records for x in (None, draft)] == [1, 4]


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**layered(**fields, moe_layer_ids=range(2) if "moe" in fields else ()))


def _assert_refused(kind: type[TargetSpec | DraftSpec], fields: dict[str, Any], field: str) -> None:
    """What is wrong with every layer is said of every one."""
    with pytest.raises(ValidationError) as caught:
        _built(kind, fields)
    names = [[str(part) for part in error["loc"]] for error in caught.value.errors()]
    found = {".".join(parts[3:] if parts[0] == "layers" and len(parts) > 1 else parts) for parts in names}
    found = {name.removeprefix("gqa").removeprefix(".") for name in found}
    assert found == {"dense.intermediate_size" if field == "intermediate_size" else field}


def test_pages_are_fp8_where_their_own_model_has_scales() -> None:
    target, draft = _built(TargetSpec, TARGET), _built(DraftSpec, DRAFT)
    scales = tuple(LayerKvScales(k=0.5 + i, v=0.25 + i) for i in range(2))
    for quantization, dtypes in (
        (None, ("float32", "float32")),
        (QuantizationSpec(target_kv=scales), ("float8_e4m3fn", "float32")),
        (QuantizationSpec(draft_kv=scales), ("float32", "float8_e4m3fn")),
    ):
        states = engine_states(target, draft, dtype="float32", quantization=quantization)
        for model, dtype in zip((states.target, states.draft), dtypes, strict=True):
            expected = scales if dtype != "float32" else (None, None)
            assert [(state.dtype, state.scales) for state in model] == [(dtype, scale) for scale in expected]
    assert engine_states(target, None, dtype="float32").draft == ()


def test_a_chain_keeps_features_of_its_own_width_behind_the_pages_of_its_layer() -> None:
    own = {"has_own_embedding": True, "draft_vocab_size": 100, "hidden_size": 32}
    pages, features = _built(DraftSpec, EAGLE3 | own).states(dtype="bfloat16")
    assert isinstance(pages, PagedKv)
    assert features == PagedRows(name="draft_features", width=32, dtype="bfloat16")
