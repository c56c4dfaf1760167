"""The address of a worker's sockets, at which its front end reaches it.

Where none is named, Dynamo takes the address of some interface. A worker of ours takes loopback, or is refused where
its front end would not find it there. In Kubernetes the address is the pod's, which Dynamo finds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import AddressValueError, IPv4Address
from typing import Final

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.dynamo.environment import ADDRESSES, LOOPBACK
from dflash_trt.servers.dynamo.settings import WorkerSettings

_HOST: Final = "DYN_TCP_RPC_HOST"
_BROKER: Final = "DYN_ZMQ_BROKER_URL"
_DEFAULTS: Final = {
    "DYN_SYSTEM_PORT": "0",  # a free one: the front end reads the model card there
    # Without its lease a worker ends, and waits for requests that it had; their connections may be dead (default: 900).
    "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30",
}


def host_of_worker(settings: WorkerSettings, environment: Mapping[str, str]) -> str | None:
    """The address that the settings or Dynamo's variable name, else loopback; None leaves it to Dynamo.

    Raises:
        ConfigError: the front end would not reach the worker there, or the worker would listen elsewhere, too.
    """
    if settings.host is None and settings.discovery_backend == "kubernetes":
        return None
    host = settings.host or environment.get(_HOST)
    if host is None and settings.discovery_backend == "etcd":
        hint = f"Pass an address of this machine that the front end reaches, or {LOOPBACK} if all run on this machine."
        raise ConfigError.about("--discovery-backend etcd", expected="--host as well", found="none", hint=hint)
    host = host or LOOPBACK
    if not _is_own_address(host):
        raise ConfigError.about("--host", expected="an IPv4 address of this machine, other than 0.0.0.0", found=host)
    if IPv4Address(host).is_loopback and _has_publishers(settings, environment):
        raise ConfigError.about(
            "--event-plane zmq",
            expected=f"a broker in {_BROKER} for a worker at {host}",
            found="none, so that Dynamo's publishers would listen on every interface",
            hint="Pass --event-plane nats, or --host with an address of the network.",
        )
    return host


def own_address() -> str:
    """The address of a worker for which none was named: Dynamo's variable, or the one that the host's name has."""
    with suppress(OSError):  # a name without an address, in a container
        return os.environ.get(_HOST) or socket.gethostbyname(socket.gethostname())
    return LOOPBACK


def notices(settings: WorkerSettings, environment: Mapping[str, str]) -> list[str]:
    """What a user may not expect of a worker at `settings.host`."""
    host, found = settings.host, []
    if host is not None and IPv4Address(host).is_loopback and settings.discovery_backend == "etcd":
        found.append(f"--host {host}: only a front end on this machine reaches this worker")
    if host is not None and _has_publishers(settings, environment):
        found.append("--event-plane zmq: Dynamo's publishers listen on every interface; with nats there are none")
    return found


def worker_environment(host: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with all sockets at `host`, except those whose variables are set."""
    return dict.fromkeys(ADDRESSES, host) | _DEFAULTS | dict(base) | {_HOST: host}


def _has_publishers(settings: WorkerSettings, environment: Mapping[str, str]) -> bool:
    return settings.event_plane == "zmq" and _BROKER not in environment


def _is_own_address(host: str) -> bool:
    try:
        address = IPv4Address(host)
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (AddressValueError, OSError):
        return False
    return not address.is_unspecified
