"""Opening an engine looks whether its pages are written, by the plugin library's own launches."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.building import BuiltLibrary, run_python


@pytest.fixture(scope="module")
def results(built: BuiltLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("needs TensorRT-RTX, which holds the network: pip install 'dflash-trt[check]'")
    root: Path = tmp_path_factory.mktemp("pair")
    module = "tests.plugins.executed_engine"
    done = run_python(module, built.kernels, built.fake_driver, built.manifest, root)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["errors"] == []
    return found


@pytest.mark.parametrize("engine", ["FP8 pages", "sinks, a scale and a soft cap"])
def test_whole_steps_through_the_librarys_launches_give_torchs_tokens(results: dict[str, Any], engine: str) -> None:
    assert results["tokens"][engine] is True


def test_whole_steps_over_recurrent_states_give_torchs_tokens(results: dict[str, Any]) -> None:
    """Blocks cut everywhere, K that changes, chained steps, and steps that run twice."""
    found = results["hybrid"]
    assert found["tokens"] is True and found["again"] is True
    assert re.match(r"12 steps, \d+ tokens equal", found["chained"])


@pytest.mark.parametrize("drafter", ["dflash", "eagle3"])
def test_chained_steps_with_rejection_sampling_give_torchs_tokens(results: dict[str, Any], drafter: str) -> None:
    found = results if drafter == "dflash" else results["chain"]
    if found is None:
        pytest.skip("needs PyPI speculators, which writes the head")
    assert re.match(r"12 steps, \d+ tokens equal", found["rejection sampling"]), found["rejection sampling"]


def test_an_engine_that_writes_its_slots_passes_and_others_are_refused_by_the_part(results: dict[str, Any]) -> None:
    found = results["hybrid"]
    assert found["canary"] == "5 tokens in each of 14 pools, at 2 places"  # 2 states of 6 parts, K/V of 2 layers
    for engine, message in {
        "no address": "slots of target_state.0.state: expected 1536 values of slot 0 to be written, found 0 of them",
        "a slot late": "slots of target_state.2.deltas: expected no slot of others to be written, found 1 of them",
        "one state twice": "slots of target_state.2.state: expected 1536 values of slot 0 to be written, found 0",
    }.items():
        assert found[engine].startswith(message), found[engine]


def test_whole_steps_of_a_chain_give_torchs_tokens_and_its_features_pass_the_canary(results: dict[str, Any]) -> None:
    found = results["chain"]
    if found is None:
        pytest.skip("needs PyPI speculators, which writes the head")
    assert found["tokens"] is True
    assert found["canary"] == "5 tokens in each of 4 pools, at 2 places"
    message = "pages of draft_features: expected no page of others to be written"
    assert found["a page late"].startswith(message), found["a page late"]


def test_whole_steps_over_latents_give_torchs_tokens_and_their_pages_are_looked_at(results: dict[str, Any]) -> None:
    found = results["latents"]
    assert all(found[what] is True for what in ("tokens", "FP8 pages", "a prompt attended directly"))
    assert found["canary"] == "5 tokens in each of 3 pools, at 2 places"
    missing = "pages of target_kv.1: expected 5 rows to be written, found 0 of them"
    assert found["no address"].startswith(missing)


@pytest.mark.parametrize("engine", ["with drafts", "without drafts"])
def test_an_engine_that_writes_its_pages_passes(results: dict[str, Any], engine: str) -> None:
    assert results["canary"][engine] == "5 tokens in each of 3 pools, at 2 places"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("an address of 0", "pages of target_kv.1: expected 10 rows of K and V to be written, found 0 of them"),
        ("one state twice", "pages of target_kv.1: expected 10 rows of K and V to be written, found 0 of them"),
        ("a page late", "pages of target_kv.0: expected no page of others to be written"),
    ],
)
def test_an_engine_that_does_not_is_refused_by_the_pool(results: dict[str, Any], engine: str, message: str) -> None:
    assert results["canary"][engine].startswith(message), results["canary"][engine]
