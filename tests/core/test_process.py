"""What a process knows of itself: whether it is the one that made an object, and whether it collects garbage."""

import gc
import os

import pytest

from dflash_trt.core.errors import ForkError
from dflash_trt.core.process import OwnProcess, paused_collection


def test_a_forked_child_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnProcess()
    own.check()
    assert own.is_this and own.process_id == os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own.process_id + 1)
    assert not own.is_this
    with pytest.raises(
        ForkError, match=f"expected process {own.process_id}, found its forked child {own.process_id + 1}"
    ):
        own.check()


def test_garbage_is_collected_again_after_a_pause_unless_it_was_not_before() -> None:
    assert gc.isenabled()
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), paused_collection():
        raise ValueError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
