"""Environment of Dynamo's processes on one machine: sockets on loopback, files in one directory.

The names are Dynamo's. Variables that the user has set stay, except addresses.
"""

import os
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
ADDRESSES = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST")
_LOG_FILTER = (  # refusals and stops are no errors; the line for each request (`request_span`) cannot be turned off
    "error,tower_http=off,dynamo_runtime::component=off,dynamo_runtime::storage=off,"
    "dynamo_llm::http=off,dynamo_llm::kv_router::indexer::recovery=off"
)
# Wait for the first chunk: a request that a worker refuses gets its HTTP status, streaming or not.
_ERROR_WINDOW_MS = "60000"


def local_environment(state: Path, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """For front end and workers; `state` is theirs alone."""
    environment = dict(os.environ if base is None else base)
    environment.setdefault("DYN_LOG", _LOG_FILTER)
    environment.setdefault("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")  # all end together
    environment.setdefault("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "1")
    environment.setdefault("HF_HUB_OFFLINE", "1")  # everything is here
    environment.setdefault("DYN_SDK_DISABLE_ANSI_LOGGING", "1")
    environment.setdefault("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", _ERROR_WINDOW_MS)
    xsub, xpub = event_addresses(state)
    return environment | {
        **dict.fromkeys(ADDRESSES, LOOPBACK),
        "TMPDIR": str(state),  # Dynamo leaves files of its logging there
        "DYN_FILE_KV": str(state / "registrations"),
        "DYN_ZMQ_BROKER_URL": f"xsub={xsub} , xpub={xpub}",  # without a broker each publisher listens everywhere
    }


def event_addresses(state: Path) -> tuple[str, str]:
    """Addresses that events are sent to and read from: Unix sockets."""
    return f"ipc://{state}/events-in", f"ipc://{state}/events-out"


def is_registered(state: Path, instance_id: str) -> bool:
    """True if the front end can route to this worker: both its instance and its model are registered.

    A worker that was paused for longer than its lease, ten seconds, loses both and never registers again.
    """
    return {"instances", "mdc"} <= {path.parent.name for path in _registrations(state, instance_id)}


def forget_worker(state: Path, instance_id: str) -> None:
    """Remove the registrations of a worker that died, which would last for its lease of ten seconds."""
    for path in _registrations(state, instance_id):
        path.unlink(missing_ok=True)


def _registrations(state: Path, instance_id: str) -> list[Path]:
    return list((state / "registrations").rglob(f"*{instance_id}*"))
