"""Commands that serve a tensorrt_llm engine on several nodes: trtllm-llmapi-launch under MPI.

Source: examples/llm-api/llm_mgmn_trtllm_serve.sh of TensorRT-LLM. As many MPI processes as ranks, all with one command.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.tensorrt_llm_record import CONTAINER, LLM_ARGS_NAME, TARGET_DIR


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """`directory` is the engine's, at the same path on every node."""

    directory: Path
    num_ranks: int
    gpus_per_node: int
    port: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.gpus_per_node

    def launch(self) -> list[str]:
        """The command of every rank, in the engine's directory."""
        serve = ["trtllm-serve", "serve", TARGET_DIR, "--config", LLM_ARGS_NAME]
        return [
            "trtllm-llmapi-launch",
            *serve,
            *("--gpus_per_node", str(self.gpus_per_node), "--host", "0.0.0.0", "--port", str(self.port)),
        ]


def nodes_of(engine: EngineDir, *, gpus_per_node: int, port: int) -> Nodes:
    """Raises ConfigError: the engine is of another backend, or its ranks do not fill the nodes."""
    num_ranks, backend = engine.manifest.pretrained_config.mapping.world_size, engine.manifest.backend
    raise_all(ConfigError, "deploy", list(_problems(backend, num_ranks, gpus_per_node)))
    directory = engine.path.absolute()
    return Nodes(directory=directory, num_ranks=num_ranks, gpus_per_node=gpus_per_node, port=port)


def slurm_command(nodes: Nodes, *, image: str = CONTAINER) -> list[str]:
    """For a cluster with the container plugin pyxis."""
    directory = nodes.directory
    return [
        *("srun", "--label", "--mpi=pmix", f"--nodes={nodes.num_nodes}", f"--ntasks={nodes.num_ranks}"),
        *(f"--ntasks-per-node={nodes.gpus_per_node}", f"--gpus-per-node={nodes.gpus_per_node}"),
        *(f"--container-image={image}", f"--container-mounts={directory}:{directory}"),
        f"--container-workdir={directory}",
        *nodes.launch(),
    ]


def mpi_command(nodes: Nodes, hosts: Sequence[str]) -> list[str]:
    """For Open MPI, on hosts that have TensorRT-LLM.

    Raises:
        ConfigError: not as many hosts as nodes.
    """
    if len(hosts) != nodes.num_nodes or len(set(hosts)) != len(hosts):
        expected = f"{nodes.num_nodes} names, for {nodes.num_ranks} ranks on {nodes.gpus_per_node} GPUs each"
        raise ConfigError.about("--hosts", expected=expected, found=", ".join(hosts) or "none")
    slots = ",".join(f"{host}:{nodes.gpus_per_node}" for host in hosts)
    return ["mpirun", "-n", str(nodes.num_ranks), "--host", slots, "-wdir", str(nodes.directory), *nodes.launch()]


def _problems(backend: str, num_ranks: int, gpus_per_node: int) -> Iterator[str]:
    if backend != "tensorrt_llm":
        hint = "Start `dflash-trt serve` on the first node and `dflash-trt ranks` on each other."
        yield problem("engine", expected="backend tensorrt_llm", found=backend, hint=hint)
    if num_ranks % gpus_per_node:
        expected = f"a divisor of {num_ranks}, the engine's ranks"
        hint = "Ranks fill whole nodes; build with another --tp-size, or pass --gpus-per-node."
        yield problem("--gpus-per-node", expected=expected, found=str(gpus_per_node), hint=hint)
