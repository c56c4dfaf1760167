"""Breaking a checkpoint and reading what the refusal says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.pair import CheckpointPair, open_pair, read_draft_spec, read_target_spec
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError
from dflash_trt.core.mapping import Mapping
from tests.factories import Tensors, edit_json, read_json, write_json

Copy = Callable[[str], Path]  # the fixture `copy_of`


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
