"""EAGLE-3's additions to its one decoder layer, whose attention reads a token and a feature at once."""

from typing import Literal

from dflash_trt.core.frozen import Frozen
from dflash_trt.core.weight_spec import WeightSpec, WeightTable

FcNorm = Literal["none", "joint", "per_tap"]

MAX_CHAIN = 64


class EagleChain(Frozen):
    """A chain of drafts, each from the feature that the previous pass computed.

    A feature is a projection of the taps; after the first draft it is the layer's output. The row of a token has the
    feature of the previous token.

    `fc_norm` is the RMSNorm of the taps before their projection, over all of them at once or over each (EAGLE-3.1).
    With `has_normed_residual`, the residual of attention is the normed feature. With `has_normed_features`, features
    made by the layer are normed like the input of its logits (EAGLE-3.1).
    """

    fc_norm: FcNorm = "none"
    has_normed_residual: bool = False
    has_normed_features: bool = False

    def fc_norms(self, num_taps: int, target_hidden_size: int) -> WeightTable:
        """Norms before the projection of the taps."""
        if self.fc_norm == "joint":
            return {"draft.fc_norm": WeightSpec(shape=(num_taps * target_hidden_size,))}
        count = num_taps if self.fc_norm == "per_tap" else 0
        return {f"draft.fc_norms.{i}.norm": WeightSpec(shape=(target_hidden_size,)) for i in range(count)}
