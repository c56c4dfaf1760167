"""RuntimeConfig: what is refused, in one error and in the words of whoever wrote it."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.frozen import MAX_INT32
from dflash_trt.core.runtime_config import RuntimeConfig, option_of


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_cache_bytes": 0}, "settings: kv_cache_bytes: expected an integer of 1 or more, found 0."),
        ({"kv_cache_free_memory_fraction": 0.0}, "expected a number in (0, 1], found 0.0."),
        ({"kv_cache_free_memory_fraction": -0.5}, "expected a number in (0, 1], found -0.5."),
        ({"kv_cache_free_memory_fraction": 1.5}, "expected a number in (0, 1], found 1.5."),
        ({"kv_cache_free_memory_fraction": float("nan")}, "expected a number in (0, 1], found nan."),
        ({"draft_length": -1}, "draft_length: expected K of 0 to 2147483647, or pairs REQUESTS:K such as 1:7,16:5, f"),
        ({"draft_length": True}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"num_draft_tokens": 1}, "'num_draft_tokens' is not a setting of the engine. Use draft_length."),
        ({"num_threads": 2.0}, "num_threads: expected an integer of 1 or more, found 2.0."),
        ({"max_queue_len": 0}, "max_queue_len: expected an integer of 1 or more, found 0."),
        ({"seed": -1}, "seed: expected an integer of 0 or more, found -1."),
        ({"device": "gpu"}, "device: expected one of auto, cpu, cuda, found 'gpu'."),
        ({"use_drafter": None}, "use_drafter: expected True or False, found None."),
        ({"num_thread": 1}, "'num_thread' is not a setting of the engine. Did you mean 'num_threads'?"),
        (
            {"kv_cache_bytes": 1, "kv_cache_free_memory_fraction": 0.5},
            "kv_cache_bytes and kv_cache_free_memory_fraction are mutually exclusive",
        ),
        ({"use_drafter": False, "draft_length": 0}, "use_drafter=False and draft_length are mutually exclusive"),
        (
            {"use_drafter": False, "adaptive_draft_length": True},
            "use_drafter=False and adaptive_draft_length are mutually exclusive",
        ),
        ({"draft_length": {2: 3}}, "draft_length: expected numbers of requests from 1 on with their K, such as 1:7,"),
        ({"draft_length": {}}, "draft_length: expected numbers of requests from 1 on"),
        ({"draft_length": {0: 3, 1: 2}}, "draft_length: expected numbers of requests from 1 on"),
        (
            {"draft_length": {1: -1}},
            "draft_length: expected K of 0 to 2147483647, or pairs REQUESTS:K such as 1:7,16:5",
        ),
        ({"draft_length": {1: 2.0}}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": {1: True}}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": {1: 1 << 31}}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": 7.0}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": "x"}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": "1:7:5"}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": "1:7,x"}, "draft_length: expected K of 0 to 2147483647, or pairs"),
        ({"draft_length": "1:7,1:5"}, "draft_length: expected each number of requests once, found '1:7,1:5'."),
        (
            {"draft_length": {1: 3, 4: 2}, "adaptive_draft_length": True},
            "draft_length: expected one K with adaptive_draft_length, its maximum, found 1:3,4:2.",
        ),
        ({"draft_length": {1: 3}, "use_drafter": False}, "use_drafter=False and draft_length are mutually exclusive"),
        ({"ngram": True, "overlap_scheduling": True}, "ngram and overlap_scheduling are mutually exclusive."),
        ({"ngram": True, "draft_length": 0}, "draft_length: expected a K of 1 or more with ngram, whose drafts count"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_expected(fields, said) -> None:
    with pytest.raises(ConfigError) as error:
        RuntimeConfig(**fields)
    assert said in str(error.value)


def test_the_defaults_are_those_of_the_documents() -> None:
    assert RuntimeConfig().model_dump(exclude_none=True) == {
        "device": "auto",
        "use_drafter": True,
        "adaptive_draft_length": False,
        "ngram": False,
        "enable_prefix_caching": True,
        "deterministic": False,
        "publish_prompts": False,
        "nnodes": 1,
        "master_port": 29500,
    }
    assert [RuntimeConfig(draft_length=k).max_draft_tokens for k in (None, 0, 5)] == [0, 0, 5]


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("draft_window", 1, MAX_INT32),
        ("num_state_snapshots", 0, MAX_INT32),
        ("num_threads", 1, MAX_INT32),
        ("max_queue_len", 1, MAX_INT32),
        ("kv_cache_bytes", 1, None),
        ("host_cache_bytes", 1, None),
        ("disk_cache_bytes", 1, None),
        ("seed", 0, None),
        ("nnodes", 1, MAX_INT32),
        ("master_port", 1, 65535),
    ],
)
def test_a_setting_may_reach_its_bounds_and_no_further(name: str, lowest: int, highest: int | None) -> None:
    for value in (lowest, 2**62 if highest is None else highest):
        assert getattr(RuntimeConfig(**{name: value}), name) == value
    for value in (lowest - 1, *([] if highest is None else [highest + 1])):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer of {lowest} or more, found {value}"):
            RuntimeConfig(**{name: value})
    assert RuntimeConfig(kv_cache_free_memory_fraction=1.0).kv_cache_free_memory_fraction == 1.0


CHANGES = {
    "kv_cache_bytes": 1,
    "kv_cache_free_memory_fraction": 0.5,
    "enable_prefix_caching": False,
    "num_state_snapshots": 2,
    "host_cache_bytes": 1 << 20,
    "disk_cache_dir": "/disk",
    "use_drafter": False,
    "adaptive_draft_length": True,
    "draft_length": {1: 3},
    "draft_window": 9,
    "ngram": True,
}
EXCLUSIVE = {
    ("kv_cache_bytes", "kv_cache_free_memory_fraction"),
    ("enable_prefix_caching", "num_state_snapshots"),
    ("enable_prefix_caching", "host_cache_bytes"),
    ("enable_prefix_caching", "disk_cache_dir"),
    *(("use_drafter", name) for name in [*CHANGES][7:]),
}


@pytest.mark.parametrize(("first", "second"), [*combinations(CHANGES, 2)])
def test_settings_exclude_those_that_contradict_them_and_no_others(first: str, second: str) -> None:
    fields = {name: CHANGES[name] for name in (first, second)}
    if (first, second) not in EXCLUSIVE:
        config = RuntimeConfig(**fields)
        assert config.without_drafter().use_drafter is False
        return
    with pytest.raises(ConfigError, match="are mutually exclusive"):
        RuntimeConfig(**fields)


def test_a_config_without_its_drafter_keeps_what_does_not_need_one() -> None:
    config = RuntimeConfig(num_threads=3, kv_cache_bytes=5, draft_length=2, draft_window=9, max_queue_len=4)
    expected = RuntimeConfig(num_threads=3, kv_cache_bytes=5, use_drafter=False, max_queue_len=4)
    assert config.without_drafter() == expected
    assert config.replaced() is config and config.replaced(seed=1).seed == 1


def test_a_path_and_a_size_are_read_from_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RuntimeConfig(plugin_library="a/lib.so", kv_cache_bytes="1.5GiB", host_cache_bytes="1MiB")
    assert config.host_cache_bytes == 1 << 20
    assert (config.plugin_library, config.kv_cache_bytes) == (str(tmp_path / "a/lib.so"), 3 << 29)
    assert RuntimeConfig(plugin_library=tmp_path, kv_cache_bytes="2GB").kv_cache_bytes == 2 * 10**9
    for fields, said in (
        ({"plugin_library": ""}, "a path"),
        ({"kv_cache_bytes": "lots"}, "a number of bytes, such as"),
    ):
        with pytest.raises(ConfigError, match=f"expected {said}"):
            RuntimeConfig(**fields)


def test_all_wrong_settings_are_in_one_error() -> None:
    with pytest.raises(ConfigError, match="4 problems") as error:
        RuntimeConfig(num_threads=0, sead=1, use_drafter=False, draft_length=-2)
    assert [line.split()[1] for line in str(error.value).splitlines()[1:]] == [
        "draft_length:",
        "num_threads:",
        "'sead'",
        "use_drafter=False",
    ]


def test_a_user_of_a_command_reads_the_flags_that_were_typed() -> None:
    fields = {"num_threads": 0, "use_drafter": False, "draft_length": 2}
    flags = {"num_threads": "--num-threads", "use_drafter": "--no-drafter", "draft_length": "--draft-length"}
    with pytest.raises(ConfigError) as error:
        RuntimeConfig.model_validate(fields, context=flags)
    assert str(error.value).splitlines() == [
        "options: 2 problems",
        "  - --num-threads: expected an integer of 1 or more, found 0.",
        "  - --no-drafter and --draft-length are mutually exclusive.",
    ]


def test_a_copy_is_checked_like_the_original() -> None:
    config = RuntimeConfig(use_drafter=False)
    with pytest.raises(ConfigError, match="mutually exclusive"):
        config.replaced(draft_length=2)
    assert config.replaced(use_drafter=True, draft_length=2) == RuntimeConfig(draft_length=2)


def test_numbers_of_numpy_are_numbers() -> None:
    config = RuntimeConfig(num_threads=np.int64(3), kv_cache_free_memory_fraction=np.float32(0.5))
    assert (config.num_threads, type(config.num_threads)) == (3, int)
    assert (config.kv_cache_free_memory_fraction, type(config.kv_cache_free_memory_fraction)) == (0.5, float)


@pytest.mark.parametrize("written", [7, "7", np.int32(7), {1: 7}, {np.int64(1): np.int32(7)}, "1:7", {"1": "7"}])
def test_one_draft_length_holds_for_every_batch_size(written) -> None:
    config = RuntimeConfig(draft_length=written, adaptive_draft_length=True)
    assert (config.draft_length, config.max_draft_tokens) == ({1: 7}, 7)
    assert lengths_text(config.draft_length or {}) == "7"


@pytest.mark.parametrize("written", ["16:5,1:7,64:3", {1: 7, 64: 3, 16: 5}, {"1": "7", "16": "5", "64": "3"}])
def test_draft_lengths_are_read_from_texts_and_mappings_of_python_and_json(written) -> None:
    config = RuntimeConfig(draft_length=written)
    assert list((config.draft_length or {}).items()) == [(1, 7), (16, 5), (64, 3)]
    assert config.max_draft_tokens == 7
    assert config.without_drafter() == RuntimeConfig(use_drafter=False)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RuntimeConfig().seed = 3


def test_every_field_has_its_help() -> None:
    for name in RuntimeConfig.model_fields:
        assert option_of(name).help.endswith("."), name


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 0),
        ({"draft_length": 5}, 5),
        ({"draft_length": {1: 3, 4: 7, 16: 2}}, 7),
        ({"draft_length": {1: 3, 4: 0}}, 3),
    ],
)
def test_the_most_drafts_are_those_of_any_batch(fields: dict[str, Any], most: int) -> None:
    assert RuntimeConfig(**fields).max_draft_tokens == most
