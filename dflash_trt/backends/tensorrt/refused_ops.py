"""Ops that have no lowering yet: `unsupported_problems` refuses every network that would come to one."""

from typing import NoReturn


def _refused(self: object, *_: object, **__: object) -> NoReturn:
    raise AssertionError("refused by `unsupported_problems`")


class RefusedOps:
    """The rest of `Ops`."""

    tempered = _refused
    chain_blocks = _refused
    previous_rows = _refused
    context_rows = _refused
    stack_slots = _refused
    last_slot = _refused
