"""What Python callers pass: taken, made plain, or refused by name before it reaches an engine."""

import math
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.core.checked_values import FLOAT32_TINY, INT32_MAX
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import MAX_SEED, Request, SamplingParams


def request(**fields: Any) -> Request:
    return Request(**({"request_id": "r", "prompt_token_ids": (1,), "sampling": SamplingParams()} | fields))


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 256.0),
        ("max_new_tokens", np.float32(256)),
        ("max_new_tokens", True),
        ("max_new_tokens", "16"),
        ("max_new_tokens", None),
        ("max_new_tokens", torch.tensor(5)),
        ("temperature", "hot"),
        ("temperature", False),
        ("temperature", -1e-300),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e4 + 1),
        ("temperature", 10**400),
        ("temperature", [0.5]),
        ("temperature", 1j),
        ("top_k", -1),
        ("top_k", 4.0),
        ("top_p", 0.0),
        ("top_p", math.nextafter(1.0, 2.0)),
        ("top_p", True),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", 5),
        ("stop", ("a", "")),
        ("stop", ""),
        ("stop", b"bytes"),
        ("stop", {"a": 1}),
        ("stop", [None]),
        ("stop_token_ids", 5),
        ("stop_token_ids", (5.0,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", "12"),
        ("stop_token_ids", b"12"),
        ("stop_token_ids", np.array(3)),
        ("ignore_eos", 1),
        ("logprobs", "yes"),
        ("logprobs", Unprintable()),
    ],
)
def test_a_sampling_value_of_a_wrong_kind_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"sampling {name}: expected .*, found "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", 5),
        ("priority", "high"),
        ("priority", 1.0),
        ("priority", True),
        ("queue_timeout_s", "x"),
        ("queue_timeout_s", -1),
        ("queue_timeout_s", math.nan),
        ("queue_timeout_s", 10**400),
        ("cache_salt", []),
        ("cache_salt", None),
        ("seed", 2**63),
        ("sampling", {"temperature": 1.0}),
        ("is_reproducible", 1),
        ("sample_index", -1),
        ("shares_prompt_of", 3),
    ],
)
def test_a_request_field_of_a_wrong_kind_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"request: {name}: expected .*, found "):
        request(**{name: value})


def test_an_integer_with_more_digits_than_python_writes_is_refused_like_any_other() -> None:
    with pytest.raises(RequestError, match=r"sampling seed: .*, found a value of type int"):
        SamplingParams(seed=10**5000)


def test_a_wrong_value_is_shown_and_a_long_one_shortened() -> None:
    for value, shown in (("x" * 78, repr("x" * 78)), ("x" * 79, "'" + "x" * 79 + "...")):
        with pytest.raises(RequestError) as refused:
            SamplingParams(temperature=value)  # type: ignore[arg-type]
        assert str(refused.value).endswith(f"found {shown}.")


def test_the_defaults_of_a_request_change_nothing() -> None:
    assert asdict(request(sampling=SamplingParams(), request_id="a")) == {
        "request_id": "a",
        "prompt_token_ids": (1,),
        "sampling": asdict(SamplingParams()),
        "stop_token_ids": frozenset(),
        "bad_word_ids": (),
        "seed": 0,
        "is_reproducible": True,
        "priority": 0,
        "queue_timeout_s": None,
        "cache_salt": "",
        "sample_index": 0,
        "shares_prompt_of": None,
        "constraint": None,
        "reports_drafts": False,
    }
    assert request(queue_timeout_s=0).queue_timeout_s == 0 and request(queue_timeout_s=math.inf, priority=-5)


def test_all_wrong_values_come_in_one_error() -> None:
    with pytest.raises(RequestError, match="3 problems") as refusal:
        SamplingParams(max_new_tokens=0, temperature=-1.0, top_p=2.0)
    assert all(f"sampling {name}:" in str(refusal.value) for name in ("max_new_tokens", "temperature", "top_p"))


def test_numbers_of_numpy_and_lists_become_plain_values() -> None:
    given: dict[str, Any] = {
        "max_new_tokens": np.int64(9),
        "temperature": np.float32(0.5),
        "top_k": np.uint8(200),
        "top_p": Fraction(1, 2),
        "min_p": 0,
        "seed": np.uint64(MAX_SEED),
        "stop": ["a", "b"],
        "stop_token_ids": np.array([3, 4], dtype=np.int32),
    }
    params = SamplingParams(**given)
    plain = SamplingParams(
        max_new_tokens=9, temperature=0.5, top_k=200, top_p=0.5, seed=MAX_SEED, stop=("a", "b"), stop_token_ids=(3, 4)
    )
    assert params == plain
    kinds = {name: type(getattr(params, name)) for name in given}
    assert kinds == {name: type(getattr(plain, name)) for name in given}
    assert {type(token) for token in params.stop_token_ids} == {int}
    assert type(request(priority=np.int16(-3)).priority) is int
    assert request(queue_timeout_s=np.float64(2)) == request(queue_timeout_s=2)


def test_a_single_stop_string_is_one_string_and_not_its_letters() -> None:
    given: Any = "END"
    assert SamplingParams(stop=given) == SamplingParams(stop=("END",))


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"temperature": 1e-40}, {"temperature": 0.0}),
        ({"temperature": 1e-38}, {"temperature": 0.0}),
        ({"temperature": FLOAT32_TINY}, {"temperature": FLOAT32_TINY}),
        ({"temperature": 1e4}, {"temperature": 1e4}),
        ({"top_p": 1e-300}, {"top_p": FLOAT32_TINY}),
        ({"top_k": 2**32}, {"top_k": INT32_MAX}),
        ({"top_k": 10**400}, {"top_k": INT32_MAX}),
        ({"seed": MAX_SEED}, {"seed": MAX_SEED}),
    ],
)
def test_extremes_are_held_as_the_device_holds_them_without_loss_of_meaning(
    given: dict[str, Any], held: dict[str, Any]
) -> None:
    params = SamplingParams(**given)
    for name, value in held.items():
        assert getattr(params, name) == value
    assert np.float32(params.temperature) == params.temperature
    np.int32(params.top_k)
