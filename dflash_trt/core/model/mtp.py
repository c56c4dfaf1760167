"""An MTP head's additions to its one decoder layer, which reads a token and a feature through a projection."""

from dflash_trt.core.frozen import Frozen
from dflash_trt.core.weight_spec import WeightSpec, WeightTable


class MtpHead(Frozen):
    """The multi-token prediction module of a target's own checkpoint (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    `draft.fc` projects the normed embedding of a token and the normed feature of the previous token; the layer's input
    is this projection. A feature is the target's last hidden state after its final norm; after the first draft it is
    the layer's output after the head's own norm, as in transformers 5.14 (`MtpLayer`) and speculators 0.9. With
    `has_offset_norms`, norms are those of TargetSpec.
    """

    has_offset_norms: bool = False

    def norms(self, hidden_size: int) -> WeightTable:
        """Norms that no other drafter has: the embedding's. The feature's is `draft.context_norm`."""
        return {"draft.embedding_norm": WeightSpec(shape=(hidden_size,))}
