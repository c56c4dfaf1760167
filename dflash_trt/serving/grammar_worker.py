"""The main program of a process that tries constraints: within its limits, or it ends."""

import json
import sys
import threading
from pathlib import Path

from llguidance import LLTokenizer

from dflash_trt.core.limited_worker import serve
from dflash_trt.serving.grammar_trial import problem_of

# Less than any thread of the engine has, so that what the trial survives cannot overflow one: Rust's own have 2 MiB.
_STACK_BYTES = 1024**2


def main() -> None:
    tokenizer, num_ids, end_id = sys.argv[3:]
    tokens = LLTokenizer(Path(tokenizer).read_text(), n_vocab=int(num_ids), eos_token=int(end_id))

    def answer(request: bytes) -> bytes:
        field, text = json.loads(request)
        return (problem_of(tokens, int(end_id), field, text) or "").encode(errors="backslashreplace")

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve, args=(answer,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
