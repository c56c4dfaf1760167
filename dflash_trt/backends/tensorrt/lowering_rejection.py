"""Rejection sampling of drafts in plain TensorRT layers; the definition is `backends/torch/rejection`.

Every row is computed as if its draft were tested, and those without a test keep their scores and their draw.
"""

from dataclasses import dataclass
from typing import Self

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.torch.rejection import LOWEST
from dflash_trt.network.ops import StepInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The draft behind each row. Where there is none, the token means nothing."""

    tokens: ITensor  # int32 [R, K+1]
    is_given: ITensor  # bool [R, K+1]

    @classmethod
    def of(cls, layers: Layers, inputs: StepInputs[ITensor]) -> Self:
        num_tokens = layers.dim(inputs.token_ids, 0)
        last_row = (
            layers.ints([num_tokens - 1], (1, 1))
            if isinstance(num_tokens, int)
            else layers.reshape(layers.cast(layers.binary("SUB", num_tokens, 1), "int32"), (1, 1))
        )
        next_rows = layers.binary("MIN", layers.binary("SUM", inputs.logit_rows, 1), last_row)
        slots = layers.reshape(layers.arange(layers.dim(inputs.logit_rows, 1)), (1, -1))
        return cls(
            tokens=layers.gather(inputs.token_ids, next_rows),
            is_given=layers.binary("LESS", slots, layers.reshape(inputs.num_candidates, (-1, 1))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTests:
    """The tests of drafts that were drawn apart, for all N = R*(K+1) rows."""

    drafts: ITensor  # int32 [N, 1]
    is_tested: ITensor  # bool [N, 1]
    choices: ITensor  # int32 [N, C]
    chances: ITensor  # float32 [N, C]

    @classmethod
    def of(cls, layers: Layers, inputs: StepInputs[ITensor], candidates: Candidates, num_choices: int) -> Self:
        is_random, is_apart = (
            layers.binary("GREATER", layers.reshape(column, (-1, 1)), 0)
            for column in (inputs.temperature, inputs.draft_stream)
        )
        is_apart = layers.binary("AND", is_random, is_apart)
        return cls(
            drafts=layers.reshape(candidates.tokens, (-1, 1)),
            is_tested=layers.reshape(layers.binary("AND", candidates.is_given, is_apart), (-1, 1)),
            choices=_by_row(layers, inputs.choices, num_choices),
            chances=_by_row(layers, inputs.chances, num_choices),
        )

    def decide(
        self,
        layers: Layers,
        scores: ITensor,  # float32 [N, V], at most 0
        *,
        is_kept: ITensor,  # bool [N, V]
        scaled: ITensor,  # float32 [N, V], scores / temperature
        temperature: ITensor,  # float32 [N, 1], positive
        numbers: ITensor,  # float32 [N, 1], v
    ) -> tuple[ITensor, ITensor]:
        """The scores, those of rejected drafts being of the residual, and bool [N, 1]: the draft is the row's token.

        Indices of a scatter must differ, and be tokens. Those of choices with a chance do; others, which may be of no
        request, have the first tokens in their place, whose scores are left as they are.
        """
        masses = layers.where(is_kept, layers.unary("EXP", scaled), layers.like(0.0, scaled))  # unnormalised p
        total = layers.reduce("SUM", masses, 1)
        chance = self._chance_of_drafts(layers)
        needed = layers.binary("PROD", layers.binary("PROD", numbers, chance), total)
        passes = layers.binary("LESS", needed, layers.gather_elements(masses, self.drafts, 1))
        is_accepted = layers.binary("AND", self.is_tested, passes)
        is_rejected = layers.binary("AND", self.is_tested, layers.unary("NOT", passes))

        is_drawn = layers.binary("GREATER", layers.reduce("SUM", self.chances, 1), 0.0)
        changes = layers.binary("AND", is_rejected, is_drawn)
        firsts = layers.reshape(layers.arange(self.choices.shape[1]), (1, -1))
        places = layers.where(changes, self.choices, firsts)
        expected = layers.binary("PROD", self.chances, total)
        residual = layers.binary("SUB", layers.gather_elements(masses, places, 1), expected)  # [N, C]
        left = layers.binary("PROD", temperature, layers.unary("LOG", residual))
        left = layers.where(layers.binary("GREATER", residual, 0.0), left, layers.like(LOWEST, left))
        updates = layers.where(changes, left, layers.gather_elements(scores, places, 1))
        changed = layers.scatter_elements(scores, places, updates, 1)
        tokens = layers.reshape(layers.arange(scores.shape[1]), (1, -1))
        is_draft = layers.binary("AND", is_rejected, layers.binary("EQUAL", tokens, self.drafts))
        return layers.where(is_draft, layers.like(LOWEST, changed), changed), is_accepted

    def _chance_of_drafts(self, layers: Layers) -> ITensor:
        """q(d), float32 [N, 1]; 1 for a draft without a chance."""
        is_draft = layers.binary("EQUAL", self.choices, self.drafts)
        own = layers.where(is_draft, self.chances, layers.like(0.0, self.chances))
        chance = layers.reduce("SUM", own, 1)
        return layers.where(layers.binary("GREATER", chance, 0.0), chance, layers.like(1.0, chance))


def _by_row(layers: Layers, of_drafts: ITensor, num_choices: int) -> ITensor:
    """[R, K*C] -> [R*(K+1), C]; the last row of a request, which has no draft, gets those of the first."""
    first = layers.slice(of_drafts, 1, 0, num_choices)
    return layers.reshape(layers.concat([of_drafts, first], 1), (-1, num_choices))
