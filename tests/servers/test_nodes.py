"""Commands that serve an engine of TensorRT-LLM on several nodes, word by word."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.nodes import Nodes, mpi_command, nodes_of, slurm_command

SERVE = (
    "trtllm-llmapi-launch trtllm-serve serve target --config llm_args.yaml --gpus_per_node 4 --host 0.0.0.0 --port 9"
)


def engine(num_ranks: int, backend: str = "tensorrt_llm") -> Any:
    mapping = SimpleNamespace(mapping=SimpleNamespace(world_size=num_ranks))
    return SimpleNamespace(path=Path("/e"), manifest=SimpleNamespace(backend=backend, pretrained_config=mapping))


@pytest.fixture
def nodes() -> Nodes:
    return nodes_of(engine(12), gpus_per_node=4, port=9)


def test_ranks_fill_the_nodes_of_slurm(nodes: Nodes) -> None:
    assert " ".join(slurm_command(nodes, image="image")) == (
        "srun --label --mpi=pmix --nodes=3 --ntasks=12 --ntasks-per-node=4 --gpus-per-node=4 --container-image=image "
        f"--container-mounts=/e:/e --container-workdir=/e {SERVE}"
    )


def test_ranks_fill_the_hosts_of_mpi(nodes: Nodes) -> None:
    command = mpi_command(nodes, ["a", "b", "c"])
    assert " ".join(command) == f"mpirun -n 12 --host a:4,b:4,c:4 -wdir /e {SERVE}"
    for hosts in (["a", "b"], ["a", "b", "c", "d"], ["a", "b", "b"], []):
        with pytest.raises(ConfigError, match=f"--hosts: expected 3 names, .*found {', '.join(hosts) or 'none'}"):
            mpi_command(nodes, hosts)


def test_what_does_not_fill_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus-per-node: expected a divisor of 6, the engine's ranks, found 4"):
        nodes_of(engine(6), gpus_per_node=4, port=9)
    with pytest.raises(ConfigError, match="engine: expected backend tensorrt_llm, found torch"):
        nodes_of(engine(4, "torch"), gpus_per_node=4, port=9)
