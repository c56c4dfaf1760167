"""Feed-forward kinds of a layer: a gated MLP, or a mixture of experts."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_trt.core.frozen import Frozen, Scale, Size
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, row_sharded

NumExperts = Annotated[int, Field(ge=1, le=4096)]


# Norms of `Moe.has_own_norms`; the dense MLP reads the layer's own norm before its feed-forward.
OWN_NORMS = ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")


class Dense(Frozen):
    """activation(gate) * up, then down. `gelu_tanh` is the approximation with tanh (Gemma)."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Size
    activation: Literal["silu", "gelu_tanh"] = "silu"
    has_bias: bool = False

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """Sizes that all ranks divide, by name."""
        return {"intermediate_size": self.intermediate_size}

    num_inputs: ClassVar[int] = 1  # tensors [N, H] that ranks with requests of their own gather
    num_sums: ClassVar[int] = 1  # over ranks

    def moved_features(self, hidden_size: int, mapping: Mapping) -> int:
        """Elements per token that a rank writes and reads once between input and output.

        A rank computes as much for the rows of others as they for its own.
        """
        return 3 * (self.intermediate_size // mapping.tp_size)

    def held_features(self, hidden_size: int, mapping: Mapping) -> int:
        """Elements per token that a rank holds at once between input and output."""
        return self.moved_features(hidden_size, mapping) + gathered_features(hidden_size, mapping)

    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        ffn = self.intermediate_size
        table = {
            f"{prefix}.gate_up": row_sharded((2 * ffn, hidden_size), (ffn, ffn), divided_by="all"),
            f"{prefix}.down": WeightSpec(shape=(hidden_size, ffn), sharding="columns", divided_by="all"),
        }
        if self.has_bias:
            table[f"{prefix}.gate_up_bias"] = row_sharded((2 * ffn,), (ffn, ffn), divided_by="all")
            table[f"{prefix}.down_bias"] = WeightSpec(shape=(hidden_size,))
        return table


def gathered_features(hidden_size: int, mapping: Mapping) -> int:
    """Elements per token of the rows of all ranks with requests of their own, and of their results."""
    return 2 * mapping.dp_size * hidden_size if mapping.dp_size > 1 else 0


class Moe(Frozen):
    """A mixture of experts.

    `routing` "softmax_top_k": softmax over all experts in float32, then the top k, divided by their sum if
    `normalizes_top_k`. "top_k_softmax": the top k logits, then softmax over them. "scaled_softmax_top_k": like
    "softmax_top_k", then each multiplied by a number of the expert (Gemma 4). "sigmoid_top_k": the top k of
    sigmoid(logit), used as weights, divided by their sum if `normalizes_top_k`, times `routing_scale` (DeepSeek-V3).
    With `has_choice_bias`, a bias per expert is added for the choice only. With `num_groups` groups of adjacent
    experts, only the `num_chosen_groups` with the largest sum of their two best scores are chosen from.

    With `scales_inputs` the weights multiply the experts' inputs, and their results are summed unweighted (Llama 4).

    `activation` "silu": silu(gate) * up. "clamped_swiglu": gate at most `limit`, up within +-`limit`, then gate *
    sigmoid(alpha * gate) * (up + 1) (gpt-oss).

    `shared_size` is the intermediate size of an MLP that every token goes through in addition to the experts,
    multiplied by the sigmoid of a gate of the token if `has_shared_gate` (Qwen3-Next). With `has_own_norms`, this MLP,
    the experts and the router each read the layer's input through a norm of their own, and the outputs of MLP and
    experts are normed before they are added (Gemma 4). The router's input is then multiplied by `router_input_scale`.
    """

    kind: Literal["moe"] = "moe"
    num_experts: NumExperts
    num_experts_per_token: NumExperts
    intermediate_size: Size  # per expert
    routing: Literal["softmax_top_k", "top_k_softmax", "scaled_softmax_top_k", "sigmoid_top_k"]
    normalizes_top_k: bool = False
    routing_scale: Scale = 1.0  # sigmoid_top_k
    has_choice_bias: bool = False  # sigmoid_top_k
    num_groups: NumExperts = 1  # sigmoid_top_k
    num_chosen_groups: NumExperts = 1  # sigmoid_top_k
    scales_inputs: bool = False
    activation: Literal["silu", "clamped_swiglu", "gelu_tanh"] = "silu"
    limit: Scale | None = None  # clamped_swiglu
    alpha: Scale | None = None  # clamped_swiglu
    has_bias: bool = False  # for the router and the experts
    shared_size: Size | None = None
    has_shared_gate: bool = False
    has_own_norms: bool = False
    router_input_scale: Scale = 1.0

    @field_validator("num_experts_per_token")
    @classmethod
    def _among_experts(cls, num_chosen: int, info: ValidationInfo) -> int:
        num_experts = info.data.get("num_experts", num_chosen)
        if num_chosen > num_experts:
            raise ValueError(f"at most num_experts {num_experts}")
        return num_chosen

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.activation == "clamped_swiglu" and (self.limit is None or self.alpha is None):
            raise ValueError("limit and alpha, as activation is clamped_swiglu")
        per_group, uneven = divmod(self.num_experts, self.num_groups)
        if uneven or (self.num_groups > 1 and per_group < 2):
            raise ValueError(f"num_groups of equal sizes, 2 experts at least (not {self.num_groups})")
        if self.num_chosen_groups > self.num_groups or self.num_chosen_groups * per_group < self.num_experts_per_token:
            raise ValueError(f"num_chosen_groups that hold num_experts_per_token (not {self.num_chosen_groups})")
        if self.shared_size is not None and self.activation == "clamped_swiglu":
            raise ValueError("activation silu or gelu_tanh, as shared_size is given")
        if self.has_own_norms and (self.shared_size is None or self.has_shared_gate):
            raise ValueError("shared_size without has_shared_gate, as has_own_norms is true")
        return self

    @property
    def shared(self) -> Dense | None:
        """The MLP that every token goes through in addition."""
        if self.shared_size is None:
            return None
        assert self.activation != "clamped_swiglu", "refused by `_check`"
        return Dense(intermediate_size=self.shared_size, activation=self.activation)

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """Size of the shared expert; `Mapping.ep_size` divides `num_experts`, `moe_tp_size` their own size."""
        return {} if self.shared_size is None else {"shared_size": self.shared_size}

    @property
    def num_inputs(self) -> int:
        """See `Dense`: of MLP, experts and router."""
        return 3 if self.has_own_norms else 1

    @property
    def num_sums(self) -> int:
        return 2 if self.has_own_norms else 1

    def moved_features(self, hidden_size: int, mapping: Mapping) -> int:
        """See `Dense`. A rank that shares the experts of others' rows computes as much for them as they for it."""
        shared_rows = max(1, mapping.dp_size // mapping.ep_size)
        return hidden_size + self.num_experts + shared_rows * self._chosen_features(hidden_size, mapping)

    def held_features(self, hidden_size: int, mapping: Mapping) -> int:
        """See `Dense`."""
        of_shared = mapping.dp_size * 3 * (self.shared_size or 0) // mapping.num_expert_ranks
        sums = (self.shared_size is not None) + 2 * self.has_own_norms
        of_chosen = mapping.dp_size * self._chosen_features(hidden_size, mapping)
        of_all = mapping.dp_size * self.num_experts + gathered_features(hidden_size, mapping)
        return max(of_chosen, of_shared) + of_all + sums * hidden_size

    def _chosen_features(self, hidden_size: int, mapping: Mapping) -> int:
        return self.num_experts_per_token * (self.intermediate_size // mapping.moe_tp_size + hidden_size)

    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        """Experts are stacked along axis 0, gate rows above up rows."""
        experts, ffn = self.num_experts, self.intermediate_size
        table = {
            f"{prefix}.router": WeightSpec(shape=(experts, hidden_size)),
            f"{prefix}.experts.gate_up": WeightSpec(
                shape=(experts, 2 * ffn, hidden_size), sharding="rows", segments=(ffn, ffn), num_experts=experts
            ),
            f"{prefix}.experts.down": WeightSpec(
                shape=(experts, hidden_size, ffn), sharding="columns", num_experts=experts
            ),
        }
        if self.has_bias:
            table |= {
                f"{prefix}.router_bias": WeightSpec(shape=(experts,)),
                f"{prefix}.experts.gate_up_bias": WeightSpec(
                    shape=(experts, 2 * ffn), sharding="rows", segments=(ffn, ffn), num_experts=experts
                ),
                f"{prefix}.experts.down_bias": WeightSpec(shape=(experts, hidden_size), num_experts=experts),
            }
        if self.has_choice_bias:
            table[f"{prefix}.router_choice_bias"] = WeightSpec(shape=(experts,), is_float32=True)
        if self.shared is not None:
            table |= self.shared.weights(f"{prefix}.shared", hidden_size)
        if self.has_shared_gate:
            table[f"{prefix}.shared_gate"] = WeightSpec(shape=(1, hidden_size))
        if self.routing == "scaled_softmax_top_k":
            table[f"{prefix}.expert_scales"] = WeightSpec(shape=(experts,))
        if self.has_own_norms:
            table |= {f"{prefix}.{norm}": WeightSpec(shape=(hidden_size,)) for norm in OWN_NORMS}
        return table
