"""Commands that serve an engine on several nodes, of Slurm or of Open MPI.

An engine of backend tensorrt_llm runs under trtllm-llmapi-launch and MPI: as many processes as ranks, all with one
command (source: examples/llm-api/llm_mgmn_trtllm_serve.sh of TensorRT-LLM). One of ours has a process for each node,
which starts its ranks.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.errors import ConfigError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.provenance import CONTAINER, LLM_ARGS_NAME, TARGET_DIR


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """`directory` is the engine's, at the same path on every node."""

    directory: Path
    backend: str
    num_ranks: int
    gpus_per_node: int
    port: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.gpus_per_node

    def launch(self) -> list[str]:
        """TensorRT-LLM's command of every rank, in the engine's directory."""
        serve = ["trtllm-serve", "serve", TARGET_DIR, "--config", LLM_ARGS_NAME]
        return [
            "trtllm-llmapi-launch",
            *serve,
            *("--gpus_per_node", str(self.gpus_per_node), "--host", "0.0.0.0", "--port", str(self.port)),
        ]


def nodes_of(engine: EngineDir, *, gpus_per_node: int, port: int) -> Nodes:
    """Raises ConfigError: the engine's ranks do not fill the nodes."""
    num_ranks, backend = engine.manifest.pretrained_config.mapping.world_size, engine.manifest.backend
    if num_ranks % gpus_per_node:
        hint = "Ranks fill whole nodes; build with another --tp-size, or pass --gpus-per-node."
        expected = f"a divisor of {num_ranks}, the engine's ranks"
        raise ConfigError.about("--gpus-per-node", expected=expected, found=str(gpus_per_node), hint=hint)
    directory = engine.path.absolute()
    return Nodes(directory=directory, backend=backend, num_ranks=num_ranks, gpus_per_node=gpus_per_node, port=port)


def slurm_line(nodes: Nodes, *, image: str | None = None) -> str:
    """A line for the shell. An image is for a cluster with the container plugin pyxis.

    Raises:
        ConfigError: one node is enough for an engine of ours.
    """
    if nodes.backend == "tensorrt_llm":
        return shlex.join(
            [*_srun(nodes, num_tasks=nodes.num_ranks, image=image or CONTAINER, mpi=True), *nodes.launch()]
        )
    if nodes.num_nodes == 1:
        hint = "One node is enough: run `dflash-trt serve` there."
        expected = f"fewer than {nodes.num_ranks}, the engine's ranks"
        raise ConfigError.about("--gpus-per-node", expected=expected, found=str(nodes.gpus_per_node), hint=hint)
    srun = _srun(nodes, num_tasks=nodes.num_nodes, image=image, mpi=False)
    return f"{shlex.join([*srun, 'sh', '-c', _node_script(nodes), 'sh'])} {_FIRST_NODE}"


# The shell of the batch script replaces it: a container has no scontrol.
_FIRST_NODE = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'


def _node_script(nodes: Nodes) -> str:
    """What each node runs, with the first node's name as $1."""
    directory = shlex.quote(str(nodes.directory))
    joined = f'--nnodes {nodes.num_nodes} --master-addr "$1"'
    serve = f"exec dflash-trt serve {directory} --host 0.0.0.0 --port {nodes.port} {joined}"
    ranks = f'exec dflash-trt ranks {directory} --node-rank "$SLURM_NODEID" {joined}'
    return f'if [ "$SLURM_NODEID" = 0 ]; then {serve}; else {ranks}; fi'


def _srun(nodes: Nodes, *, num_tasks: int, image: str | None, mpi: bool) -> list[str]:
    directory = nodes.directory
    container = [f"--container-image={image}", f"--container-mounts={directory}:{directory}"]
    return [
        *("srun", "--label", *(["--mpi=pmix"] if mpi else []), f"--nodes={nodes.num_nodes}", f"--ntasks={num_tasks}"),
        *(f"--ntasks-per-node={num_tasks // nodes.num_nodes}", f"--gpus-per-node={nodes.gpus_per_node}"),
        *([] if image is None else [*container, f"--container-workdir={directory}"]),
    ]


def mpi_command(nodes: Nodes, hosts: Sequence[str]) -> list[str]:
    """For Open MPI, on hosts that have TensorRT-LLM.

    Raises:
        ConfigError: an engine of ours, or not as many hosts as nodes.
    """
    if nodes.backend != "tensorrt_llm":
        hint = "Start `dflash-trt serve` on the first node and `dflash-trt ranks` on each other."
        raise ConfigError.about("engine", expected="backend tensorrt_llm", found=nodes.backend, hint=hint)
    if len(hosts) != nodes.num_nodes or len(set(hosts)) != len(hosts):
        expected = f"{nodes.num_nodes} names, for {nodes.num_ranks} ranks on {nodes.gpus_per_node} GPUs each"
        raise ConfigError.about("--hosts", expected=expected, found=", ".join(hosts) or "none")
    slots = ",".join(f"{host}:{nodes.gpus_per_node}" for host in hosts)
    return ["mpirun", "-n", str(nodes.num_ranks), "--host", slots, "-wdir", str(nodes.directory), *nodes.launch()]
