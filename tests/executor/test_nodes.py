"""Ranks on several machines, which are network namespaces: they compute what the same ranks compute on one.

Node 0 is this process, on an address of the nodes' network, or a command in a namespace of its own.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.llm import LLM
from tests.executor.node_commands import PORT, SECRET, alive, children, on_node, ranks_on, run_on, said, wait_for
from tests.executor.rank_engines import KV_CACHE_BYTES, build, make_zlab_pair, opened
from tests.namespaces import Node, network
from tests.parity.test_host_tier import TALKS, contents, turns
from tests.traces import GREEDY, PROMPTS, SAMPLED, integers, logprobs, trace

K = 3
LONG = SamplingParams(max_new_tokens=45, ignore_eos=True)
SAMPLING = [
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.4 * i, seed=i, logprobs=True, top_logprobs=2)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[list[Node], str]]:
    with network(2) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_TRT_SECRET", SECRET)
        yield made


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, EngineDir]:
    """By the number of ranks."""
    root = tmp_path_factory.mktemp("pair")
    make_zlab_pair(root)
    return {tp_size: build(root, tp_size=tp_size, max_batch_size=8) for tp_size in (2, 4)}


def over_nodes(master: str, nnodes: int = 2) -> dict[str, Any]:
    return {"nnodes": nnodes, "master_addr": master, "master_port": PORT}


def open_llm(engine: EngineDir, **options: Any) -> LLM:
    return LLM(engine.path, device="cpu", num_threads=1, kv_cache_bytes=KV_CACHE_BYTES, **options)


# The same tokens


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("samplings", "ks"), [(GREEDY, (K,)), (SAMPLED, (K, 0, 1))], ids=["greedy", "sampled, K changing"]
)
def test_every_step_of_a_mixed_trace_equals_that_of_one_machine(
    cluster: Any, engines: dict[int, EngineDir], num_ranks: int, samplings: Any, ks: tuple[int, ...]
) -> None:
    """One rank on each of two nodes, or two."""
    (_, other), master = cluster
    engine = engines[num_ranks]
    with opened(engine) as here:
        expected, _ = trace(here, samplings, num_draft_tokens=ks)
    with ranks_on(other, engine.path, master) as command, opened(engine, **over_nodes(master)) as executor:
        assert len(executor.worker_process_ids) == num_ranks // 2 - 1
        assert len(children(command.pid)) == num_ranks // 2
        found, _ = trace(executor, samplings, num_draft_tokens=ks)
    assert integers(found) == integers(expected)
    assert logprobs(found).tolist() == logprobs(expected).tolist()
    code, messages = said(command)
    assert code == 0 and messages.endswith("node 0 has closed the engine\n")


def test_four_nodes_have_the_trace_of_one_machine(cluster: Any, engines: dict[int, EngineDir]) -> None:
    """Ranks of other nodes connect to each other, too. Two of the nodes share an address."""
    nodes, master = cluster
    with opened(engines[4]) as here:
        expected, _ = trace(here, SAMPLED, num_draft_tokens=(K,))
    with ExitStack() as commands:
        for node_rank, node in ((3, nodes[0]), (1, nodes[1]), (2, nodes[1])):
            commands.enter_context(ranks_on(node, engines[4].path, master, nnodes=4, node_rank=node_rank))
        with opened(engines[4], **over_nodes(master, 4)) as executor:
            found, _ = trace(executor, SAMPLED, num_draft_tokens=(K,))
    assert integers(found) == integers(expected)


def answers(llm: LLM) -> list[GenerationOutput]:
    """Of all prompts at once, and again after a first turn, whose pages are hits."""
    first = llm.generate(PROMPTS, SAMPLING)
    longer = [[*prompt, *output.token_ids, 7] for prompt, output in zip(PROMPTS, first, strict=True)]
    return [*first, *llm.generate(longer, SAMPLING)]


def test_an_llm_on_node_0_answers_as_on_one_machine(cluster: Any, engines: dict[int, EngineDir]) -> None:
    """Which prompts share a step is a matter of time, and so are the last bits of a sum: the traces above are exact."""
    (_, other), master = cluster
    with open_llm(engines[2], draft_length=K) as here:
        expected = answers(here)
    with ranks_on(other, engines[2].path, master), open_llm(engines[2], draft_length=K, **over_nodes(master)) as llm:
        found = answers(llm)
    for one, two in zip(expected, found, strict=True):
        assert two.token_ids == one.token_ids
        assert [step.num_accepted for step in two.steps] == [step.num_accepted for step in one.steps]
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        pairs = [
            (a, b)
            for row, expected_row in zip(two.top_logprobs, one.top_logprobs, strict=True)
            for a, b in zip(row, expected_row, strict=True)
        ]
        assert all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs) and pairs
    assert any(output.statistics.num_prefix_hit_tokens for output in found)
    assert any(step.num_accepted for output in found for step in output.steps)


def test_each_node_keeps_the_prefixes_of_its_ranks_in_its_own_memory(cluster: Any, tmp_path: Path) -> None:
    (_, other), master = cluster
    make_zlab_pair(tmp_path)
    engine = build(tmp_path, tp_size=2, max_batch_size=3, max_num_tokens=20)
    page_bytes = plan_engine_pages(engine.manifest, RuntimeConfig(kv_cache_bytes=1 << 20)).bytes_per_token * 4
    with opened(engine, kv_cache_bytes=48 * page_bytes) as here:
        expected, _ = turns(here, talks=TALKS[:3])
    few = {"kv_cache_bytes": 17 * page_bytes, "host_cache_bytes": 1 << 20}
    with ranks_on(other, engine.path, master), opened(engine, **few, **over_nodes(master)) as executor:
        found, counts = turns(executor, talks=TALKS[:3])
    assert contents(found) == contents(expected) and counts.num_onboarded_pages > 0
    assert [output.logprobs for output in found] == [output.logprobs for output in expected]


def test_run_on_one_node_and_ranks_on_the_other_write_what_run_writes_alone(
    cluster: Any, engines: dict[int, EngineDir], tmp_path: Path
) -> None:
    """The engine stands at another path on each node, and the nodes are started in any order."""
    (first, other), _ = cluster
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt_token_ids": prompt, "max_new_tokens": 9, "ignore_eos": True} for prompt in PROMPTS]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--input-file", rows, "--draft-length", K]
    alone = run_on(None, engines[4].path, *options)
    expected, _ = alone.communicate(timeout=60)
    link = tmp_path / "engine-of-node-0"
    link.symlink_to(engines[4].path)
    with ranks_on(other, engines[4].path, first.address) as command:
        master = ["--nnodes", 2, "--master-addr", first.address, "--master-port", PORT]
        node_0 = run_on(first, link, *options, *master)
        found, messages = node_0.communicate(timeout=60)
    assert (alone.returncode, node_0.returncode, command.returncode) == (0, 0, 0), messages
    assert texts(found) == texts(expected) and len(texts(found)) == len(PROMPTS)
    assert f"--nnodes 2 --master-addr {first.address}" in messages


def texts(lines: str) -> list[Any]:
    """Everything of results but times."""
    kept = ("id", "token_ids", "finish_reason", "acceptance_length", "num_verify_steps")
    return [{name: json.loads(line)[name] for name in kept} for line in lines.splitlines()]


# What is lost


class Watch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def lost_while_it_runs(llm: LLM, lose: Any) -> tuple[str, float]:
    """The error of a request that runs while something is lost, and how long it took."""
    stream = llm.submit(PROMPTS[0], LONG)
    next(iter(stream))
    lose()
    watch = Watch()
    error = stream.result(timeout_s=60).error or ""
    return error, watch.elapsed_s


@pytest.mark.parametrize(
    ("number", "found"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "was stopped by a signal such as")]
)
def test_a_remote_rank_that_is_lost_is_named_and_ends_its_nodes_command(
    cluster: Any, engines: dict[int, EngineDir], number: int, found: str
) -> None:
    (_, other), master = cluster
    with ranks_on(other, engines[4].path, master) as command, open_llm(engines[4], **over_nodes(master)) as llm:
        processes = children(command.pid)
        error, elapsed_s = lost_while_it_runs(llm, lambda: os.kill(processes[1], number))
        assert "rank 3 of 4 failed: its process " + found in error and "(node 1)" in error
        assert "Start the engine on every node again" in error
        assert elapsed_s < 15
        code, messages = said(command)
        assert code == 1 and f"error: rank 3 failed: its process {found}" in messages
        outputs = llm.generate(PROMPTS, SAMPLING)
        assert all("rank 3 of 4 failed" in (output.error or "") for output in outputs)
        assert llm.failure is not None and "rank 3 of 4" in llm.failure
    wait_for(lambda: not alive(processes))


def test_a_node_whose_command_is_killed_is_named(cluster: Any, engines: dict[int, EngineDir]) -> None:
    (_, other), master = cluster
    with ranks_on(other, engines[2].path, master) as command, open_llm(engines[2], **over_nodes(master)) as llm:
        processes = children(command.pid)
        error, elapsed_s = lost_while_it_runs(llm, command.kill)
        assert f"rank 1 of 2 failed: its node {other.address} closed the connection" in error and elapsed_s < 15
    wait_for(lambda: not alive(processes))


def test_a_command_that_is_interrupted_says_so_to_node_0(cluster: Any, engines: dict[int, EngineDir]) -> None:
    (_, other), master = cluster
    with ranks_on(other, engines[2].path, master) as command, open_llm(engines[2], **over_nodes(master)) as llm:
        processes = children(command.pid)
        error, elapsed_s = lost_while_it_runs(llm, lambda: command.send_signal(signal.SIGTERM))
        assert "rank 1 of 2 failed: the command of its node was ended (node 1)" in error and elapsed_s < 15
        assert said(command)[0] == 143
    wait_for(lambda: not alive(processes))


def test_an_unplugged_node_is_named_and_gives_up_by_itself(cluster: Any, engines: dict[int, EngineDir]) -> None:
    """Neither side is told anything: packets are lost."""
    (_, other), master = cluster
    with ranks_on(other, engines[2].path, master) as command, open_llm(engines[2], **over_nodes(master)) as llm:
        processes, watch = children(command.pid), Watch()
        try:
            error, elapsed_s = lost_while_it_runs(llm, other.unplug)
            assert f"rank 1 of 2 failed: its node {other.address} has been silent for 20 s" in error
            assert elapsed_s < 40
            code, messages = said(command)
            assert code == 1 and ("error: node 0 at " in messages or "error: rank 1 failed" in messages)
            assert watch.elapsed_s < 45
        finally:
            other.plug_in()
    wait_for(lambda: not alive(processes))


def test_a_node_that_is_unplugged_between_two_requests_is_named_by_the_next(
    cluster: Any, engines: dict[int, EngineDir]
) -> None:
    (_, other), master = cluster
    with ranks_on(other, engines[2].path, master) as command, open_llm(engines[2], **over_nodes(master)) as llm:
        llm.generate(PROMPTS[:1], LONG)
        other.unplug()
        try:
            watch = Watch()
            assert said(command)[0] == 1 and watch.elapsed_s < 30
            [output] = llm.generate(PROMPTS[:1], LONG)
            assert "rank 1 of 2 failed" in (output.error or "") and watch.elapsed_s < 40
        finally:
            other.plug_in()


def test_a_node_0_that_is_killed_ends_the_other_nodes_command(cluster: Any, engines: dict[int, EngineDir]) -> None:
    (first, other), _ = cluster
    options = {"device": "cpu", "num_threads": 1, "kv_cache_bytes": KV_CACHE_BYTES} | over_nodes(first.address)
    opening = f"from dflash_trt import LLM; llm = LLM({str(engines[4].path)!r}, **{options})"
    program = f"{opening}; print('open', flush=True); input()"
    with ranks_on(other, engines[4].path, first.address) as command:
        node_0 = on_node(first, "-c", program)
        assert node_0.stdout is not None and node_0.stdout.readline() == "open\n"
        processes, watch = [*children(command.pid), *children(node_0.pid)], Watch()
        assert len(processes) == 3
        node_0.kill()
        node_0.communicate()
        code, messages = said(command)
        assert code == 1 and f"error: node 0 at {first.address}:{PORT}: expected an open connection" in messages
        assert watch.elapsed_s < 15
    wait_for(lambda: not alive(processes))
