"""The optimization profiles of a step engine: verify blocks only; prefill chunks or mixed steps.

Pure arithmetic over the build limits; knows no TensorRT.
"""

from dataclasses import dataclass

from dflash_trt.backends.tensorrt.network import (
    IoTensor,
    StepNetworkSpec,
    rule_inputs_of,
    score_inputs_of,
    state_inputs_of,
    step_inputs_of,
)
from dflash_trt.core.logprobs import LOGPROBS_ROWS
from dflash_trt.engine_dir import EngineLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisRange:
    """Minimum, optimum (to tune for) and maximum size of a symbolic axis."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}..{self.max} (opt {self.opt})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Ranges by axis name: T, R, R+1, K+1, P, K*C with drafts, and those of rules, masks and scored rows."""

    name: str
    axes: dict[str, AxisRange]

    def shapes_of(self, tensor: IoTensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Min, opt and max shape of an input."""
        ranges = [
            self.axes[axis] if size == -1 else AxisRange(min=size, opt=size, max=size)
            for axis, size in zip(tensor.axes, tensor.shape, strict=True)
        ]
        return (
            tuple(sizes.min for sizes in ranges),
            tuple(sizes.opt for sizes in ranges),
            tuple(sizes.max for sizes in ranges),
        )


def step_profiles(spec: StepNetworkSpec, limits: EngineLimits) -> tuple[Profile, ...]:
    """`decode` is tuned for a full batch of verify blocks, `mixed` for max_num_tokens.

    A deterministic engine has `mixed` alone, because TensorRT chooses the kernels of each profile apart.
    """
    width = spec.max_draft_len + 1 if spec.has_drafts else 1
    batch = limits.max_batch_size
    pages, positions = max_pages_per_sequence(limits), limits.max_seq_len + limits.max_draft_len
    shared = {
        "R": AxisRange(min=1, opt=batch, max=batch),
        "R+1": AxisRange(min=2, opt=batch + 1, max=batch + 1),
        "K+1": AxisRange(min=2 if spec.has_drafts else 1, opt=width, max=width),
        "P": AxisRange(min=1, opt=max(1, pages // 4), max=pages),
        "adjusted": AxisRange(min=1, opt=1, max=1 + batch * width),  # tuned for steps without rules and masks
        "masks": AxisRange(min=1, opt=1, max=batch * width),
        "slots": AxisRange(min=batch + 1, opt=batch + 1, max=batch + 1),
        "max_positions": AxisRange(min=1, opt=positions, max=positions),
    }
    if spec.has_drafts:
        num_probs = spec.max_draft_len * spec.draft_topk
        shared["K*C"] = AxisRange(min=spec.draft_topk, opt=num_probs, max=num_probs)
    decode_tokens = min(batch * width, limits.max_num_tokens)
    rows, scored = batch * width, max_prompt_scores(limits)
    decode = {
        "T": AxisRange(min=1, opt=decode_tokens, max=decode_tokens),
        "L": AxisRange(min=1, opt=rows, max=rows),
        "scored": AxisRange(min=1, opt=1, max=rows + 1),
    }
    mixed = {
        "T": AxisRange(min=1, opt=limits.max_num_tokens, max=limits.max_num_tokens),
        "L": AxisRange(min=1, opt=rows, max=rows + scored),
        "scored": AxisRange(min=1, opt=1, max=rows + scored + 1),
    }
    every_step = Profile(name="mixed", axes=shared | mixed)
    return (every_step,) if spec.split_length else (Profile(name="decode", axes=shared | decode), every_step)


def max_prompt_scores(limits: EngineLimits) -> int:
    """Prompt tokens whose log probabilities a step gives: their logits are in memory at once."""
    return min(LOGPROBS_ROWS, limits.max_num_tokens)


def profile_inputs(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Every network input: the step's tensors, masks and rules, rows that are scored, then the state."""
    return (*step_inputs_of(spec), *rule_inputs_of(spec), *score_inputs_of(spec), *state_inputs_of(spec))


def max_pages_per_sequence(limits: EngineLimits) -> int:
    return -(-(limits.max_seq_len + limits.max_draft_len) // limits.page_size)


def max_keys(limits: EngineLimits) -> int:
    """Positions of a request's pages."""
    return max_pages_per_sequence(limits) * limits.page_size
