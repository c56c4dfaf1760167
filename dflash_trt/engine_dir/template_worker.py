"""The main program of a process that renders chat templates: within its limits, or it ends.

A template is a program that came with a checkpoint, and may loop for ever. jinja2 renders it as transformers does.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from dflash_trt.core.limited_worker import serve

TEXT, TOO_LONG, ERROR, OUT_OF_MEMORY = b"T", b"L", b"E", b"M"  # how an answer begins

_MAX_MESSAGE_LEN = 1000  # characters of an error


def main() -> None:
    compiled = _compiler()
    serve(lambda request: _answer(request, compiled))


def _answer(request: bytes, compiled: Callable[[str], Any]) -> bytes:
    try:
        return _rendered(compiled, **json.loads(request))
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_LEN]
        return ERROR + message.encode(errors="backslashreplace")


def _rendered(
    compiled: Callable[[str], Any],
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    max_bytes: int | None,
) -> bytes:
    given = {"tools": None, "documents": None} | variables
    for name in ("tools", "documents"):
        if not all(isinstance(item, dict) for item in given[name] or ()):
            raise TypeError(f"{name} should be a list of objects")
    rendered = compiled(template).render(given | {"messages": messages, "add_generation_prompt": True})
    text: bytes = rendered.encode(errors="surrogatepass")
    is_too_long = max_bytes is not None and len(text) > max_bytes
    return TOO_LONG + str(len(text)).encode() if is_too_long else TEXT + text


def _compiler() -> Callable[[str], Any]:
    """Compile templates in the environment of transformers' `apply_chat_template`."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` encloses what the assistant says: for training, here just its text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """jinja2's own escapes HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return lru_cache(environment.from_string)


if __name__ == "__main__":
    main()
