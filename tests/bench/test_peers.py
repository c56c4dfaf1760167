"""scripts/bench_peers with sides that are played: what it reports, and that different texts end it."""

import pytest

from scripts import bench_peers
from scripts.bench_peers import _alternating, _report


def test_sides_take_turns_at_every_prompt():
    calls = []
    sides = {name: lambda prompt, name=name: calls.append((name, prompt[0])) or [7] for name in ("transformers", "a")}
    seconds = _alternating(sides, [[1], [2]])
    assert calls == [("transformers", 1), ("a", 1), ("transformers", 2), ("a", 2)]
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_other_tokens_than_those_of_transformers_end_the_run():
    sides = {"transformers": lambda prompt: [1, 2], "autoregressive": lambda prompt: [1, 3]}
    with pytest.raises(SystemExit, match="prompt 0: autoregressive gave other tokens"):
        _alternating(sides, [[5]])


def test_a_speedup_is_the_median_of_the_ratios_within_a_prompt():
    wall_s = {
        "transformers": [4.0, 40.0, 8.0],
        "dflash": [2.0, 20.0, 2.0],
        "autoregressive": [2.0, 10.0, 8.0],
        "speculative": [1.0, 20.0, 4.0],
    }
    cpu_s = {"transformers": 3.0, "dflash": 2.0, "autoregressive": 2.0, "speculative": 1.0}
    seconds = {name: [(wall, cpu_s[name]) for wall in times] for name, times in wall_s.items()}
    report = _report(seconds, max_new_tokens=16)
    assert report["speedup"] == {
        "autoregressive": {"transformers": 2.0, "dflash": 1.0},
        "speculative": {"transformers": 2.0, "dflash": 1.0},
    }
    assert report["cpu_time_speedup"]["speculative"] == {"transformers": 3.0, "dflash": 2.0}
    assert report["tok_per_s"]["transformers"] == 2.0
    assert "| speculative | 4 | 2.00 | 1.00 | 3.00 | 2.00 |" in bench_peers._table(report)
