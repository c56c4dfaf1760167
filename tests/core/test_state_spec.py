"""State of layers: shapes, bytes, what each rank holds of it, and the groups of its pages."""

from dataclasses import replace

import pytest

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.state_spec import (
    EngineStates,
    PagedKv,
    PagedLatent,
    PagedRows,
    Recurrent,
    SharedKv,
    page_group_of,
    paged,
)

TWO = Mapping(world_size=2, tp_size=2)
FULL = PagedKv(name="full", num_kv_heads=4, head_dim=16, dtype="bfloat16")
NARROW = replace(FULL, name="narrow", window=32)
WIDE = replace(FULL, name="wide", window=512, dtype="float8_e4m3fn")
SHARED = SharedKv(name="shared", source=NARROW)
LATENT = PagedLatent(name="latent", latent_dim=24, rope_dim=8, dtype="bfloat16")
ROWS = PagedRows(name="rows", width=40, dtype="float32")
DELTA = Recurrent(
    name="delta",
    num_key_heads=2,
    num_value_heads=6,
    key_head_dim=8,
    value_head_dim=16,
    conv_size=4,
    num_records=5,
    dtype="bfloat16",
)
STATES = EngineStates(target=(FULL, NARROW, SHARED, LATENT, DELTA), draft=(WIDE, ROWS))


def test_pages_have_a_key_and_a_value_of_every_head_or_a_latent_or_a_row() -> None:
    assert [state.page_shape(32) for state in (FULL, LATENT, ROWS)] == [(2, 32, 4, 16), (32, 32), (32, 40)]
    assert [state.bytes_per_token for state in STATES] == [256, 256, 0, 64, 0, 128, 160]
    assert STATES.bytes_per_token == 864 and STATES.replicated_bytes_per_token == 64
    assert paged(STATES) == (FULL, NARROW, LATENT, WIDE)


def test_a_slot_has_the_parts_of_a_gated_delta_net_in_their_own_dtypes() -> None:
    assert DELTA.num_channels == 2 * 2 * 8 + 6 * 16
    assert DELTA.tensors() == {
        "state": ((6, 8, 16), "float32"),
        "keys": ((5, 2, 8), "float32"),
        "deltas": ((5, 6, 16), "float32"),
        "decays": ((5, 6), "float32"),
        "window": ((4 - 1 + 5, 128), "bfloat16"),
        "position": ((), "int32"),
    }
    num_bytes = 4 * (6 * 8 * 16 + 5 * 2 * 8 + 5 * 6 * 16 + 5 * 6) + 2 * 8 * 128 + 4
    assert [state.bytes_per_slot for state in STATES] == [0, 0, 0, 0, num_bytes, 0, 0]
    assert STATES.bytes_per_slot == num_bytes and STATES.is_recurrent
    assert not EngineStates(target=STATES.draft).is_recurrent


def test_ranks_divide_heads_and_hold_latents_and_rows_whole() -> None:
    half = replace(FULL, num_kv_heads=2), replace(NARROW, num_kv_heads=2), replace(WIDE, num_kv_heads=2)
    shard = STATES.shard(TWO)
    assert shard.target[:4] == (half[0], half[1], SharedKv(name="shared", source=half[1]), LATENT)
    assert shard.target[4] == replace(DELTA, num_key_heads=1, num_value_heads=3)
    assert shard.draft == (half[2], ROWS)
    assert STATES.shard(Mapping()) == STATES


@pytest.mark.parametrize(("max_positions", "windows"), [(32, ()), (33, (32,)), (512, (32,)), (513, (32, 512))])
def test_a_window_that_sequences_outgrow_has_pages_of_its_own(max_positions: int, windows: tuple[int, ...]) -> None:
    """A layer that shares pages is in their group; all others are in the first."""
    assert STATES.windows(max_positions) == windows
    groups = [page_group_of(state, windows) for state in STATES]
    narrow, wide = (1 + windows.index(window) if window in windows else 0 for window in (32, 512))
    assert groups == [0, narrow, narrow, 0, 0, wide, 0]
    of_groups = [STATES.bytes_per_token_of(window, windows) for window in (None, *windows)]
    assert of_groups == [864 - sum((256, 128)[: len(windows)]), *(256, 128)[: len(windows)]]
    assert [state.window for state in STATES] == [None, 32, None, None, None, 512, None]
