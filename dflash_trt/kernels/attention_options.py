"""Options of one layer's attention."""

from dataclasses import dataclass

from torch import Tensor

from dflash_trt.kernels.launch_rules import NO_CHUNK, NO_WINDOW, max_lag, max_lead


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention.

    `window`, `chunk`, `is_window_anchored` and `first_key` as in `core.model.gqa.AttentionMask`. `score_scale` defaults
    to D ** -0.5. `softcap` c turns a score s into c * tanh(s / c). `sinks` float32 [heads] are logits in the softmax's
    denominator that have no value. The other scales are for FP8 pages.

    `split_length`: keys of a split, instead of as many splits as fill the GPU. All rows then use tiles of one size, and
    a row's result depends only on its own position and keys, to the last bit.
    """

    window: int | None = None
    chunk: int | None = None
    is_causal: bool = True
    is_window_anchored: bool = False
    first_key: int = 0
    score_scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    split_length: int | None = None

    @property
    def max_lag(self) -> int:
        window, chunk = self.window or NO_WINDOW, self.chunk or NO_CHUNK
        return max_lag(window=window, chunk=chunk, is_window_anchored=self.is_window_anchored)

    @property
    def max_lead(self) -> int:
        is_anchored = self.is_window_anchored
        return max_lead(lag=self.max_lag, is_causal=self.is_causal, is_window_anchored=is_anchored)

    @property
    def window_step(self) -> int:
        return 0 if self.is_window_anchored else 1
