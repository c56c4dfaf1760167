"""What `build --check` prints of a report."""

from types import SimpleNamespace
from typing import Any

from dflash_trt.cli import check
from dflash_trt.core.config import BuildConfig


def report() -> Any:
    sizes = SimpleNamespace(min=1, opt=4, max=9)
    built = SimpleNamespace(
        tensorrt_version="1.2",
        plugins="layers",
        num_layers=7,
        layer_counts={"ELEMENTWISE": 5},
        inputs=("token_ids [T]",),
        outputs=("emitted_tokens [R]",),
        profiles=(SimpleNamespace(name="decode", axes={"T": sizes}),),
        flags=("REFIT",),
        plan_bytes=1000,
        build_time_s=1.25,
        peak_memory_bytes=2000,
        warnings=("slow",),
    )
    limits = BuildConfig(target="t")
    return SimpleNamespace(built=built, compute_capability="9.0", limits=limits, notes=("an override",))


def test_the_sizes_of_an_axis_rise_and_every_note_and_warning_is_printed(capsys) -> None:
    fields = check.describe(report())
    assert fields["profiles"] == {"decode": {"T": [1, 4, 9]}}
    check._print(fields)
    printed = capsys.readouterr().out
    for words in ("1 .. 4 .. 9", "note: slow", "note: an override", "flags: REFIT", "for 9.0", "plan: 1.0 kB"):
        assert words in printed
