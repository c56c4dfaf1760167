"""Step floors for every closed-loop load that `bench serve` put on an engine."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.cli.bench_machine import measure_now, roofs_of
from dflash_trt.core.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from dflash_trt.bench.load_report import LoadReport
    from dflash_trt.bench.roofline import Roofline
    from dflash_trt.plan.machine_file import MachineFile

Engines = Mapping[str, tuple[Path, RuntimeConfig]]  # by the name of the server


def floors_beside(
    reports: "Sequence[LoadReport]", engines: Engines, machine: "MachineFile | None"
) -> Iterator["Roofline | None"]:
    """One floor per report. None for URLs, open-loop arrivals (unknown batch sizes) and unanswered loads.

    Without a machine file this machine is measured once, when the first engine comes.
    """
    from dflash_trt.bench.request_load import counted_clients
    from dflash_trt.bench.roofline import mean_context_len

    for report in reports:
        if report.server not in engines or report.concurrency is None or not report.num_requests:
            yield None
            continue
        engine_dir, runtime = engines[report.server]
        machine = machine or measure_now(runtime)
        mean_prompt, mean_output = (
            round(count / report.num_requests) for count in (report.num_prompt_tokens, report.num_output_tokens)
        )
        roofs = roofs_of(engine_dir, machine, runtime)
        yield roofs.beside(
            report.output_tok_per_s,
            num_requests=report.concurrency,
            context_len=mean_context_len([mean_prompt], mean_output),
            acceptance_length=report.acceptance.length if report.acceptance else None,
            num_draft_tokens=roofs.fixed_drafts(runtime),
            label=f"{report.server}, {counted_clients(report.concurrency)}",
        )
