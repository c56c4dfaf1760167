"""Metrics without a server."""

from typing import Any

from dflash_trt.servers.triton.metrics import METRICS


class FakeSeries:
    """What Triton would show."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.observed: list[tuple[str, float]] = []
        self.is_closed = False

    def open(self, label_values: Any) -> None:
        for metric in METRICS:
            for value in label_values.get(metric, ("",)):
                self.values[metric.name.removeprefix("dflash_trt_"), value] = 0.0

    def increment(self, name: str, label: str, count: float) -> None:
        assert count > 0
        self.values[name.removeprefix("dflash_trt_"), label] += count

    def set(self, name: str, value: float) -> None:
        self.values[name.removeprefix("dflash_trt_"), ""] = value

    def observe(self, name: str, value: float) -> None:
        self.observed.append((name.removeprefix("dflash_trt_"), value))

    def close(self) -> None:
        self.is_closed = True
