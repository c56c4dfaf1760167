"""What ModelOpt observes of the linear layers that a caller runs."""

import importlib.util
from collections.abc import Callable

import pytest
import torch

from dflash_trt.core.errors import ConfigError
from dflash_trt.quantize.calibrate import LinearBank, observe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed: scripts/test installs it"
)

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {"a.b": torch.randn(8, 16, generator=GENERATOR), "a.c": torch.randn(3, 4, 16, generator=GENERATOR)}
FORMATS = {"a.b": "fp8", "a.c": "nvfp4"}
ROWS = torch.randn(5, 16, generator=GENERATOR)


def run_both(first: torch.Tensor, second: torch.Tensor) -> Callable[[LinearBank], None]:
    def run(bank: LinearBank) -> None:
        bank("a.b", first)
        bank.observe("a.c", second)

    return run


def test_ranges_are_the_largest_magnitudes_of_all_calls_and_outputs_stay_as_they_are() -> None:
    def run(bank: LinearBank) -> None:
        assert ("a.b" in bank, "a.c" in bank, "a.d" in bank) == (True, True, False)
        for scale in (1.0, -3.0, 2.0):
            out = bank("a.b", scale * ROWS)
            assert torch.equal(out, torch.nn.functional.linear(scale * ROWS, WEIGHTS["a.b"]))
        for scale in (0.5, 0.25):
            bank.observe("a.c", scale * ROWS)

    found = observe(WEIGHTS, FORMATS, run)
    largest = ROWS.abs().max().item()
    assert found == {"a.b": pytest.approx(3 * largest), "a.c": pytest.approx(largest / 2)}


def test_nothing_runs_for_no_layer() -> None:
    def run(bank: LinearBank) -> None:
        raise AssertionError("nothing is to be observed")

    assert observe({}, {}, run) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_input_that_is_not_finite_is_refused_by_its_layer(value: float, layer: int) -> None:
    inputs = [ROWS.clone(), ROWS.clone()]
    inputs[layer][2, 3] = value
    with pytest.raises(ConfigError, match=f"input of {'a.b' if layer == 0 else 'a.c'}: expected finite values"):
        observe(WEIGHTS, FORMATS, run_both(*inputs))


def test_a_layer_that_sees_nothing_or_only_zeros_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"calibration: a\.c: expected activations, found none"):
        observe(WEIGHTS, FORMATS, lambda bank: bank.observe("a.b", ROWS))
    with pytest.raises(ConfigError, match=r"input of a\.c: expected a finite, positive range, found 0"):
        observe(WEIGHTS, FORMATS, run_both(ROWS, 0 * ROWS))
