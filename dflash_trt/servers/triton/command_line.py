"""Options that every tritonserver of a repository is started with."""

from pathlib import Path

LOOPBACK = "127.0.0.1"


def server_options(repository: Path) -> list[str]:
    """Listen on loopback alone, and take the config as it was written."""
    return [
        f"--model-repository={repository.resolve()}",
        "--disable-auto-complete-config",
        *(f"--{name}-address={LOOPBACK}" for name in ("http", "grpc", "metrics")),
    ]
