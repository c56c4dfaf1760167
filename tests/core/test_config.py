"""BuildConfig: its defaults and bounds, and what excludes what."""

from typing import Any

import pytest

from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.frozen import MAX_INT32
from dflash_trt.core.mapping import Mapping

BOUNDS: dict[str, tuple[int, int]] = {
    "draft_window": (1, MAX_INT32),
    "max_batch_size": (1, MAX_INT32),
    "max_seq_len": (2, MAX_INT32),
    "max_num_tokens": (1, MAX_INT32),
    "max_draft_len": (0, MAX_INT32),
    "page_size": (1, MAX_INT32),
    "tp_size": (1, 1024),
    "ep_size": (1, 1024),
}


def test_the_defaults_are_those_of_the_documents() -> None:
    config = BuildConfig(target="t")
    assert config.model_dump() == {
        "target": "t",
        "drafter": None,
        "drafter_overrides": {},
        "draft_window": None,
        "chat_template_options": {},
        "backend": "torch",
        "dtype": "bfloat16",
        "max_batch_size": 64,
        "max_seq_len": None,
        "max_num_tokens": 2048,
        "max_draft_len": None,
        "page_size": 32,
        "tp_size": 1,
        "ep_size": 1,
        "attention_dp": False,
        "dcp_size": 1,
        "quantization": None,
        "plugin_library": None,
        "collectives": "native",
        "deterministic": False,
        "compile_for": (),
    }
    assert config.mapping == Mapping()
    assert BuildConfig(target="t", tp_size=4, ep_size=2).mapping == Mapping(world_size=4, tp_size=4, ep_size=2)
    own = BuildConfig(target="t", tp_size=4, ep_size=2, attention_dp=True).mapping
    assert own == Mapping(world_size=4, dp_size=4, ep_size=2)
    assert BuildConfig(target="t", drafter="none").drafter is None


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items())
def test_a_size_may_reach_its_bounds_and_no_further(name: str, bounds: tuple[int, int]) -> None:
    others = {"max_batch_size": 1, "max_num_tokens": MAX_INT32, "tp_size": 1024}
    for value in bounds:
        fields = others | ({"max_batch_size": 1} if name == "max_num_tokens" else {}) | {name: value}
        assert getattr(build_config_from({"target": "t", **fields}, source="f"), name) == value
    for value in (bounds[0] - 1, bounds[1] + 1):
        with pytest.raises(ConfigError, match=f"key '{name}': expected .* equal to [0-9]+, found {value}"):
            build_config_from({"target": "t", **others, name: value}, source="f")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"drafter_overrides": {"a": 1}}, "drafter_overrides need a drafter"),
        ({"chat_template_options": {"messages": 1}}, "found messages, decided by the engine"),
        ({"draft_window": 9, "backend": "tensorrt_llm"}, "draft_window needs backend torch or tensorrt"),
        ({"dtype": "float16"}, "dtype float16 needs backend tensorrt or tensorrt_llm"),
        ({"collectives": "plugin"}, "collectives plugin needs backend tensorrt"),
        ({"deterministic": True}, "deterministic needs backend tensorrt; other backends take it where"),
        ({"tp_size": 4, "ep_size": 3}, "ep_size 3 does not divide tp_size 4"),
        ({"attention_dp": True}, "attention_dp needs several ranks: set tp_size to their number"),
        (
            {"attention_dp": True, "tp_size": 2, "backend": "tensorrt_llm"},
            "attention_dp needs backend torch or tensorrt; TensorRT-LLM checkpoints divide attention",
        ),
        ({"max_num_tokens": 7, "max_batch_size": 8}, "max_num_tokens 7 is less than max_batch_size 8"),
        ({"max_batchsize": 7}, "key 'max_batchsize' is unknown. Did you mean 'max_batch_size'?"),
        ({"quantization": {"targets": "fp8"}}, "key 'quantization.targets' is unknown. Did you mean 'target'?"),
        (
            {"quantization": {"calibration": {"num_prompt": 1}}},
            "key 'quantization.calibration.num_prompt' is unknown. Did you mean 'num_prompts'?",
        ),
        ({"dtype": "fp8"}, "key 'dtype': expected 'float32', 'bfloat16' or 'float16', found 'fp8'"),
    ],
)
def test_what_cannot_be_built_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config_from({"target": "t"} | fields, source="pair.yaml")
    assert str(error.value).startswith("pair.yaml: ") and said in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"drafter": "d", "drafter_overrides": {"a": 1}},
        {"draft_window": 9, "backend": "tensorrt"},
        {"dtype": "float16", "backend": "tensorrt"},
        {"dtype": "float16", "backend": "tensorrt_llm"},
        {"collectives": "plugin", "backend": "tensorrt"},
        {"deterministic": True, "backend": "tensorrt"},
        {"max_num_tokens": 8, "max_batch_size": 8},
        {"tp_size": 4, "ep_size": 4},
        {"tp_size": 2, "attention_dp": True},
    ],
)
def test_their_neighbours_are_accepted(fields: dict[str, Any]) -> None:
    build_config_from({"target": "t"} | fields, source="pair.yaml")


def test_a_missing_key_and_wrong_ones_are_in_one_error() -> None:
    with pytest.raises(ConfigError, match="2 problems") as error:
        build_config_from({"page_size": 0}, source="pair.yaml")
    assert "key 'target' is missing." in str(error.value)
