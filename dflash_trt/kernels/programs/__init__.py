"""The operations of the plugin library as data: what a node takes and gives, and its launches.

The library is generated from them (`plugins/aot`), a network names its nodes by them, and plugins/README.md says what
they compute.
"""

from typing import Final

from dflash_trt.kernels.programs.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from dflash_trt.kernels.programs.experts import EXPERTS
from dflash_trt.kernels.programs.gated_delta import GATED_DELTA, GATED_DELTA_IN_ORDER
from dflash_trt.kernels.programs.latents import ATTEND_LATENTS, ATTEND_LATENTS_IN_SPLITS, HEAD_PRODUCT
from dflash_trt.kernels.programs.linear import INT8_LINEAR, LINEAR, RMS_NORM
from dflash_trt.kernels.programs.pages import (
    ATTEND_DRAFT,
    ATTEND_IN_SPLITS,
    ATTEND_PAGES,
    PREVIOUS_ROWS,
    WRITE_DRAFT_CONTEXT,
)
from dflash_trt.kernels.programs.sampling import DRAFT_TOKENS, SAMPLE_AND_ACCEPT, SCORE_ROWS

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "ATTEND_DRAFT",
    "ATTEND_IN_SPLITS",
    "ATTEND_LATENTS",
    "ATTEND_LATENTS_IN_SPLITS",
    "ATTEND_PAGES",
    "DRAFT_TOKENS",
    "EXPERTS",
    "GATED_DELTA",
    "GATED_DELTA_IN_ORDER",
    "HEAD_PRODUCT",
    "INT8_LINEAR",
    "LINEAR",
    "NAMESPACE",
    "PREVIOUS_ROWS",
    "PROGRAMS",
    "REDUCE_SCATTER",
    "RMS_NORM",
    "SAMPLE_AND_ACCEPT",
    "SCORE_ROWS",
    "VERSION",
    "WRITE_DRAFT_CONTEXT",
]
NAMESPACE: Final = "dflash_trt"
VERSION: Final = "3"
PROGRAMS: Final = (
    ATTEND_PAGES,
    ATTEND_DRAFT,
    WRITE_DRAFT_CONTEXT,
    PREVIOUS_ROWS,
    SAMPLE_AND_ACCEPT,
    SCORE_ROWS,
    DRAFT_TOKENS,
    EXPERTS,
    GATED_DELTA,
    ATTEND_LATENTS,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    INT8_LINEAR,
    LINEAR,
    RMS_NORM,
    ATTEND_IN_SPLITS,
    GATED_DELTA_IN_ORDER,
    ATTEND_LATENTS_IN_SPLITS,
    HEAD_PRODUCT,
)
