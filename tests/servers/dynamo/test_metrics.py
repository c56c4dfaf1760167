"""Metrics of a replica, in the words of benchmark clients."""

import pytest

from tests.servers.dynamo.serving import Server


def test_the_acceptance_of_all_requests_is_a_gauge_that_aiperf_reads(server: Server) -> None:
    for index in range(6):
        answer = server.post("completions", prompt=f"def measured_{index}(x):\n", max_tokens=30, temperature=0)
        assert answer.status_code == 200
    for replica in range(server.num_replicas):
        blocks, drafts, accepted = (
            server.metric(f"dflash_trt:{name}_total", replica) or 0.0
            for name in ("verify_blocks", "draft_tokens", "accepted_tokens")
        )
        if blocks:
            assert server.metric("trtllm:spec_accept_length", replica) == pytest.approx(1 + accepted / blocks)
            assert server.metric("trtllm:spec_accept_rate", replica) == pytest.approx(accepted / drafts)
    assert server.total("dflash_trt:verify_blocks_total")


def test_ended_requests_are_counted_and_no_page_stays_in_use(server: Server) -> None:
    before = server.total("dflash_trt:output_tokens_total")
    answer = server.post("completions", prompt="counted = ", max_tokens=7, ignore_eos=True)
    assert server.total("dflash_trt:output_tokens_total") - before == answer.json()["usage"]["completion_tokens"] == 7
    assert server.total("dflash_trt:pages_in_use") == 0
    assert server.total("dflash_trt:pages") > 0
