"""What is said of ranks that fail, and which outcomes of two ranks are the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.backends.torch.process_group import ExchangeError
from dflash_trt.core.errors import CapacityError, RankError
from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.step_plan import StepResult
from dflash_trt.executor.ranks.launcher import explained_failure
from dflash_trt.executor.ranks.messages import Opened, Raised, RankGoneError
from dflash_trt.executor.ranks.shard import fingerprint

EARLY = Raised(reason="ValueError: early", traceback="", num_calls=2, error_class=None)
LATE = Raised(reason="ValueError: late", traceback="", num_calls=5, error_class=None)
USERS = Raised(reason="no room", traceback="", num_calls=9, error_class=CapacityError)
SILENT, ENDED = RankGoneError("no answer for 5 s", has_ended=False), RankGoneError("its process exited with 3")
OWN, EXCHANGE = ZeroDivisionError("mine"), ExchangeError("nobody came")


@pytest.mark.parametrize(
    ("reports", "error", "said"),
    [
        ([LATE, EARLY], OWN, "rank 2 of 3 failed: ValueError: early. "),
        ([EARLY, LATE], EXCHANGE, "rank 1 of 3 failed: ValueError: early. "),
        ([EARLY, ENDED], OWN, "rank 2 of 3 failed: its process exited with 3. "),
        ([SILENT, LATE], EXCHANGE, "rank 2 of 3 failed: ValueError: late. "),
        ([Opened(), SILENT], OWN, "rank 0 of 3 failed: ZeroDivisionError: mine. "),
        ([Opened(), SILENT], EXCHANGE, "rank 2 of 3 failed: no answer for 5 s. "),
        ([Opened(), SILENT], None, "rank 2 of 3 failed: no answer for 5 s. "),
        ([Opened(), Opened()], EXCHANGE, "rank 0 of 3 failed: ExchangeError: nobody came. "),
        ([Opened(), Opened()], None, "3 ranks: expected the same tokens and log-probabilities on all ranks"),
    ],
)
def test_the_rank_that_failed_first_is_named(reports: list[Any], error: Exception | None, said: str) -> None:
    found = explained_failure(reports, error)
    assert type(found) is RankError and str(found).startswith(said)
    assert "send the request again" in str(found)


@pytest.mark.parametrize("others", [[ENDED, USERS], [EARLY, USERS], [SILENT, USERS]])
def test_what_a_user_can_mend_is_said_before_all_else(others: list[Any]) -> None:
    found = explained_failure(others, OWN)
    assert type(found) is CapacityError and str(found) == "rank 2 of 3: no room"


def result() -> StepResult:
    """Two rows of K = 2: one draft accepted, and none."""
    return StepResult(
        emitted_tokens=np.array([[1, 2, 0], [3, 0, 0]], np.int32),
        emitted_logprobs=np.array([[-0.5, -0.25, 0], [-1, 0, 0]], np.float32),
        num_accepted=np.array([1, 0], np.int32),
        next_context_lens=np.array([7, 8], np.int32),
        draft_tokens=np.array([[4, 5], [6, 7]], np.int32),
        top=TopTokens(
            np.arange(12, dtype=np.int32).reshape(2, 3, 2), -np.arange(12.0, dtype=np.float32).reshape(2, 3, 2)
        ),
        prompt=PromptScores(np.zeros(2, np.float32), TopTokens.zeros(2, 1)),
    )


COUNTED: dict[str, Callable[[StepResult], Any]] = {
    "top token": lambda r: r.top.token_ids.__setitem__((0, 1, 1), 99),
    "top log probability": lambda r: r.top.logprobs.__setitem__((1, 0, 0), 99),
    "prompt": lambda r: r.prompt.logprobs.__setitem__(1, 99),
    "prompt's top token": lambda r: r.prompt.top.token_ids.__setitem__((1, 0), 99),
    "prompt's top log probability": lambda r: r.prompt.top.logprobs.__setitem__((1, 0), 99),
    "last emitted token": lambda r: r.emitted_tokens.__setitem__((0, 1), 99),
    "last log probability": lambda r: r.emitted_logprobs.__setitem__((1, 0), 99),
    "last draft": lambda r: r.draft_tokens.__setitem__((1, 1), 99),
    "logits without a token": lambda r: r.emitted_logprobs.__setitem__((0, 1), np.nan),
}
IGNORED: dict[str, Callable[[StepResult], Any]] = {
    "token behind the bonus": lambda r: r.emitted_tokens.__setitem__((0, 2), 99),
    "log probability behind the bonus": lambda r: r.emitted_logprobs.__setitem__((1, 1), 99),
    "NaN behind the bonus": lambda r: r.emitted_logprobs.__setitem__((1, 2), np.nan),
    "top token behind the bonus": lambda r: r.top.token_ids.__setitem__((1, 1, 0), 99),
}


@pytest.mark.parametrize("name", COUNTED)
def test_ranks_that_differ_in_what_is_read_are_found_out(name: str) -> None:
    changed = result()
    COUNTED[name](changed)
    assert fingerprint(changed) != fingerprint(result())


@pytest.mark.parametrize("name", IGNORED)
def test_ranks_may_differ_in_what_nobody_reads(name: str) -> None:
    changed = result()
    IGNORED[name](changed)
    assert fingerprint(changed) == fingerprint(result())


def test_nothing_counts_behind_logits_that_gave_no_token() -> None:
    """Neither the tokens after them nor drafts, which follow the bonus that is missing."""
    first, second = result(), result()
    for each, token in ((first, 8), (second, 9)):
        each.emitted_logprobs[0, 0] = np.nan
        each.emitted_tokens[0, :2] = each.draft_tokens[0] = token
        each.emitted_logprobs[0, 1] = -token
    assert fingerprint(first) == fingerprint(second) != fingerprint(result())


def test_logits_are_compared_bit_for_bit() -> None:
    logits = torch.arange(6.0).view(2, 3)
    changed = logits.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    assert fingerprint(logits.t().contiguous().t()) == fingerprint(logits) != fingerprint(changed)
    assert fingerprint(replace(result(), top=None)) != fingerprint(result())
