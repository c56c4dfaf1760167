"""A conversation of two turns: `python examples/chat.py ENGINE`, of a pair whose tokenizer has a chat template.

The second turn begins with the first, whose K/V pages are still there: only the new message is computed.
"""

import sys
from typing import Any

from dflash_trt import LLM, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=64)


def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Name a prime number."}]
    with LLM(sys.argv[1]) as llm:
        for question in ("And the next one?", None):
            answer = ""
            for chunk in llm.stream_chat(messages, SAMPLING):
                answer += chunk.text or ""
                print(chunk.text or "", end="", flush=True)
            print()
            if question is not None:
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        print(f"{llm.statistics.scheduler.num_prefix_hit_tokens} tokens of the second turn were there already")


if __name__ == "__main__":
    main()
