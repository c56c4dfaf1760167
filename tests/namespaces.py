"""Machines of a cluster as network namespaces of this one: an address on a common bridge, a loopback of its own."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

import pytest

_BRIDGES = count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@dataclass(frozen=True)
class Node:
    """What runs in it sees its own interfaces only."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a process of this node: `ip` becomes it, so that pid and signals are its own."""
        return ["ip", "netns", "exec", self.name, *argv]

    def unplug(self) -> None:
        """The cable is out: packets to and from the node are lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up")


@contextmanager
def network(num_nodes: int) -> Iterator[tuple[list[Node], str]]:
    """Nodes, and the address of this machine on their network. Skips the test where namespaces are not allowed."""
    bridge = f"df{os.getpid() % 100_000}b{next(_BRIDGES)}"
    subnet = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    with ExitStack() as cleanup:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            cleanup.callback(_ip, "link", "del", bridge)
            _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            nodes = [Node(f"{bridge}n{index}", f"{subnet}.{index + 1}") for index in range(num_nodes)]
            for node in nodes:
                _add(node, bridge, cleanup)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield nodes, f"{subnet}.254"


def _add(node: Node, bridge: str, cleanup: ExitStack) -> None:
    _ip("netns", "add", node.name)
    cleanup.callback(_ip, "netns", "del", node.name)
    outside = node.name.replace("n", "v")
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", node.name)
    cleanup.callback(_ip, "link", "del", outside)
    _ip("link", "set", outside, "master", bridge, "up")
    _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
    for interface in ("eth0", "lo"):
        _ip("-n", node.name, "link", "set", interface, "up")
