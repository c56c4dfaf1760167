"""State that an engine keeps on its GPU between steps, apart from weights and pages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.backends.cuda.latent_attention import LatentMemory, shape_of
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.kernels import attention_launch, sampling_launch
from dflash_trt.kernels.attention_fixed import FixedSplits
from dflash_trt.kernels.context_parts_launch import WHOLE_CONTEXT, ContextPart
from dflash_trt.kernels.latent_rules import largest_workspace
from dflash_trt.kernels.rope_and_pages_launch import DraftLayers
from dflash_trt.network.rope import rope_frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuResources:
    """Memory of an engine on its device, apart from weights and pages."""

    rope: Mapping[Rotary, tuple[Tensor, float]]  # inv_freq float32 [D / 2], amplitude
    attention_workspace: Tensor
    attended: Tensor  # flat; kept from step to step so that rows of no request always hold finite numbers
    attended_codes: Tensor  # the same as FP8 codes
    sampling_workspace: Mapping[str, Tensor]
    draft_layers: DraftLayers | None  # their k_norms and pages
    latents: LatentMemory | None = None
    splits: FixedSplits | None = None  # for the target's attention, in deterministic steps

    @classmethod
    def allocate(
        cls,
        target: TargetSpec,
        draft: DraftSpec | None,
        *,
        mapping: RankMapping,
        max_tokens: int,
        max_rows: int,  # max_batch_size * (max_draft_len + 1)
        draft_layers: DraftLayers | None,
        dtype: torch.dtype,
        device: torch.device,
        splits: FixedSplits | None = None,
    ) -> "GpuResources":
        decoders: list[DecoderSpec] = [target] + ([draft] if draft else [])
        mixers = {gqa.shard(mapping) for decoder in decoders for gqa in decoder.attentions}
        divides = mapping.dcp_size > 1  # the positions of latents: all heads attend on each rank
        latents = {mla if divides else mla.shard(mapping) for mla in target.latents}
        frequencies = {mixer.rotary: rope_frequencies(mixer.rotary) for mixer in mixers | latents}
        workspaces = [
            attention_launch.allocate_workspace(kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim, device=device)
            for mixer in mixers
        ] + [_latent_workspace(mla, device) for mla in latents]
        targets = {gqa.shard(mapping) for gqa in target.attentions}
        if splits is not None:
            workspaces += [
                splits.allocate_workspace(
                    heads_per_kv=mixer.num_heads // mixer.num_kv_heads,
                    kv_heads=mixer.num_kv_heads,
                    head_dim=mixer.head_dim,
                    device=device,
                )
                for mixer in targets
            ]
            workspaces += [splits.allocate_latent_workspace(shape_of(mla), device) for mla in latents]
        most_features = max((mixer.q_size for mixer in mixers), default=0)
        return cls(
            rope={rotary: (torch.tensor(f.inv_freq, device=device), f.amplitude) for rotary, f in frequencies.items()},
            attention_workspace=max(workspaces, key=len),
            attended=torch.zeros(max_tokens * most_features, dtype=dtype, device=device),
            attended_codes=torch.zeros(max_tokens * most_features, dtype=torch.float8_e4m3fn, device=device),
            sampling_workspace=sampling_launch.allocate_workspace(max_rows, target.vocab_size, device),
            draft_layers=draft_layers,
            latents=LatentMemory.allocate(
                latents,
                num_rows=max_tokens,
                dtype=dtype,
                device=device,
                part=ContextPart(mapping.tp_rank, mapping.dcp_size) if divides else WHOLE_CONTEXT,
            ),
            splits=splits,
        )


def _latent_workspace(mla: Mla, device: torch.device) -> Tensor:
    num_elements = largest_workspace(shape_of(mla), num_multiprocessors=attention_launch.num_multiprocessors(device))
    return torch.empty(num_elements, dtype=torch.float32, device=device)
