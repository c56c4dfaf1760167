"""Commands that serve an engine on several nodes, word by word."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.nodes import Nodes, mpi_command, nodes_of, slurm_line

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
    assert slurm_line(nodes, image="image") == (
        "srun --label --mpi=pmix --nodes=3 --ntasks=12 --ntasks-per-node=4 --gpus-per-node=4 --container-image=image "
        f"--container-mounts=/e:/e --container-workdir=/e {SERVE}"
    )


def test_each_node_of_an_engine_of_ours_runs_a_command_of_its_own() -> None:
    ours = nodes_of(engine(16, "torch"), gpus_per_node=8, port=9)
    joined = '--nnodes 2 --master-addr "$1"'
    assert slurm_line(ours) == (
        "srun --label --nodes=2 --ntasks=2 --ntasks-per-node=1 --gpus-per-node=8 sh -c "
        f"""'if [ "$SLURM_NODEID" = 0 ]; then exec dflash-trt serve /e --host 0.0.0.0 --port 9 {joined}; """
        f"""else exec dflash-trt ranks /e --node-rank "$SLURM_NODEID" {joined}; fi' sh """
        """"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\""""
    )
    with pytest.raises(ConfigError, match="--gpus-per-node: expected fewer than 8, the engine's ranks, found 8"):
        slurm_line(nodes_of(engine(8, "torch"), gpus_per_node=8, port=9))


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
        mpi_command(nodes_of(engine(4, "torch"), gpus_per_node=4, port=9), ["a"])
