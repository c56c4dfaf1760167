"""One request's token events made into text, chunks and, at the end, its output."""

from dataclasses import replace

from dflash_trt.core.request import FinishReason, GenerationOutput, Request, RequestStatistics, TokenEvent
from dflash_trt.serving.detokenizer import Detokenizer
from dflash_trt.serving.stop_strings import StopStrings
from dflash_trt.serving.stream import StreamChunk


class OutputProcessor:
    """`detokenizer` None gives token ids only. Stop strings cut the tokens, too: the last one completes the string.

    So what comes out depends on the tokens alone, not on how steps grouped them.
    """

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, *, arrived_s: float, records_steps: bool = True
    ) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(request.sampling.stop)
        self._arrived_s = arrived_s
        self._records_steps = records_steps
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._steps: list[TokenEvent] = []
        self._first_token_s: float | None = None
        self._num_verify_steps = self._num_draft_tokens = self._num_accepted = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: nothing may be added, `finish` is to be called."""
        return self._stop_strings.is_found

    def add(self, event: TokenEvent, now: float) -> StreamChunk:
        """Take in a step's tokens, whether or not it is the last; what they add to the stream."""
        num_kept, text = self._read(event.token_ids)
        event = replace(event, token_ids=event.token_ids[:num_kept], logprobs=event.logprobs[:num_kept])
        if event.token_ids and self._first_token_s is None:
            self._first_token_s = now
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs)
        if event.num_candidates:
            self._num_verify_steps += 1
            self._num_draft_tokens += event.num_candidates
            self._num_accepted += event.num_accepted
        if self._records_steps:
            self._steps.append(event)
        return StreamChunk(
            text=text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            num_draft_tokens=event.num_candidates,
            num_accepted_tokens=event.num_accepted,
        )

    def finish(
        self, reason: FinishReason, now: float, *, statistics: RequestStatistics | None, error: str | None = None
    ) -> StreamChunk:
        """The last chunk: text that was held back, and the whole output."""
        text = self._flush()
        if self.is_stopped and reason == "length":
            reason = "stop"  # a stop string that only the end of the text decided
        return StreamChunk(
            text=text,
            token_ids=(),
            finish_reason=reason,
            output=self._output(reason, now, statistics=statistics, error=error),
        )

    def failed(self, error: str, now: float, *, statistics: RequestStatistics | None) -> StreamChunk:
        """The last chunk when even the text held back cannot be had."""
        return StreamChunk(
            text=None if self._detokenizer is None else "",
            token_ids=(),
            finish_reason="error",
            output=self._output("error", now, statistics=statistics, error=error),
        )

    def _output(
        self, reason: FinishReason, now: float, *, statistics: RequestStatistics | None, error: str | None
    ) -> GenerationOutput:
        return GenerationOutput(
            request_id=self.request.request_id,
            text=None if self._detokenizer is None else "".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_verify_steps=self._num_verify_steps,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            num_emitted_by_verify=self._num_accepted + self._num_verify_steps,
            time_to_first_token_s=0.0 if self._first_token_s is None else self._first_token_s - self._arrived_s,
            total_s=now - self._arrived_s,
            error=error,
            statistics=statistics or RequestStatistics(),
            steps=tuple(self._steps),
        )

    def _read(self, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        """How many of the tokens to keep, and their text as far as it is decided."""
        if self._detokenizer is None:
            return len(token_ids), None
        pieces: list[str] = []
        num_kept = 0
        while num_kept < len(token_ids) and not self.is_stopped:
            pieces.append(self._stop_strings.push(self._detokenizer.push(token_ids[num_kept])))
            num_kept += 1
            # Characters that later tokens may change end the text all the same, as long as they stand there.
            if self._stop_strings.would_end(held := self._detokenizer.held()):
                pieces.append(self._stop_strings.push(held))
        text = "".join(pieces)
        self._texts.append(text)
        return num_kept, text

    def _flush(self) -> str | None:
        if self._detokenizer is None:
            return None
        text = ""
        if not self.is_stopped:
            text = self._stop_strings.push(self._detokenizer.flush()) + self._stop_strings.flush()
        self._texts.append(text)
        return text
