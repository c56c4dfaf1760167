"""Breaking a checkpoint and reading what the refusal says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_config import parse_draft
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.checkpoint.specs import compatibility_problems
from dflash_trt.checkpoint.target_config import parse_target
from dflash_trt.checkpoint.tensors import scan_tensors
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError, raise_all
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from tests.factories import Tensors, edit_json, read_json, write_json

Copy = Callable[[str], Path]  # the fixture `copy_of`


def read_target_spec(directory: Path) -> TargetSpec:
    """The target's spec from its configs alone."""
    problems: list[str] = []
    spec = parse_target(directory, problems, notes=[])
    raise_all(ConfigError, f"target {directory}", problems)
    assert spec is not None
    return spec


def read_draft_spec(directory: Path, *, target: TargetSpec | None) -> DraftSpec:
    """The drafter's spec, compared with `target` when given. Only the names of its tensors are read."""
    problems: list[str] = []
    stored = scan_tensors(directory, label="drafter", problems=[])
    spec = parse_draft(directory, stored.unreadable_names.union(stored.tensors), problems, notes=[])
    if spec is not None and target is not None:
        problems += compatibility_problems(target, spec)
    raise_all(ConfigError, f"drafter {directory}", problems)
    assert spec is not None
    return spec


def pair_refusal(target: Path, drafter: Path | None, error: type[DFlashError] = CheckpointError) -> str:
    with pytest.raises(error) as raised:
        open_pair(target, drafter)
    assert type(raised.value) is error
    return str(raised.value)


def target_refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read_target_spec(directory)
    return str(raised.value)


def draft_refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read_draft_spec(directory, target=None)
    return str(raised.value)


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def edit_dflash(directory: Path, **changes: Any) -> None:
    """Change keys of `dflash_config`."""
    path = directory / "config.json"
    edit_json(path, dflash_config=read_json(path)["dflash_config"] | changes)


def remove_keys(path: Path, *names: str) -> None:
    write_json(path, {name: value for name, value in read_json(path).items() if name not in names})


def weights_of(pair: CheckpointPair, dtype: torch.dtype = torch.float32) -> Tensors:
    """All weights of the only rank."""
    return dict(pair.iter_weights(dtype=dtype, mapping=Mapping()))
