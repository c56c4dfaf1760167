"""What `build --check` prints of a report."""

from types import SimpleNamespace
from typing import Any

from dflash_trt.backends.tensorrt.sizes import RankSizes
from dflash_trt.cli import check
from dflash_trt.engine_dir import EngineLimits


def report() -> Any:
    sizes = SimpleNamespace(min=1, opt=4, max=9)
    built = SimpleNamespace(
        tensorrt_version="1.2",
        num_layers=7,
        layer_counts={"ELEMENTWISE": 5},
        inputs=("token_ids [T]",),
        outputs=("emitted_tokens [R]",),
        profiles=(SimpleNamespace(name="decode", axes={"T": sizes}),),
        flags=("REFIT",),
        build_time_s=1.25,
        peak_memory_bytes=2000,
        warnings=("slow",),
    )
    other = SimpleNamespace(build_time_s=2.5, peak_memory_bytes=3000, warnings=("slow", "narrow"))
    limits = EngineLimits(max_batch_size=2, max_seq_len=8, max_num_tokens=16, max_draft_len=0, page_size=4)
    return SimpleNamespace(
        built={0: built, 1: other},
        layer_ids={"target": (0, 3), "draft": (0,)},
        num_layers={"target": 36, "draft": 1},
        sizes=RankSizes(weights_bytes=5000, plan_bytes=7000, kv_bytes_per_token=100, state_bytes_per_slot=300),
        compute_capability="9.0",
        limits=limits,
        notes=("an override",),
    )


def test_the_sizes_of_an_axis_rise_and_every_note_and_warning_is_printed(capsys) -> None:
    fields = check.describe(report())
    assert fields["profiles"] == {"decode": {"T": [1, 4, 9]}}
    assert (fields["build_time_s"], fields["warnings"], fields["ranks"]) == (3.75, ["slow", "narrow"], [0, 1])
    check._print(fields)
    printed = capsys.readouterr().out
    for words in (
        "target layers: 0, 3, one of each kind of 36",
        "draft layers: all 1",
        "ranks: 0, 1, which have different networks",
        "each rank: weights 5.0 kB, plan 7.0 kB and kernels, K/V 100 bytes per token, 1.6 kB for full batches, "
        "recurrent state 300 bytes per request",
        "check: 3.8 s, peak memory 3.0 kB",
        "TensorRT layers: 7 (5 elementwise, ...)",
        "1 .. 4 .. 9",
        "note: slow",
        "note: an override",
        "flags: REFIT",
        "for 9.0",
    ):
        assert words in printed
