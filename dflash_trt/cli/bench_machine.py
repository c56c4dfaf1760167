"""`dflash-trt bench machine`, and the machine file of other measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.help_text import COUNT, PATH, examples
from dflash_trt.cli.other_engines import Choice
from dflash_trt.cli.time_left import TimeLeft
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_trt.bench.roofline import Roofs
    from dflash_trt.plan.machine_file import MachineFile
    from dflash_trt.serving.prompts import Prompt

MACHINE = click.option(
    "--machine",
    type=PATH,
    metavar="FILE",
    help="Machine file of `bench machine`, for step floors (default: measure copies and matrix products now).",
)


@click.command(
    short_help="Measure this machine, for plan --sweep and for floors.",
    epilog=examples("dflash-trt bench machine -o machine.json", "dflash-trt bench machine --num-threads 1"),
)
@click.option("-o", "--output", type=PATH, metavar="FILE", help="File to write (default: stdout).")
@click.option("--name", metavar="TEXT", help="Name of the machine (default: its GPU or processor).")
@click.option(
    "--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device to measure."
)
@click.option("--num-threads", type=COUNT, help="Threads on a CPU (default: as for engines).")
def machine(output: Path | None, name: str | None, device: str, num_threads: int | None) -> None:
    """Measure copies, matrix products, the host, and the steps of small engines with random weights.

    The file has numbers with their units, and can be edited: link_bytes_per_s is for ranks, which one device cannot
    measure. On a CPU with one thread times are CPU times, so that other processes disturb less.
    """
    from dflash_trt.bench.machine import measure_machine

    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise ConfigError.about("--output", expected="a file in a directory that exists", found=str(output))
    chosen = _device(device, num_threads)
    found = measure_machine(name or machine_name(), chosen, TimeLeft())
    if output is None:
        click.echo(found.text(), nl=False)
        return
    output.write_text(found.text())
    click.echo(f"{output}: {found.name}, {found.copy_bytes_per_s / 1e9:.4g} GB/s copied", err=True)


def read_machine(path: Path | None) -> "MachineFile | None":
    """The file, before minutes of measurement. Raises ConfigError."""
    from dflash_trt.plan.machine_file import read_machine_file

    return None if path is None else read_machine_file(path)


def roofs_of(engine_dir: Path, machine: "MachineFile | None", config: RuntimeConfig) -> "Roofs":
    """Floors of the engine on this machine, or on the one at hand, whose roofs are measured now."""
    from dflash_trt.bench.roofline import Roofs
    from dflash_trt.engine_dir import EngineDir

    return Roofs(EngineDir.open(engine_dir), machine or measure_now(config))


def context_len_of(engine_dir: Path, prompts: "Sequence[Prompt]", mean_output_tokens: float) -> int:
    """Context length of a request half way through its answer, on average."""
    from dflash_trt.bench.roofline import mean_context_len
    from dflash_trt.bench.throughput import prompt_reader
    from dflash_trt.engine_dir import EngineDir

    reader = prompt_reader(EngineDir.open(engine_dir))
    return mean_context_len([len(reader.read(prompt)) for prompt in prompts], mean_output_tokens)


def machine_name() -> str:
    """Name of this machine, without its owner's names."""
    from dflash_trt.doctor.machine import gpus
    from dflash_trt.doctor.machine import machine as host

    names = [gpu["name"] for gpu in gpus()]
    return names[0] if names else f"{host()['processor']}, {host()['num_cores']} cores"


def measure_now(config: RuntimeConfig) -> "MachineFile":
    """The roofs of the machine at hand, with the device and the threads of the engine."""
    from dflash_trt.executor.threads import run_in_thread

    def measured() -> "MachineFile":
        device = _device(config.device, config.num_threads)
        from dflash_trt.bench.machine import measure_roofs

        return measure_roofs(machine_name(), device)

    return run_in_thread(measured)  # and its team of OpenMP's ends with it: idle threads would disturb what comes next


def _device(device: str, num_threads: int | None) -> Any:
    """A torch.device. Raises ConfigError: there is no GPU."""
    from dflash_trt.core.process import let_threads_sleep

    let_threads_sleep()  # before PyTorch is imported
    from dflash_trt.bench.machine import device_at_hand

    return device_at_hand(device, num_threads)
