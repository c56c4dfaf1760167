"""Tests of this directory that cannot run as compiled kernels, with the reason. Names are patterns of fnmatch."""

from typing import Final

import torch
import triton

from tests.kernels_on import ARCHITECTURE, KERNELS_ON

_REPLACES: Final = "replaces a function that kernels are interpreted from"
_COUNTS: Final = "counts launches of the interpreter, and executes no kernel"
_EXACT: Final = "negative control of the order of sums, which changes no bit here"
_NVFP4: Final = f"Triton {triton.__version__} compiles a product of NVFP4 for SM100 alone"
_SPILLS: Final = "compiles with the Triton that is locked, and executes no kernel"
_ONE_CORE: Final = "counts programs as for a machine without multiprocessors"


def _is_older_than(major: int, minor: int) -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) < (major, minor)


def _lacks_nvfp4() -> bool:
    """Before 3.9 Triton compiles it for SM100 alone, and an engine refuses it on an older GPU."""
    if ARCHITECTURE >= 100 or (KERNELS_ON == "gpu" and torch.cuda.get_device_capability() >= (10, 0)):
        return False
    return _is_older_than(3, 9)


NOT_COMPILED: Final[dict[str, str]] = {
    "test_attention_plans.py::test_without_a_fixed_length_they_do": _EXACT,
    "test_argmax_kernels.py::test_greedy_rows_do_not_make_noise": _REPLACES,
    "test_dflash2_kernels.py::test_greedy_requests_do_not_make_noise": _REPLACES,
    "test_rejection_kernels.py::test_steps_without_such_drafts_read_no_candidate": _REPLACES,
}
if KERNELS_ON == "gpu":
    NOT_COMPILED["test_latent_variants.py::test_the_variants_are_what_is_launched*"] = _ONE_CORE
else:
    NOT_COMPILED.update(
        {
            "test_step_counts.py::*": _COUNTS,
            "test_warm_up.py::*": _COUNTS,
            "test_fixed_tiles.py::test_the_same_kernel_with_other_tiles_gives_other_bits*": _EXACT,
            "test_wide_heads.py::test_no_kernel_for_heads_of_512_spills_registers": _SPILLS,
        }
    )
if _lacks_nvfp4():
    NOT_COMPILED.update(
        dict.fromkeys(
            (
                "test_block_scaled_linear.py::test_what_the_gemm_does_not_take_goes_through_our_kernel*",
                "test_device_experts.py::*experts_compute_what_the_reference_backend_computes?nvfp4?",
                "test_experts_kernels.py::test_weights_of_the_router_scale_rows_before_they_are_quantized?nvfp4-*",
                "test_experts_kernels.py::test_activations_are_quantized_with_the_scales_of_their_expert?*-nvfp4?",
                "test_fixed_tiles.py::test_a_linear_with_fixed_tiles_depends_on_no_other_row?nvfp4-*",
                "test_fixed_tiles.py::test_experts_with_fixed_tiles_depend_on_no_other_row?nvfp4?",
                "test_gpu_linear.py::*?nvfp4-input_amax*",
                "test_gpu_linear.py::*?nvfp4?",
            ),
            _NVFP4,
        )
    )
