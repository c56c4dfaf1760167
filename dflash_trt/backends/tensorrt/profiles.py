"""The two optimization profiles of a step engine: verify blocks only, and prefill chunks or mixed steps.

Pure arithmetic over the build limits; knows no TensorRT.
"""

import math
from dataclasses import dataclass
from typing import Final

from dflash_trt.backends.tensorrt.network import IoTensor, StepNetworkSpec, pool_axis, state_inputs_of, step_inputs_of
from dflash_trt.engine_dir import EngineLimits

_MOST_ELEMENTS: Final = (
    2**40
)  # of a tensor at the sizes that a profile is tuned for, by the message of TensorRT-RTX 1.7


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
    """Ranges by axis name: T, R, R+1, K+1, P, and K*C with drafts; of plain layers pages of every group, and slots."""

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


def step_profiles(spec: StepNetworkSpec, limits: EngineLimits) -> tuple[Profile, Profile]:
    """`decode` is tuned for a full batch of verify blocks, `mixed` for max_num_tokens."""
    width = spec.max_draft_len + 1 if spec.has_drafts else 1
    batch = limits.max_batch_size
    pages, tuned_pages = max_pages_per_sequence(limits), _tuned_pages(spec, limits)
    shared = {
        "R": AxisRange(min=1, opt=batch, max=batch),
        "R+1": AxisRange(min=2, opt=batch + 1, max=batch + 1),
        "K+1": AxisRange(min=2 if spec.has_drafts else 1, opt=width, max=width),
        "P": AxisRange(min=1, opt=tuned_pages, max=pages),
    }
    if spec.has_drafts:
        num_chances = spec.max_draft_len * spec.num_choices
        shared["K*C"] = AxisRange(min=spec.num_choices, opt=num_chances, max=num_chances)
    if spec.plugins == "layers":
        pool = AxisRange(min=1, opt=batch * tuned_pages + 1, max=max_pool_pages(limits))
        shared |= {pool_axis(window): pool for window in (None, *spec.page_windows)}
    if spec.plugins == "layers" and spec.states.is_recurrent:
        shared["slots"] = AxisRange(min=1, opt=batch + 1, max=batch + 1)  # and one for padding
    decode_tokens = min(batch * width, limits.max_num_tokens)
    tokens = {
        "decode": AxisRange(min=1, opt=decode_tokens, max=decode_tokens),
        "mixed": AxisRange(min=1, opt=limits.max_num_tokens, max=limits.max_num_tokens),
    }
    decode, mixed = (Profile(name=name, axes=shared | {"T": sizes}) for name, sizes in tokens.items())
    return decode, mixed


def _tuned_pages(spec: StepNetworkSpec, limits: EngineLimits) -> int:
    """A quarter of the longest request; with plain layers, whose every row gathers its pages, what can be gathered."""
    quarter = max(1, max_pages_per_sequence(limits) // 4)
    if spec.plugins != "layers":
        return quarter
    pools = {pool_axis(window) for window in (None, *spec.page_windows)}
    largest = max(math.prod(pages.shape[1:]) for pages in state_inputs_of(spec) if pages.axes[0] in pools)
    return max(1, min(quarter, _MOST_ELEMENTS // (limits.max_num_tokens * largest) // 2))


def profile_inputs(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Every network input: the step's tensors, then the state."""
    return (*step_inputs_of(spec), *state_inputs_of(spec))


def max_pages_per_sequence(limits: EngineLimits) -> int:
    return -(-(limits.max_seq_len + limits.max_draft_len) // limits.page_size)


def max_pool_pages(limits: EngineLimits) -> int:
    """Pages of max_batch_size full sequences, and one scratch page for padding: the most that any group has."""
    return limits.max_batch_size * max_pages_per_sequence(limits) + 1
