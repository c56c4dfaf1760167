"""Ops that have no lowering yet: `unsupported_problems` refuses every network that would come to one."""

from typing import NoReturn


def _refused(self: object, *_: object, **__: object) -> NoReturn:
    raise AssertionError("refused by `unsupported_problems`")


class RefusedOps:
    """The rest of `Ops`."""

    attend_latent = _refused
    pairs_to_halves = _refused
