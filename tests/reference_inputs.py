"""The reference implementation of packing: a batch as tensors, one Python list after another, without padding."""

import torch
from torch import Tensor

from dflash_trt.core.batch import StepBatch
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.network.ops import StepInputs


def reference_inputs(batch: StepBatch) -> StepInputs[Tensor]:
    """What `backends/step_inputs.step_inputs` must give."""
    requests, width = batch.requests, batch.num_draft_tokens + 1
    offsets, positions, logit_rows = [0], [], []
    for request in requests:
        start, num_tokens = offsets[-1], len(request.token_ids)
        positions.extend(range(request.context_len, request.context_len + num_tokens))
        last = start + num_tokens - 1
        logit_rows.append([min(last - request.num_candidates + j, last) for j in range(width)])
        offsets.append(start + num_tokens)
    num_pages = max(len(request.page_ids) for request in requests)
    sampling = [request.sampling for request in requests]
    return StepInputs(
        token_ids=_int32([token for request in requests for token in request.token_ids]),
        positions=_int32(positions),
        token_offsets=_int32(offsets),
        context_lens=_int32([request.context_len for request in requests]),
        page_table=_int32([[*request.page_ids, *[0] * (num_pages - len(request.page_ids))] for request in requests]),
        logit_rows=_int32(logit_rows),
        num_candidates=_int32([request.num_candidates for request in requests]),
        **{
            row.name: torch.tensor([getattr(s, row.name) for s in sampling], dtype=torch_dtype(row.dtype))
            for row in STEP_SAMPLING_FIELDS
            if row.dtype is not None
        },
    )


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
