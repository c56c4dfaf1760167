"""Engine directories of recipes at their published size, whose weights are holes in files without disk or memory.

The tokenizer is the demo's, of 512 tokens; the vocabulary is the model's own.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.backends.base import backend_of
from dflash_trt.checkpoint.specs import PairSpecs, read_specs, with_draft_window
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.description import EngineDescription, describe_engine
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.engine_dir import ENGINE_VERSION, EngineFile, EngineManifest, is_hashed, tensor_headers, weights_name
from dflash_trt.engine_dir.manifest import MANIFEST_NAME, TOKENIZER_DIR, StepTables
from dflash_trt.engine_dir.provenance import PROVENANCE_NAME, Provenance
from dflash_trt.engine_dir.tensor_file import tensor_file_header, tensor_file_num_bytes
from dflash_trt.engine_dir.writing import json_bytes
from dflash_trt.recipes import Recipe
from scripts.published_shapes import write_config

TOKENIZER = Path(dflash_trt.__file__).parent / "demo" / "target"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_NOT_HASHED = "0" * 64


def write_engine(
    recipe: Recipe, directory: Path, *, capability: tuple[int, int], changes: Mapping[str, Any] | None = None
) -> EngineDescription:
    """The engine that `dflash-trt build` would write for a GPU of this compute capability, but for its weights.

    `changes` replace fields of the recipe. Raises ConfigError or BuildError as a build does.
    """
    config = build_config_from(read_yaml(recipe.path) | (changes or {}), source=recipe.name)
    backend = backend_of(config.backend)
    described = describe_engine(
        config,
        _pair(recipe, config, directory / "checkpoints"),
        unsupported=backend.unsupported,
        subject=backend.subject,
        capability=capability,
    )
    engine = directory / "engine"
    (engine / TOKENIZER_DIR).mkdir(parents=True)
    files = {f"{TOKENIZER_DIR}/{name}": _copied(TOKENIZER / name, engine / TOKENIZER_DIR) for name in _TOKENIZER_FILES}
    headers = tensor_headers(described.pretrained_config)
    header, size_bytes = tensor_file_header(headers), tensor_file_num_bytes(headers)
    for rank in range(config.mapping.world_size):
        files[weights_name(rank)] = _with_hole(engine / weights_name(rank), header, size_bytes)
    manifest = EngineManifest(
        version=ENGINE_VERSION,
        backend="torch",
        pretrained_config=described.pretrained_config,
        build_config=described.build_config,
        step=StepTables.current(),
        files=files,
    )
    content = json_bytes(manifest.model_dump(mode="json"))
    (engine / MANIFEST_NAME).write_bytes(content)
    (engine / PROVENANCE_NAME).write_bytes(json_bytes(_provenance(recipe, hashlib.sha256(content).hexdigest())))
    return described


def _pair(recipe: Recipe, config: BuildConfig, directory: Path) -> PairSpecs:
    names = [name for name in (config.target, config.drafter) if name is not None]
    found = [
        local if (local := recipe.path.parent / name).is_dir() else write_config(directory, name) for name in names
    ]
    return with_draft_window(read_specs(found[0], found[1] if len(found) > 1 else None), config.draft_window)


def _copied(source: Path, directory: Path) -> EngineFile:
    content = source.read_bytes()
    (directory / source.name).write_bytes(content)
    return EngineFile(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def _with_hole(path: Path, header: bytes, size_bytes: int) -> EngineFile:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size_bytes)
    entry = EngineFile(sha256=_NOT_HASHED, size_bytes=size_bytes)
    if not is_hashed(entry):
        return entry
    with path.open("rb") as file:
        return EngineFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size_bytes=size_bytes)


def _provenance(recipe: Recipe, config_sha256: str) -> dict[str, Any]:
    made = Provenance(
        command=("scripts/recipe_engine.py", recipe.name),
        working_dir=str(Path.cwd()),
        config={},
        checkpoints={},
        inputs={},
        versions={},
        notes=("the weights are holes in their files",),
        component_bytes=(),
        build_time_s=0,
        config_sha256=config_sha256,
    )
    return made.model_dump(mode="json")
