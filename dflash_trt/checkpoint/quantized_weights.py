"""Quantized linear layers of a checkpoint: the places of their tensors, and checks of the headers.

`producers/` says how a checkpoint stores the weights of a module, `quantized_reading` reads them. The parts of a fused
linear layer are segments, each with its own scales.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dflash_trt.checkpoint.expert_tensors import ExpertLayout
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable, PairRows, PartRows
from dflash_trt.checkpoint.producers.base import FLOATS, WORDS, Scheme, StoredFormat
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors, listed
from dflash_trt.core.dtype import safetensors_dtype
from dflash_trt.core.errors import problem
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, is_linear, segment_specs, segments_of
from dflash_trt.formats.registry import weight_format

_EXPORT_AGAIN = "Export the checkpoint again."
_OTHER_FORMAT = "Export it in FP8 without blocks, or in NVFP4."
OFTEN_UNQUANTIZED = (".lm_head", ".router", ".ba", ".shared_gate", ".fc")  # which producers leave out without a word


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedPart:
    """One of the linear layers fused in a canonical one.

    If `stored` is None, its `codes` are an unquantized weight. With `rows` it is only those rows of the stored layer,
    and `tensors` have the shapes of this share. With `is_transposed` it has all experts, and its codes and block scales
    have the axes `in` and `out` exchanged.
    """

    stored: StoredFormat | None
    tensors: Mapping[str, StoredTensor]  # by field
    rows: PartRows | PairRows | None = None
    is_transposed: bool = False

    @property
    def format(self) -> str | None:
        return None if self.stored is None else self.stored.format


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSource:
    """Parts of a canonical linear layer; `format` is None if they differ.

    Experts have their parts one after the other, or a single part for all.
    """

    parts: tuple[QuantizedPart, ...]

    @property
    def format(self) -> str | None:
        formats = {part.format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None


def resolve_quantized(
    table: WeightTable,
    names: ForeignTable,
    stored: StoredTensors,
    scheme: Scheme | None,
    *,
    label: str,
    problems: list[str],
) -> tuple[dict[str, QuantizedSource], StoredTensors]:
    """Return a checkpoint's quantized linear layers, and the remaining tensors."""
    if scheme is None:
        return {}, stored
    finder = _Finder(stored, scheme, label, problems)
    sources: dict[str, QuantizedSource] = {}
    for canonical, spec in table.items():
        may_be_quantized = is_linear(spec, canonical) or spec.is_plain
        specs = part_specs(spec, names[canonical], scheme) if may_be_quantized else None
        if specs is None:
            continue
        may_be_plain = canonical.endswith(OFTEN_UNQUANTIZED)
        layout = names[canonical].layout
        is_transposed = layout is not None and layout.is_transposed
        rows = names[canonical].rows or (None,) * len(specs)
        places = zip(names[canonical].parts, specs, rows, strict=True)
        wanted = [_Wanted(name=name, spec=spec, rows=rows, is_transposed=is_transposed) for name, spec, rows in places]
        parts = [finder.part(part, may_be_plain=may_be_plain) for part in wanted]
        whole = tuple(part for part in parts if part is not None)
        # A layer without one of its parts is left to `resolve_sources`, which reports missing tensors.
        if len(whole) == len(parts) and any(part.stored is not None for part in whole):
            source = sources[canonical] = QuantizedSource(parts=whole)
            if spec.num_experts and source.format is None:
                finder.refuse_mixed(names[canonical], source)
    used_parts = (part for source in sources.values() for part in source.parts)
    used = {tensor.name for part in used_parts for tensor in part.tensors.values()}
    rest = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
    return sources, replace(stored, tensors=rest)


def part_specs(spec: WeightSpec, foreign: ForeignNames, scheme: Scheme) -> tuple[WeightSpec, ...] | None:
    """Spec of each stored part; None for experts in a layout that the producer does not quantize."""
    if foreign.layout is None:
        return segment_specs(spec)
    if foreign.layout == ExpertLayout():
        return (spec,)
    if foreign.layout == ExpertLayout(is_transposed=True) and scheme.quantizes_transposed:
        return (spec,)
    if not foreign.layout.is_one_by_one:
        return None
    expert = replace(spec, shape=spec.shape[1:], num_experts=0)
    return segment_specs(expert) * spec.num_experts


def format_notes(formats: Iterable[str], label: str) -> list[str]:
    """A checkpoint's formats, and which of them quantize activations. `formats` are of linear layers."""
    notes = []
    for name, count in Counter(formats).items():
        known, way = weight_format(name), "left in the engine's dtype (the checkpoint has no scales for them)"
        if not known.is_weight_only:
            way = f"quantized with {'a scale per token' if known.has_token_scales else 'the stored scales'}"
        notes.append(f"{label}: {count} linear layers are stored in {name}; their activations are {way}")
    return notes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The weight `name`, or some of its rows; `spec` describes only these rows."""

    name: str
    spec: WeightSpec
    rows: PartRows | PairRows | None
    is_transposed: bool

    @property
    def stored_spec(self) -> WeightSpec:
        """Spec of the whole weight."""
        if self.rows is None:
            return self.spec
        return replace(self.spec, shape=self.rows.stored_shape, segments=self.rows.stored_shape[:1])


@dataclass(frozen=True)
class _Finder:
    """Finds the tensors of one module after the other, and checks their headers."""

    stored: StoredTensors
    scheme: Scheme
    label: str
    problems: list[str]

    def part(self, wanted: _Wanted, *, may_be_plain: bool) -> QuantizedPart | None:
        """The weight of whichever format the scheme says; None if it is missing."""
        name = wanted.name
        claimed, plain = self.scheme.format_of(name.removesuffix(".weight")), self.stored.tensors.get(name)
        codes = None if claimed is None else self._beside(name, claimed.fields["codes"].suffix)
        if claimed is not None and codes is not None and codes.dtype not in FLOATS:
            return self._quantized(wanted, claimed, codes)
        if plain is None:
            return None
        if plain.dtype not in FLOATS:
            expected = f"an unquantized dtype, as in {self.scheme.source}"
            self._refuse(plain, expected=expected, found=plain.dtype)
        elif claimed is not None and not may_be_plain:
            expected = f"a weight in {claimed.format} with its scales, as in {self.scheme.source}"
            self._refuse(plain, expected=expected, found=f"an unquantized weight in {plain.dtype}")
        part = QuantizedPart(
            stored=None, tensors={"codes": plain}, rows=wanted.rows, is_transposed=wanted.is_transposed
        )
        return share_of(part, wanted.spec)

    def refuse_mixed(self, foreign: ForeignNames, source: QuantizedSource) -> None:
        found = " and ".join(sorted({part.format or "unquantized" for part in source.parts}))
        subject = f"{self.label} tensors '{foreign.parts[0]}' to '{foreign.parts[-1]}'"
        self.problems.append(problem(subject, expected="experts of one format", found=found, hint=_EXPORT_AGAIN))

    def _quantized(self, wanted: _Wanted, claimed: StoredFormat, codes: StoredTensor) -> QuantizedPart:
        has_other_blocks = self._refuse_other_blocks(wanted, claimed, codes)
        names = {field: self._name_beside(wanted.name, place.suffix) for field, place in claimed.fields.items()}
        tensors = {field: self.stored.tensors[name] for field, name in names.items() if name in self.stored.tensors}
        for field, tensor in tensors.items():
            if not has_other_blocks:
                self._check(tensor, field, claimed, wanted)
        missing = [name for field, name in names.items() if field not in tensors]
        if missing:
            self._refuse(codes, expected=f"the scales of {claimed.format}", found=f"no {listed(missing)}")
        extra = {suffix: self._beside(wanted.name, suffix) for suffix in claimed.ignored}
        tensors |= {suffix: tensor for suffix, tensor in extra.items() if tensor is not None}
        part = QuantizedPart(stored=claimed, tensors=tensors, rows=wanted.rows, is_transposed=wanted.is_transposed)
        return share_of(part, wanted.spec)

    def _refuse_other_blocks(self, wanted: _Wanted, claimed: StoredFormat, codes: StoredTensor) -> bool:
        """True for blocks of several rows if rows move, and for such blocks of [experts, in, out].

        ModelOpt 0.47 writes the latter's scales for blocks of [out, in], and their codes for other ones.
        """
        block, rows = weight_format(claimed.format).rows_per_block, wanted.rows
        if rows is not None and not rows.has_whole_blocks(block, wanted.spec.shape[0]):
            expected = f"heads of a multiple of {block} rows, for {claimed.format} has blocks of {block}"
            self._refuse(codes, expected=expected, found=str(rows), hint=_OTHER_FORMAT)
            return True
        if not (wanted.is_transposed and block > 1):
            return False
        expected = "experts [experts, in, out] in FP8 with a scale for all or each, or in NVFP4"
        found = f"{claimed.format}, whose scales do not match the codes"
        self._refuse(codes, expected=expected, found=found, hint=_OTHER_FORMAT)
        return True

    def _check(self, tensor: StoredTensor, field: str, claimed: StoredFormat, wanted: _Wanted) -> None:
        dtypes, shapes = stored_layout(field, claimed, wanted.stored_spec, is_transposed=wanted.is_transposed)
        is_shaped = tensor.shape in shapes or (field != "codes" and _without_ones(tensor.shape) in shapes)
        if tensor.dtype in dtypes and is_shaped:
            return
        found = f"{tensor.dtype} {list(tensor.shape)}"
        block = weight_format(claimed.format).columns_per_block
        if field == "block_scale" and len(tensor.shape) == 2 and tensor.shape[1]:
            columns = shapes[0][-1] * block * claimed.fields[field].repeats
            found += f" (blocks of {columns // tensor.shape[1]} columns instead of {block})"
        self._refuse(tensor, expected=f"{dtypes[0]} {list(shapes[0])} for {claimed.format}", found=found)

    def _beside(self, name: str, suffix: str) -> StoredTensor | None:
        return self.stored.tensors.get(self._name_beside(name, suffix))

    def _name_beside(self, name: str, suffix: str) -> str:
        """Another tensor of the module whose weight is `name`; stacked experts' names do not end in `.weight`."""
        if name.endswith(".weight"):
            return f"{name.removesuffix('weight')}{suffix}"
        if self.scheme.names_scales_in_full and suffix != "weight":
            return f"{name}_{suffix}"
        return f"{name}{suffix.removeprefix('weight')}"

    def _refuse(self, tensor: StoredTensor, *, expected: str, found: str, hint: str = _EXPORT_AGAIN) -> None:
        subject = f"{self.label} tensor '{tensor.name}'"
        found_problem = problem(subject, expected=expected, found=found, hint=hint)
        if found_problem not in self.problems:  # the parts of a fused matrix have the same
            self.problems.append(found_problem)


def share_of(part: QuantizedPart, spec: WeightSpec) -> QuantizedPart:
    """The part with the shapes of its `rows`, which `spec` describes."""
    if part.rows is None:
        return part
    shapes = {
        field: tensor.shape if block is None else (-(-spec.shape[0] // block), *tensor.shape[1:])
        for field, tensor in part.tensors.items()
        for block in (rows_per_block(part, field, tensor.num_elements),)
    }
    return replace(part, tensors={field: replace(part.tensors[field], shape=shapes[field]) for field in shapes})


def rows_per_block(part: QuantizedPart, field: str, num_elements: int) -> int | None:
    """Rows of a weight that share one of a field's `num_elements`; None if the field is the same for all."""
    if part.stored is None:
        return 1
    known = weight_format(part.stored.format).weight_type
    is_of_all = field not in part.stored.fields or field in known.per_segment or num_elements == 1
    return None if is_of_all else known.rows_per_block.get(field, 1)


def stored_layout(
    field: str, stored: StoredFormat, spec: WeightSpec, *, is_transposed: bool
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Dtypes and shapes that a stored tensor may have, expected ones first.

    Scales may have extra axes of 1.
    """
    known, place = weight_format(stored.format), stored.fields[field]
    layout = known.layout(spec.shape, segments_of(spec))[field]
    dtypes = place.dtypes or (safetensors_dtype(layout.dtype),)
    experts = spec.shape[:-2]
    if field in known.weight_type.per_segment:
        return dtypes, ((), experts)
    *leading, last = layout.shape
    if dtypes == WORDS:
        return dtypes, ((*leading, last // 4),)
    shape = (*leading, last // place.repeats)
    if len(shape) < len(spec.shape):  # a scale per row may be one for all rows
        return dtypes, (shape, _without_ones(shape), experts, ())
    if is_transposed:
        shape = (*experts, *reversed(shape[-2:]))
    return dtypes, (shape, _without_ones(shape))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
