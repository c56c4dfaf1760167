"""A worker whose engine answers with the text after "say:" in its prompt; run as a process by test_parsers.py.

python -m tests.servers.dynamo.scripted_worker CARD TOOL_CALL_PARSER REASONING_PARSER
"""

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir.stored_tokenizer import StoredTokenizer
from dflash_trt.servers.dynamo.contract import DynamoEngine, serve, worker_config
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.settings import WorkerSettings

LIMITS = ExecutorLimits(
    max_batch_size=4, max_seq_len=2048, max_num_tokens=256, max_draft_len=7, page_size=32, num_pages=64
)


class ScriptedService:
    """Takes the place of EngineService."""

    failure = None

    def __init__(self, card: Path) -> None:
        self._backend = StoredTokenizer.open(card).backend

    async def generate(
        self, request: Mapping[str, Any], request_id: str, is_stopped: Callable[[], bool]
    ) -> AsyncIterator[dict[str, Any]]:
        prompt = self._backend.decode(request["token_ids"], skip_special_tokens=False)
        token_ids = self._backend.encode(prompt.partition("say:")[2].partition(":end")[0]).ids
        for start in range(0, len(token_ids), 3):  # as verify steps of three tokens
            yield {"token_ids": token_ids[start : start + 3], "index": 0}
        yield {"token_ids": [], "index": 0, "finish_reason": "stop"}

    def statistics(self) -> Any:
        raise RuntimeError("this engine has none")

    def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def main(card: Path, tool_call_parser: str, reasoning_parser: str) -> None:
    settings = WorkerSettings(
        engine_dir=card, model_name="demo", tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
    )
    service: Any = ScriptedService(card)
    serve(DynamoEngine(service, LIMITS, PrefixEvents(), settings, card), worker_config(settings, card))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
