"""Fake trees of /proc and /sys: what containers show of cgroup v1 and v2."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from dflash_trt.core.host_resources import available_cores, available_memory_bytes, total_memory_bytes
from dflash_trt.executor import threads

GIB = 1 << 30
HOST_BYTES, HOST_CORES = 1024 * GIB, 64
NO_LIMIT_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=HOST_BYTES, total=2 * HOST_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(HOST_CORES)), raising=False)


def _tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """`files` by their path below /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_a_host_without_cgroups_has_all_of_itself(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) == HOST_BYTES
    assert available_cores(tmp_path) == HOST_CORES
    assert total_memory_bytes() == 2 * HOST_BYTES


def test_a_pod_of_v2_sees_its_limits_at_the_root_of_the_mount(tmp_path: Path) -> None:
    files = {
        "memory.max": str(8 * GIB),
        "memory.high": "max",
        "memory.current": str(3 * GIB),
        "memory.stat": f"anon {2 * GIB}\nactive_file 5\ninactive_file {GIB}",
        "cpu.max": "400000 100000",
    }
    root = _tree(tmp_path, "0::/", files)
    assert available_memory_bytes(root) == 6 * GIB  # cache that can be dropped is not used up
    assert available_cores(root) == 4


def test_a_pod_of_v1_sees_its_limits_though_its_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(8 * GIB),
        "memory/memory.usage_in_bytes": str(3 * GIB),
        "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
        "cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    cgroup = "5:cpu,cpuacct:/docker/0123\n4:memory:/docker/0123\n1:name=systemd:/docker/0123"
    root = _tree(tmp_path, cgroup, files)
    assert available_memory_bytes(root) == 6 * GIB
    assert available_cores(root) == 3


@pytest.mark.parametrize(("own", "left_gib", "cores"), [("max", 3, 4), ("2", 2, 2), ("16", 3, 4)])
def test_the_tightest_cgroup_of_all_that_contain_a_process_counts(
    tmp_path: Path, own: str, left_gib: int, cores: int
) -> None:
    files = {
        "a.slice/memory.max": str(4 * GIB),
        "a.slice/memory.current": str(GIB),
        "a.slice/cpu.max": "400000 100000",
        "a.slice/b.service/memory.max": own if own == "max" else str(int(own) * GIB),
        "a.slice/b.service/memory.current": "0",
        "a.slice/b.service/cpu.max": f"{own if own == 'max' else own + '00000'} 100000",
    }
    root = _tree(tmp_path, "0::/a.slice/b.service", files)
    assert available_memory_bytes(root) == left_gib * GIB
    assert available_cores(root) == cores


def test_a_soft_limit_of_v2_counts_too(tmp_path: Path) -> None:
    files = {"memory.max": str(8 * GIB), "memory.high": str(5 * GIB), "memory.current": "0"}
    assert available_memory_bytes(_tree(tmp_path, "0::/", files)) == 5 * GIB


def test_no_limits_are_no_limits_and_a_hybrid_host_has_its_limits_in_v1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": str(GIB),
        "memory/box/memory.limit_in_bytes": str(2 * GIB),
        "memory/box/memory.usage_in_bytes": "0",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "unified/cgroup.procs": "1",
    }
    assert available_memory_bytes(_tree(tmp_path, "4:memory:/\n1:cpu:/\n0::/", files)) == HOST_BYTES
    assert available_cores(tmp_path) == HOST_CORES
    assert available_memory_bytes(_tree(tmp_path, "4:memory:/box\n1:cpu:/\n0::/", files)) == 2 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("150000", 1), ("250000", 2), ("12800000", HOST_CORES)])
def test_a_fraction_of_a_core_is_not_a_thread(tmp_path: Path, quota: str, cores: int) -> None:
    assert available_cores(_tree(tmp_path, "0::/", {"cpu.max": f"{quota} 100000"})) == cores


def test_memory_beyond_the_limit_is_none_at_all(tmp_path: Path) -> None:
    files = {"memory.max": str(GIB), "memory.current": str(2 * GIB)}
    assert available_memory_bytes(_tree(tmp_path, "0::/", files)) == 0


def test_affinity_counts_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert available_cores(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    monkeypatch.setattr(psutil, "cpu_count", lambda: 10)
    assert available_cores(tmp_path) == 10


@pytest.mark.parametrize(("set_to", "cores", "num_ranks", "expected"), [(16, 6, 1, 6), (16, 6, 4, 1), (2, 6, 2, 2)])
def test_threads_are_an_even_share_of_the_cores_and_never_more_than_pytorch_was_set_to(
    monkeypatch: pytest.MonkeyPatch, set_to: int, cores: int, num_ranks: int, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to)
    monkeypatch.setattr(threads, "available_cores", lambda: cores)
    assert threads.default_num_threads(num_ranks) == expected
