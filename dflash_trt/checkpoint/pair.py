"""A target and its drafter, checked before any work is done with them.

Checks configs, tensor headers, names and shapes, then one model against the other, and raises all problems at once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.checkpoint.kv_scales import KvScaleSource, read_kv_scales, resolve_kv_scales
from dflash_trt.checkpoint.mtp import is_mtp, mtp_tensors, parse_mtp
from dflash_trt.checkpoint.names import (
    draft_names,
    is_ignorable_beside_mtp,
    is_ignorable_in_drafter,
    is_ignorable_in_target,
    model_prefix,
    mtp_names,
    target_names,
)
from dflash_trt.checkpoint.producers.base import Scheme, description_files, read_scheme
from dflash_trt.checkpoint.quantized_weights import QuantizedSource, format_notes, resolve_quantized
from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.checkpoint.specs import (
    PairSpecs,
    compatibility_notes,
    compatibility_problems,
    pair_heading,
    read_specs,
    refuse_missing,
)
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.checkpoint.tensors import StoredTensors, scan_tensors
from dflash_trt.checkpoint.tied_head import resolve_tied_head
from dflash_trt.checkpoint.vocabulary import check_draft_vocabulary, check_tokenizers, tokenizer_files
from dflash_trt.checkpoint.weights import WeightSource, read_weights, resolve_sources
from dflash_trt.core.errors import CheckpointError, ConfigError, raise_all
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.weight_spec import WeightTable

CONFIG_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True)
class CheckpointPair(PairSpecs):
    """A pair and the places of its tensors. Made by `open_pair`.

    `source_files` hold the specs and tensors (to be hashed as provenance); `tokenizer_files` are the target's, empty if
    it has no tokenizer.
    """

    table: WeightTable
    source_files: tuple[Path, ...]
    tokenizer_files: tuple[Path, ...]
    _sources: dict[str, WeightSource] = field(repr=False)
    _quantized: dict[str, QuantizedSource] = field(repr=False)

    def iter_weights(
        self, *, dtype: torch.dtype, mapping: Mapping, whole_names: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one rank's canonical tensors: fused, sharded, cast to `dtype` except integers, in table order.

        Integers become int64. `whole_names` are not sharded: quantizing a weight needs its whole range. A linear layer
        that is stored quantized comes as its tensors, see `quantized_reading.read_quantized`. One tensor is in memory
        at a time.

        Raises:
            ConfigError: the pair cannot be sharded for this mapping. Raised before the first tensor is read.
            CheckpointError: while iterating, a tensor with values that are not finite.
        """
        raise_all(ConfigError, "tensor parallelism", mapping_problems(self.target, self.draft, mapping))
        return read_weights(
            self.table, self._sources, dtype=dtype, mapping=mapping, quantized=self._quantized, whole_names=whole_names
        )


def open_pair(
    target: Path, drafter: Path | None, *, drafter_overrides: AbcMapping[str, Any] | None = None
) -> CheckpointPair:
    """Check a pair's configs and tensor headers. `drafter_overrides` replace keys of its config.json.

    With the target's own directory as `drafter`, that is its MTP head.

    Raises:
        ConfigError: a config is wrong or the two do not fit; lists the tensor problems too.
        CheckpointError: only files, tensors or tokenizers are wrong.
    """
    refuse_missing({"target": target} | ({} if drafter is None else {"drafter": drafter}))
    found, overrides = _Findings(), drafter_overrides or {}
    stored = scan_tensors(target, label="target", problems=found.tensor_problems)
    drafts_itself = is_mtp(target, drafter)
    target_side = _open_target(target, stored, found, drafts_itself=drafts_itself)
    draft_side: _Side[DraftSpec] = _ABSENT
    if drafts_itself and target_side.spec is not None:
        draft_side = _open_mtp(target, overrides, target_side.spec, stored, found)
    elif drafter is not None and not drafts_itself:
        draft_side = _open_drafter(drafter, overrides, target_side.spec, found)
        check_tokenizers(target, drafter, found.tensor_problems)
    target_spec, draft_spec = target_side.spec, draft_side.spec
    sides: tuple[_Side[Any], _Side[Any]] = (target_side, draft_side)
    if target_spec is not None and draft_spec is not None:
        found.config_problems.extend(compatibility_problems(target_spec, draft_spec))
        found.notes.extend(compatibility_notes(target_spec, draft_spec))
    for label, side in zip(("target", "drafter"), sides, strict=True):
        found.notes.extend(format_notes(side.stored_formats(), label))
    error = ConfigError if found.config_problems else CheckpointError
    raise_all(error, pair_heading(target, drafter), [*found.config_problems, *found.tensor_problems])
    assert target_spec is not None
    return CheckpointPair(
        target=target_spec,
        draft=draft_spec,
        table={name: spec for side in sides for name, spec in side.table.items()},
        source_files=tuple(dict.fromkeys(path for side in sides for path in side.files)),
        tokenizer_files=tokenizer_files(target),
        quantization=_stored_quantization(sides),
        notes=tuple(found.notes),
        _sources={name: source for side in sides for name, source in side.sources.items()},
        _quantized={name: source for side in sides for name, source in side.quantized.items()},
    )


def read_pair(
    target: Path, drafter: Path | None, *, drafter_overrides: AbcMapping[str, Any] | None = None
) -> PairSpecs:
    """Read a pair whose tensors need not be there: they are checked if both directories have some.

    Raises:
        ConfigError: a config is wrong or the two do not fit.
        CheckpointError: tensors or tokenizers that are there are wrong.
    """
    directories = [target] if drafter is None else [target, drafter]
    has_tensors = all(any(directory.glob("*.safetensors")) for directory in directories)
    read = open_pair if has_tensors else read_specs
    return read(target, drafter, drafter_overrides=drafter_overrides)


_Spec = TypeVar("_Spec", TargetSpec, DraftSpec)


@dataclass(frozen=True)
class _Findings:
    """Everything that is wrong with a pair, or ambiguous, so far."""

    config_problems: list[str] = field(default_factory=list)
    tensor_problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Side(Generic[_Spec]):
    """One of the two checkpoints, as far as it could be opened."""

    spec: _Spec | None
    table: WeightTable
    sources: dict[str, WeightSource]
    files: tuple[Path, ...]
    quantized: dict[str, QuantizedSource] = field(default_factory=dict)
    kv_scales: tuple[KvScaleSource, ...] | None = None

    def stored_formats(self) -> list[str]:
        return [source.format for source in self.quantized.values() if source.format is not None]


_ABSENT: _Side[Any] = _Side(spec=None, table={}, sources={}, files=())


def _open_target(directory: Path, stored: StoredTensors, found: _Findings, *, drafts_itself: bool) -> _Side[TargetSpec]:
    names, problems = _all_names(stored), found.tensor_problems
    spec = parse_target(
        directory, found.config_problems, notes=found.notes, tensor_names=names, drafts_itself=drafts_itself
    )
    scheme = read_scheme(directory, label="target", problems=found.config_problems)
    if spec is None:
        return _ABSENT
    spec = resolve_tied_head(spec, stored, found.notes)
    kv_scales, rest = resolve_kv_scales(spec, stored, scheme, label="target", problems=problems)
    may_ignore, files = partial(is_ignorable_in_target, spec), _source_files(directory, stored)
    side = _located(spec, target_names(spec, names), rest, scheme, may_ignore, files, problems, label="target")
    return replace(side, kv_scales=kv_scales)


def _open_drafter(
    directory: Path, overrides: AbcMapping[str, Any], target: TargetSpec | None, found: _Findings
) -> _Side[DraftSpec]:
    problems = found.tensor_problems
    stored = scan_tensors(directory, label="drafter", problems=problems)
    scheme = read_scheme(directory, label="drafter", problems=found.config_problems)
    spec = parse_draft(
        directory,
        _all_names(stored),
        found.config_problems,
        notes=found.notes,
        overrides=overrides,
        num_target_layers=None if target is None else target.num_layers,
    )
    if spec is None:
        return _ABSENT
    names, num_problems = draft_names(spec, _all_names(stored)), len(problems)
    may_ignore, files = partial(is_ignorable_in_drafter, spec), _source_files(directory, stored)
    side = _located(spec, names, stored, scheme, may_ignore, files, problems, label="drafter")
    if len(problems) == num_problems:
        check_draft_vocabulary(spec, stored, problems)
    return side


def _open_mtp(
    directory: Path, overrides: AbcMapping[str, Any], target: TargetSpec, stored: StoredTensors, found: _Findings
) -> _Side[DraftSpec]:
    """The head in the target's own checkpoint, whose files are the target's."""
    names = _all_names(stored)
    head = mtp_tensors(target, model_prefix(names))
    spec = parse_mtp(directory, target, head, names, found.config_problems, overrides=overrides)
    if spec is None or head is None:
        return _ABSENT
    scheme = read_scheme(directory, label="target", problems=[])  # the target's side has reported its problems
    foreign, may_ignore = mtp_names(spec, target, head, names), partial(is_ignorable_beside_mtp, head)
    return _located(spec, foreign, stored, scheme, may_ignore, (), found.tensor_problems, label="drafter")


def _located(
    spec: _Spec,
    names: ForeignTable,
    stored: StoredTensors,
    scheme: Scheme | None,
    may_ignore: Callable[[str], bool],
    files: tuple[Path, ...],
    problems: list[str],
    *,
    label: str,
) -> _Side[_Spec]:
    """A model with the places of its tensors."""
    table = spec.weights()
    quantized, rest = resolve_quantized(table, names, stored, scheme, label=label, problems=problems)
    plain = {name: weight for name, weight in table.items() if name not in quantized}
    plain_names = {name: names[name] for name in plain}
    sources = resolve_sources(plain, plain_names, rest, may_ignore, label=label, problems=problems)
    return _Side(spec=spec, table=table, sources=sources, quantized=quantized, files=files)


def _stored_quantization(sides: Sequence[_Side[Any]]) -> QuantizationSpec:
    formats = {
        name: source.format
        for side in sides
        for name, source in side.quantized.items()
        if not side.table[name].is_plain
    }
    sources = [item for side in sides for item in side.sources.items()]
    formats |= {name: "mxfp4" for name, source in sources if source.layout is not None and source.layout.is_mxfp4}
    kv_scales = sides[0].kv_scales
    return QuantizationSpec(
        linears={name: weight_format for name, weight_format in formats.items() if weight_format is not None},
        target_kv=None if kv_scales is None else read_kv_scales(kv_scales),
    )


def _all_names(stored: StoredTensors) -> frozenset[str]:
    return stored.unreadable_names.union(stored.tensors)


def _source_files(directory: Path, stored: StoredTensors) -> tuple[Path, ...]:
    configs = (directory / name for name in (*CONFIG_FILES, *description_files()))
    return (*(path for path in configs if path.is_file()), *stored.files)
