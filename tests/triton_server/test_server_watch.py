"""How the model's process finds the ports of its server. That it notices a stop is tested with the real server."""

import os
import socket

import pytest

from dflash_trt.servers.triton.server_watch import ServerWatch, _address, _listening, _num_wakes


@pytest.mark.parametrize(
    ("text", "family", "expected"),
    [
        ("0100007F:1F90", socket.AF_INET, ("127.0.0.1", 8080)),
        ("00000000:1F40", socket.AF_INET, ("127.0.0.1", 8000)),
        ("00000000000000000000000001000000:1F90", socket.AF_INET6, ("::1", 8080)),
        ("00000000000000000000000000000000:1F90", socket.AF_INET6, ("::1", 8080)),
    ],
)
def test_an_address_of_proc_is_where_to_connect(text, family, expected) -> None:
    assert _address(text, family) == expected


def test_a_listening_socket_is_found_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert address in list(_listening(os.getpid()))
    assert address not in list(_listening(os.getpid()))


def test_a_server_that_sleeps_is_not_stopping_and_is_never_asked() -> None:
    def ask() -> bool:
        raise AssertionError("asked without a suspicion")

    watch = ServerWatch(ask)
    watch._pid = os.getpid()
    wakes = _num_wakes(os.getpid())
    assert wakes > 0
    watch._wakes.append((float("inf"), wakes + 1000))  # no more wakes than before
    assert not watch.is_stopping()


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_server_that_wakes_is_asked(is_ready) -> None:
    watch = ServerWatch(lambda: is_ready)
    watch._pid = os.getpid()
    watch._wakes.append((float("inf"), _num_wakes(os.getpid()) - 1000))
    assert watch.is_stopping() is not is_ready
    assert not ServerWatch(lambda: True).is_gone()
