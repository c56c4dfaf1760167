"""Pages of a window: as many as the positions of a request can touch, wherever they begin in a page."""

import pytest

from dflash_trt.core.step_plan import decode_pages


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_decoding_needs_the_pages_that_its_window_and_two_verify_blocks_touch_at_most(page_size: int) -> None:
    for window in range(1, 40):
        for max_draft_len in range(6):
            num_positions = window - 1 + 2 * (max_draft_len + 1)
            touched = [(start + num_positions - 1) // page_size - start // page_size + 1 for start in range(page_size)]
            assert decode_pages(window, page_size, max_draft_len) == max(touched), (window, max_draft_len)
