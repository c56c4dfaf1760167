"""Where the torch backend runs."""

import pytest
import torch

from dflash_trt.core.errors import ConfigError
from dflash_trt.executor import opening
from dflash_trt.executor.opening import _runs_on_gpu


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # noqa: B023
        assert _runs_on_gpu("auto") is has_gpu
        assert _runs_on_gpu("cpu") is False


def test_asking_for_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'device: expected a CUDA GPU .*, found none\. .* device "cpu"'):
        _runs_on_gpu("cuda")


def test_a_gpu_without_triton_is_refused_rather_than_left_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"device: expected Triton.*Install triton"):
        _runs_on_gpu("auto")
    assert not _runs_on_gpu("cpu")
