"""A mailbox after its last event."""

from dflash_trt.core.request import TokenEvent
from dflash_trt.serving.output_processor import Mailbox


def test_nobody_waits_for_a_request_that_has_ended() -> None:
    mailbox = Mailbox(arrived_s=0.0)
    mailbox.put(TokenEvent(request_id="r", token_ids=(), finish_reason="length"), 1.0)
    mailbox.take()
    assert not mailbox.add_waiter(lambda: None)
    assert mailbox.wait(timeout_s=60)


def test_a_request_without_a_limit_is_never_paused() -> None:
    mailbox = Mailbox(arrived_s=0.0)
    assert mailbox.take() == ([], False)
    mailbox = Mailbox(arrived_s=0.0)
    assert not any(mailbox.put(TokenEvent(request_id="r", token_ids=(1,) * 99), now) for now in (1.0, 2.0))
    assert not mailbox.take()[1]


def test_a_request_is_resumed_once_for_each_pause() -> None:
    mailbox, token = Mailbox(arrived_s=0.0, max_pending_tokens=2), TokenEvent(request_id="r", token_ids=(1,))
    for _ in range(2):
        assert [mailbox.put(token, 1.0), mailbox.put(token, 2.0)] == [False, True]
        assert mailbox.take() == ([(token, 1.0), (token, 2.0)], True)
        assert mailbox.take() == ([], False)


def test_a_waiter_is_woken_once() -> None:
    mailbox, token, woken = Mailbox(arrived_s=0.0), TokenEvent(request_id="r", token_ids=(1,)), list[bool]()
    assert mailbox.add_waiter(lambda: woken.append(True))
    mailbox.put(token, 1.0)
    mailbox.put(token, 2.0)
    assert woken == [True]


def test_the_first_token_is_the_first_that_counts() -> None:
    mailbox = Mailbox(arrived_s=0.0)
    for now, token_ids in ((1.0, ()), (2.0, (1, 2)), (3.0, (3,))):
        mailbox.put(TokenEvent(request_id="r", token_ids=token_ids), now)
    assert (mailbox.first_token_s, mailbox.num_tokens) == (2.0, 3)
