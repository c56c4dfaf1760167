"""A mailbox after its last event."""

from dflash_trt.core.request import TokenEvent
from dflash_trt.serving.mailbox import Mailbox


def test_nobody_waits_for_a_request_that_has_ended() -> None:
    mailbox = Mailbox(arrived_s=0.0)
    mailbox.put(TokenEvent(request_id="r", token_ids=(), finish_reason="length"), 1.0)
    mailbox.take()
    assert not mailbox.add_waiter(lambda: None)
    assert mailbox.wait(timeout_s=60)
