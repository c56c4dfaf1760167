"""Several streams in one event loop: `python examples/async_streams.py build/demo`. They share one batch.

The first is left after a few pieces of text, which ends its request and frees its pages.
"""

import asyncio
import sys
from contextlib import aclosing

from dflash_trt import LLM, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=48, temperature=0.8, seed=1)


async def leave_early(llm: LLM, prompt: str) -> str:
    text = prompt
    async with aclosing(llm.stream_async(prompt, SAMPLING)) as stream:
        async for chunk in stream:
            text += chunk.text or ""
            if len(text) > 2 * len(prompt):
                break
    return text


async def read_all(llm: LLM, prompt: str) -> str:
    return prompt + "".join([chunk.text or "" async for chunk in llm.stream_async(prompt, SAMPLING)])


async def main() -> None:
    with LLM(sys.argv[1]) as llm:
        texts = await asyncio.gather(
            leave_early(llm, "import sys\n"), read_all(llm, "def main():\n"), read_all(llm, "class Node:\n")
        )
    print("\n---\n".join(texts))


if __name__ == "__main__":
    asyncio.run(main())
