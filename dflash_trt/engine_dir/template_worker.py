"""The main program of a process that renders chat templates: within its limits, or it ends.

A template is a program that came with a checkpoint. It may loop for ever; a process can be stopped, a thread cannot.
Rendering is transformers' own. Arguments: the file descriptor of the pipe, and the seconds that a rendering may take.
"""

import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dflash_trt.engine_dir.template_renderer import ERROR, MAX_MEMORY_BYTES, OUT_OF_MEMORY, TEXT, TOO_LONG

_MAX_MESSAGE_LEN = 1000  # characters of an error


def main() -> None:
    pipe: Connection[bytes, bytes] = Connection(int(sys.argv[1]))
    time_limit_s = float(sys.argv[2])
    _limit_memory()
    pipe.send_bytes(b"")  # ready
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return  # nobody is left who asks
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)  # its signal ends the process, whatever it does
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answer)


def _answer(request: bytes) -> bytes:
    try:
        return _rendered(**json.loads(request))
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_LEN]
        return ERROR + message.encode(errors="backslashreplace")


def _rendered(template: str, messages: list[dict[str, Any]], variables: dict[str, Any], max_bytes: int | None) -> bytes:
    rendered: Any = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **variables)
    text: bytes = rendered[0][0].encode(errors="surrogatepass")
    is_too_long = max_bytes is not None and len(text) > max_bytes
    return TOO_LONG + str(len(text)).encode() if is_too_long else TEXT + text


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux; elsewhere this limit is not enforced
        num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


if __name__ == "__main__":
    main()
