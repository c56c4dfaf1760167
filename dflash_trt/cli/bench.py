"""`dflash-trt bench`: what an engine does on this machine, measured."""

import click

from dflash_trt.cli.bench_host import host
from dflash_trt.cli.bench_machine import machine
from dflash_trt.cli.bench_serve import serve
from dflash_trt.cli.bench_speedup import speedup
from dflash_trt.cli.bench_throughput import throughput
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.other_engines import Group


@click.group(
    cls=Group,
    short_help="Measure drafters, throughput and servers.",
    epilog=examples("dflash-trt bench speedup engine --input-file prompts.jsonl"),
)
def bench() -> None:
    """Measure drafters, throughput, servers and this machine.

    Every report says its command, hardware and workload, and comes as text, --json or --csv.
    """


for command in (host, machine, serve, speedup, throughput):
    bench.add_command(command)
