"""Whatever stands in a foreign JSON file, the answer is a spec or a DFlashError."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError, ConfigError
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter, read_json, write_json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0, 1, -1, 2, 4]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def refusal_of(target: Path, drafter: Path | None) -> str | None:
    """The error's message; None when the pair is proven."""
    try:
        open_pair(target, drafter)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with a pristine config beside each, so that every example starts from the same file."""
    root = tmp_path_factory.mktemp("workshop")
    target = make_target(root / "target")
    make_zlab_drafter(root / "zlab", target_dir=target, layer_types=["sliding_attention"] * 2, sliding_window=8)
    make_speculators_drafter(root / "speculators", target_dir=target)
    for name in ("target", "zlab", "speculators"):
        shutil.copyfile(root / name / "config.json", root / f"{name}.json")
    return root


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, float, float, Any]:
    """Which config, which of its keys and of the keys inside it (as fractions), and the new value."""
    fractions = st.floats(0, 1, exclude_max=True)
    name = draw(st.sampled_from(["target", "zlab", "speculators"]))
    return name, draw(fractions), draw(fractions), draw(JSON_VALUES)


@settings(max_examples=400, deadline=None)
@given(edits())
@example(("zlab", 0.99, 0.9, {"\ud800\n": 1}))
@example(("speculators", 0.75, 0.5, 1))  # proposal_methods
def test_any_value_under_any_key_is_read_or_refused(workshop: Path, edit: tuple[str, float, float, Any]) -> None:
    name, outer_at, inner_at, value = edit
    path = workshop / name / "config.json"
    shutil.copyfile(workshop / f"{name}.json", path)
    fields = read_json(path)
    outer = list(fields)[int(outer_at * len(fields))]
    if isinstance(value, dict) and outer_at > 0.9:
        fields, outer = fields | value, "initializer_range"  # new keys at the top level
    elif isinstance(fields[outer], dict) and inner_at < 0.8:
        inner = list(fields[outer])[int(inner_at / 0.8 * len(fields[outer]))]
        value = fields[outer] | {inner: value}
    write_json(path, fields | {outer: value})
    message = refusal_of(workshop / "target", None if name == "target" else workshop / name)
    shutil.copyfile(workshop / f"{name}.json", path)
    if message is not None:
        assert "expected" in message
        assert ", found " in message
        assert message.replace("\n", " ").isprintable()


@settings(max_examples=100, deadline=None)
@given(value=JSON_VALUES, key=st.sampled_from(["model", "added_tokens", "vocab"]))
def test_any_tokenizer_file_is_compared_or_refused(workshop: Path, value: Any, key: str) -> None:
    fields = read_json(workshop / "target" / "tokenizer.json")
    if key == "vocab":
        fields["model"]["vocab"] = value
    else:
        fields[key] = value
    path = workshop / "zlab" / "tokenizer.json"
    write_json(path, fields)
    message = refusal_of(workshop / "target", workshop / "zlab")
    path.unlink()
    assert message is None or "tokenizer" in message


MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.47"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
        "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}},
    },
}


@settings(max_examples=300, deadline=None)
@given(value=JSON_VALUES, key=st.sampled_from([*MODELOPT["quantization"], "quantization", "group_size", "layer"]))
@example(value=[[]], key="quantized_layers")
@example(value={"quant_algo": []}, key="layer")
@example(value=[], key="quant_algo")
def test_any_quantization_config_is_read_or_refused(workshop: Path, value: Any, key: str) -> None:
    fields = json.loads(json.dumps(MODELOPT))
    section = fields["quantization"]
    if key == "quantization":
        fields[key] = value
    elif key in section:
        section[key] = value
    elif key == "layer":
        section["quantized_layers"]["model.layers.0.mlp.down_proj"] = value
    else:
        section["quantized_layers"]["model.layers.0.mlp.down_proj"][key] = value
    path = workshop / "target" / "hf_quant_config.json"
    write_json(path, fields)
    message = refusal_of(workshop / "target", None)
    path.unlink()
    assert message is None or "expected" in message


NOTHING: list[Any] = [True, "1", {}, float("inf"), float("nan"), 1e999]


@pytest.mark.parametrize(
    ("read", "taken", "refused"),
    [
        ("optional_number", [1, 0.5, 5e-324, sys.float_info.max], [0, 0.0, -1, [1], *NOTHING]),
        ("optional_numbers", [[], [1, 0.5]], [1, [0], [-0.5], *([each] for each in NOTHING)]),
        ("optional_integer", [1, 2**31 - 1], [0, -1, 2**31, 1.0, [1], *NOTHING]),
        ("optional_integers", [[], [0, 2], 0, 7], [[-1], -1, [1.0], [None], *NOTHING, *([each] for each in NOTHING)]),
        ("optional_flag", [True, False], [0, 1, "true", []]),
        ("optional_text", ["", "a"], [0, True, ["a"]]),
        ("optional_texts", [[], ["a", ""]], ["a", [1], [None], True]),
        ("optional_section", [{}, {"a": 1}], [[], "a", 1, True]),
    ],
)
def test_values_of_another_kind_are_refused_at_the_bounds(read: str, taken: list[Any], refused: list[Any]) -> None:
    for value in (None, *taken, *refused):
        problems: list[str] = []
        getattr(ConfigReader({"key": value}, label="file", problems=problems), read)("key")
        is_taken = value is None or any(value is each for each in taken)
        assert [problem[:16] for problem in problems] == ([] if is_taken else ["file key 'key': "]), value
