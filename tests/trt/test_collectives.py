"""What two ranks exchange inside a TensorRT network, with the other rank's part put in by the test."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.ops import TrtOps
from tests.trt.interpreter import NetworkInterpreter, Step

MINE = torch.arange(12.0).reshape(3, 4)
OTHERS = MINE + 100


class OneOfTwoRanks(NetworkInterpreter):
    """An all-gather stacks the ranks' tensors along axis 0, an all-reduce adds them, as TensorRT says."""

    def _dist_collective(self, layer: Any) -> Step:
        assert layer.num_ranks == 2
        is_gather = layer.name.startswith("ALL_GATHER")
        return lambda given: [torch.cat((given[0], OTHERS)) if is_gather else given[0] + OTHERS]


@pytest.mark.parametrize(
    ("op", "expected"), [("all_gather_vocab", torch.cat((MINE, OTHERS), dim=1)), ("all_reduce", MINE + OTHERS)]
)
def test_two_ranks_exchange_what_plain_pytorch_exchanges(
    trt: ModuleType, monkeypatch: pytest.MonkeyPatch, op: str, expected: Tensor
) -> None:
    add_layer = Layers.add_layer

    def name_collectives(self: Layers, method: str, *arguments: Any) -> Any:
        layer = add_layer(self, method, *arguments)
        if method == "add_dist_collective":  # a finished layer does not tell what it does
            layer.name = arguments[1].name
        return layer

    monkeypatch.setattr(Layers, "add_layer", name_collectives)
    logger = make_logger(trt)
    network = trt.Builder(logger).create_network(0)
    layers = Layers(trt, network, logger)
    x = layers.add_input("x", "float32", (-1, 4), ("N", "V"))
    layers.mark_output(getattr(TrtOps(layers, None, None, [], tp_size=2), op)(x), "out")
    found = OneOfTwoRanks(trt, network, {}).run({"x": MINE})["out"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
