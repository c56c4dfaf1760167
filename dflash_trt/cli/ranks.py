"""`dflash-trt ranks`: the ranks of one node, for an engine that is opened on another."""

from pathlib import Path

import click

from dflash_trt.cli.help_text import COUNT, PATH, examples


@click.command(
    short_help="Run a node's ranks of an engine that is opened on node 0.",
    epilog=examples("dflash-trt ranks engine --nnodes 2 --node-rank 1 --master-addr 10.0.0.1"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.option("--nnodes", type=click.IntRange(min=2), required=True, help="Machines that the ranks are on.")
@click.option("--node-rank", type=COUNT, required=True, help="Number of this node, from 1 on.")
@click.option("--master-addr", metavar="HOST", required=True, help="Address of node 0, as it is told there.")
@click.option(
    "--master-port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="Port of node 0, as there."
)
def ranks(engine_dir: Path, nnodes: int, node_rank: int, master_addr: str, master_port: int) -> None:
    """Run this node's ranks until node 0 closes the engine.

    Node 0 runs `dflash-trt run`, `serve` or `worker`, or LLM, with the same --nnodes, --master-addr and --master-port;
    all its other settings hold here, too. The engine may stand at another path, and is compared. DFLASH_TRT_SECRET has
    the same value on all nodes.
    """
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.ranks.node import Node

    Node(
        engine=EngineDir.open(engine_dir),
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
    ).run()
    click.echo("node 0 has closed the engine", err=True)
