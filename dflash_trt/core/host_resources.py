"""Memory and cores that this process may use, within its CPU affinity and its cgroups (v1 and v2).

A process has the limits of its cgroup and of all its ancestors. In a container that sees its own cgroup as the root of
the mount, the path that the kernel names does not exist below the mount, and only the root counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")  # root of /proc and /sys


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can be allocated without swapping or exceeding a cgroup's limit."""
    free: int = psutil.virtual_memory().available
    return max(0, min([free, *_left_in_cgroups(root)]))


def total_memory_bytes() -> int:
    """Memory of the machine, whatever this process may use of it."""
    total: int = psutil.virtual_memory().total
    return total


def available_cores(root: Path = _ROOT) -> int:
    """Whole cores, at least 1. A quota of 2.5 cores is 2, because a third thread would throttle all three."""
    return max(1, int(min([_affinity(), *_cpu_quotas(root)])))


def _affinity() -> int:
    """Cores in the affinity mask, cpusets included. macOS has none."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes below each limit. File cache does not count as used, since the kernel drops it under pressure."""
    for directory in _cgroups(root, ""):
        limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(directory / name)) is not None]
        if limits:
            used = (_number(directory / "memory.current") or 0) - _statistic(directory, "inactive_file")
            yield min(limits) - used
    for directory in _cgroups(root, "memory"):
        limit = _number(directory / "memory.limit_in_bytes")  # no limit is a number beyond any memory
        if limit is not None:
            used = (_number(directory / "memory.usage_in_bytes") or 0) - _statistic(directory, "total_inactive_file")
            yield limit - used


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPU quotas in cores."""
    for directory in _cgroups(root, ""):
        quota, _, period = _text(directory / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for directory in _cgroups(root, "cpu"):
        limit, period_us = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
        if limit is not None and limit > 0 and period_us:  # -1: none
            yield limit / period_us


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroup and of all that contain it; "" is the controller of v2."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        # Several v1 controllers may share a mount that is named after all of them.
        mount = next((mounts / name for name in (controller, names) if (mounts / name).is_dir()), mounts)
        here = Path(path.lstrip("/"))
        yield from (directory for name in (here, *here.parents) if (directory := mount / name).is_dir())


def _statistic(directory: Path, name: str) -> int:
    fields = dict(line.split(" ", 1) for line in _text(directory / "memory.stat").splitlines())
    return int(fields.get(name, 0))


def _number(path: Path) -> int | None:
    """None for a file that is not there, and for "max"."""
    text = _text(path)
    return None if text in ("", "max") else int(text)


def _text(path: Path) -> str:
    """The file's text; empty where it is missing, as in a root cgroup or on another system."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
