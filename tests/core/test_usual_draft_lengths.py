"""The table of K that an engine takes where no K is named."""

import pytest

from dflash_trt.core.draft_lengths import CpuWeights, draft_lengths, lengths_text, usual_draft_lengths


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("most", "max_batch_size"), [(1, 1), (3, 64), (7, 64), (15, 512), (15, 1)])
def test_k_falls_as_requests_grow(most: int, max_batch_size: int, device: str) -> None:
    table = usual_draft_lengths(most, max_batch_size, device)  # type: ignore[arg-type]
    lengths = list(table.values())
    assert table[1] == (min(most, 5) if device == "cpu" else most) and lengths == sorted(set(lengths), reverse=True)
    assert all(1 <= size <= max_batch_size for size in table)
    assert draft_lengths(lengths_text(table)) == table, "as --draft-length takes it"


@pytest.mark.parametrize(
    ("weights", "expected"), [("float", {1: 5, 2: 3, 8: 0}), ("int8", {1: 5, 4: 4}), ("four_bits", {1: 3, 2: 2, 4: 0})]
)
def test_a_cpu_takes_what_was_measured(weights: CpuWeights, expected: dict[int, int]) -> None:
    assert usual_draft_lengths(7, 64, "cpu", weights=weights) == expected
    assert usual_draft_lengths(1, 1, "cpu", weights=weights) == {1: 1}
    assert usual_draft_lengths(15, 512, "cuda", weights=weights) == usual_draft_lengths(15, 512, "cuda")


def test_a_gpu_stops_drafting_late() -> None:
    gpu = usual_draft_lengths(15, 512, "cuda")
    assert set(gpu.values()) <= {15, 7, 3, 1, 0}, "few graphs"
    assert min(size for size, length in gpu.items() if length < 15) > 2
    assert min(size for size, length in gpu.items() if length < 3) > 64
