"""The class that validates arguments, as far as the snapshot of its manifest goes."""

from typing import Any

from tensorrt_llm import _check_arguments


class TorchLlmArgs:
    def __init__(self, **args: Any) -> None:
        _check_arguments(args)
