"""scripts/bench_peers with sides that are played: what it reports, and that different texts end it."""

import sys
from pathlib import Path

import pytest

from scripts import bench_peers
from scripts.bench_peers import Answer, _alternating, _report, llama_cpp


def test_sides_take_turns_at_every_prompt():
    calls = []

    def side(name):
        return lambda prompt: calls.append((name, prompt[0])) or Answer([7], 1.0, 1.0)

    answers = _alternating({name: side(name) for name in ("transformers", "a")}, [[1], [2]])
    assert calls == [("transformers", 1), ("a", 1), ("transformers", 2), ("a", 2)]
    assert [len(of_side) for of_side in answers.values()] == [2, 2]


def test_other_tokens_than_those_of_transformers_end_the_run_in_float32():
    def side(*tokens):
        return lambda prompt: Answer(list(tokens), 1.0, 1.0)

    sides = {"transformers": side(1, 2), "llama.cpp q8_0": side(1, 4), "int4: speculative": side(1, 5)}
    assert len(_alternating(sides, [[5]], rounded=["int4: speculative"])) == 3
    with pytest.raises(SystemExit, match="prompt 0: int4: speculative gave other tokens"):
        _alternating(sides, [[5]])
    sides.pop("int4: speculative")
    for name in ("autoregressive", "llama.cpp f32"):
        with pytest.raises(SystemExit, match=f"prompt 0: {name} gave other tokens"):
            _alternating(sides | {name: side(1, 3)}, [[5]])


def test_a_speedup_is_the_median_of_the_ratios_within_a_prompt():
    wall_s = {
        "transformers": [4.0, 40.0, 8.0],
        "llama.cpp f16": [2.0, 20.0, 2.0],
        "autoregressive": [2.0, 10.0, 8.0],
        "speculative": [1.0, 20.0, 4.0],
    }
    cpu_s = {"transformers": 3.0, "llama.cpp f16": 2.0, "autoregressive": 2.0, "speculative": 1.0}
    answers = {name: [Answer([len(name)], wall, cpu_s[name]) for wall in times] for name, times in wall_s.items()}
    report = _report(answers, max_new_tokens=16)
    assert report["speedup"] == {
        "autoregressive": {"transformers": 2.0, "llama.cpp f16": 1.0},
        "speculative": {"transformers": 2.0, "llama.cpp f16": 1.0},
    }
    assert report["cpu_time_speedup"]["speculative"] == {"transformers": 3.0, "llama.cpp f16": 2.0}
    assert report["tok_per_s"]["transformers"] == 2.0
    assert report["equal_texts"] == {"transformers": 3, "llama.cpp f16": 0, "autoregressive": 0, "speculative": 0}
    table = bench_peers._table(report)
    assert "| llama.cpp f16 | 8 | 0 of 3 | 1.00 | 1.00 | 1.00 | 2.00 |" in table
    assert "| speculative | 4 | 0 of 3 |  |  |  |  |" in table


PEER = """
import json, sys
print(json.dumps({"version": sys.argv[2]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["prompt"] == [0]:
        break
    tokens = asked["prompt"][: asked["max_new_tokens"]]
    print(json.dumps({"tokens": tokens, "wall_s": 2.0, "cpu_s": 1.0}), flush=True)
"""


def test_a_peer_of_its_own_environment_is_asked_line_by_line(monkeypatch, tmp_path):
    (tmp_path / "llama_cpp_peer.py").write_text(PEER)
    monkeypatch.setattr(bench_peers, "__file__", str(tmp_path / "bench_peers.py"))
    with llama_cpp(Path(sys.executable), tmp_path, "f16", 2, 1) as side:
        assert side([5, 6, 7]) == Answer([5, 6], 2.0, 1.0)
        with pytest.raises(SystemExit, match=r"llama\.cpp ended; run .* f16 1 to see why"):
            side([0])
