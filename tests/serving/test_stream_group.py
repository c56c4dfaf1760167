"""Outputs of many requests for one thread, in the order of their ends."""

from collections.abc import Callable

from dflash_trt.core.request import FinishReason, TokenEvent
from dflash_trt.serving.generation_batch import StreamGroup
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor
from dflash_trt.serving.stream import RequestStream
from tests.scheduler.driver import make_request


def stream(mailbox: Mailbox, ends: list[str] | None = None) -> RequestStream:
    def end(reason: FinishReason, error: str | None = None) -> None:
        if ends is not None:
            ends.append(reason)

    return RequestStream(mailbox, OutputProcessor(make_request("r"), None, arrived_s=0.0), end=end)


def finish(mailbox: Mailbox) -> None:
    mailbox.put(TokenEvent(request_id="r", token_ids=(1,), finish_reason="length"), 1.0)
    mailbox.run_callbacks()


def test_outputs_come_as_the_requests_end_and_what_is_left_can_be_cancelled() -> None:
    group, ends = StreamGroup(), list[str]()
    mailboxes = [Mailbox(arrived_s=0.0) for _ in range(3)]
    for number, mailbox in enumerate(mailboxes):
        group.start(10 + number, lambda on_ready, mailbox=mailbox: stream(mailbox, ends), reads_as_it_comes=False)
    assert list(group.read_ready()) == [] and len(group) == 3
    finish(mailboxes[2])
    finish(mailboxes[0])
    assert group.next_output()[0] == 12
    assert [number for number, _ in group.read_ready()] == [10]
    assert ends == [] and len(group) == 1
    group.cancel()
    assert ends == ["cancelled"]


def test_news_of_a_request_whose_output_was_taken_is_ignored() -> None:
    """Its end may overtake them: a request that ends while it is started reports that from this thread."""
    group, mailbox, late = StreamGroup(), Mailbox(arrived_s=0.0), list[Callable[[], None]]()

    def submit(on_ready: Callable[[], None]) -> RequestStream:
        late.append(on_ready)
        finish(mailbox)
        return stream(mailbox)

    group.start(3, submit, reads_as_it_comes=True)
    late[0]()
    number, output = group.next_output()
    assert (number, output.token_ids) == (3, (1,))
    assert list(group.read_ready()) == [] and len(group) == 0
