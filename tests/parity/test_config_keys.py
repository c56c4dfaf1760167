"""Every key of every family's config.json, changed one by one: a file is refused, or read as transformers reads it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.core.errors import DFlashError
from tests.checkpoint.refusals import read_target_spec
from tests.engines import make_executor
from tests.factories import Family, make_target, read_json, write_json
from tests.gemma_targets import Gemma, make_gemma

Config = dict[str, Any]
FAMILIES = (*get_args(Family), *get_args(Gemma))
TOKENS = [(7 * i + i // 5) % 12 for i in range(40)]  # longer than every window and chunk of the factories
TOLERANCE = 2e-4
# Errors by which transformers refuses a file, or fails in its first step.
REFUSALS = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)


def changed_values(value: Any) -> Iterator[Any]:
    """Other values of the same type, and null."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2 + 2)
    elif isinstance(value, float):
        yield value * 1.5
    elif isinstance(value, str):
        yield "other"
    elif isinstance(value, list) and value:
        yield from ([*value[1:], value[0]], value[:1] * len(value), value[:-1])
    elif value is None:
        yield from (1, True)
    if value is not None:
        yield None


def mutants(config: Config) -> Iterator[tuple[str, Config]]:
    """The config with one key changed or removed, also in its sections; and what was done to it."""
    for key, value in config.items():
        without = {name: other for name, other in config.items() if name != key}
        yield f"{key} removed", without
        yield from ((f"{key} = {other!r}", config | {key: other}) for other in changed_values(value))
        if isinstance(value, dict):
            yield from ((f"{key}.{said}", config | {key: inner}) for said, inner in mutants(value))


def make(path: Path, family: Any) -> Path:
    if family in get_args(Gemma):
        return make_gemma(path, family=family)
    return make_target(path, family=family, vocab_size=12, tokenizer=False)


@torch.no_grad()
def logits_of_transformers(target: Path) -> torch.Tensor | None:
    """None where transformers refuses the file."""
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        logits: torch.Tensor = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    except REFUSALS:
        return None
    return logits


def silent_differences(target: Path) -> tuple[list[str], int]:
    """Changes of the config that are read, with other logits than those of transformers; and how many are compared."""
    config, wrong, num_compared = read_json(target / "config.json"), [], 0
    spec, logits = read_target_spec(target), make_executor(target).target_logits(TOKENS)
    for said, changed in mutants(config):
        write_json(target / "config.json", changed)
        try:
            is_same = read_target_spec(target) == spec
            found = logits if is_same else make_executor(target).target_logits(TOKENS)
        except DFlashError:
            continue
        expected = logits_of_transformers(target)
        if expected is not None:
            num_compared += 1
            if found.shape != expected.shape or not (found - expected).abs().max() < TOLERANCE:
                wrong.append(said)
    write_json(target / "config.json", config)
    return wrong, num_compared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_key_is_refused_or_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    wrong, num_compared = silent_differences(make(tmp_path / "target", family))
    assert wrong == []
    assert num_compared > 20


def test_a_key_that_is_ignored_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a reader that takes a window, a flag and a base of RoPE for absent."""
    target = make(tmp_path / "target", "mistral")
    before = read_target_spec(target)
    value = ConfigReader.value

    def ignoring(self: ConfigReader, name: str) -> Any:
        found = value(self, name)
        return 6 if name == "sliding_window" else 10000.0 if name == "rope_theta" and found else found

    monkeypatch.setattr(ConfigReader, "value", ignoring)
    assert read_target_spec(target) == before
    wrong, _ = silent_differences(target)
    assert {"sliding_window = 7", "sliding_window = None", "rope_parameters.rope_theta = 15000.0"} <= set(wrong)
