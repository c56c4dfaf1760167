"""Many prompts at once: `python examples/offline.py build/demo`. Rows run together; outputs come in their order."""

import sys

from dflash_trt import LLM, SamplingParams

PROMPTS = ["import os\n", "def main():\n", "class Node:\n"]


def main() -> None:
    with LLM(sys.argv[1]) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=32))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"--- {output.acceptance_length:.2f} tokens per step, {output.finish_reason}")
        print(prompt + (output.text or ""))


if __name__ == "__main__":
    main()
