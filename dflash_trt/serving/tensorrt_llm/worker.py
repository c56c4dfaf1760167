"""The process that holds TensorRT-LLM: requests in, tokens out, one JSON object a line over a socket.

Run by another interpreter, in which dflash-trt need not be installed: imports the standard library and tensorrt_llm.
`python worker.py SOCKET_DESCRIPTOR`. Words of the protocol: `process.py`.
"""

import asyncio
import json
import os
import socket
import sys
from importlib import import_module
from typing import Any


class Worker:
    """Serves until the other end hangs up."""

    def __init__(
        self, llm: Any, sampling_params: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """`sampling_params` makes SamplingParams of the params of a request."""
        self._llm = llm
        self._sampling_params = sampling_params
        self._reader = reader
        self._writer = writer
        self._results: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while line := await self._reader.readline():
            order = json.loads(line)
            if order["kind"] == "cancel":
                result = self._results.get(order["id"])
                if result is not None:
                    result.abort()
                continue
            task = asyncio.create_task(self._answer(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for result in list(self._results.values()):
            result.abort()

    async def _answer(self, order: dict[str, Any]) -> None:
        """One line for each iteration of the request, and one for its end."""
        request_id, num_sent, reason = order["id"], 0, None
        try:
            params = self._sampling_params(order["params"])
            result = self._llm.generate_async(order["prompt"], sampling_params=params, streaming=True)
            self._results[request_id] = result
            async for output in result:
                completion = output.outputs[0]
                token_ids = list(completion.token_ids)
                if token_ids[num_sent:]:
                    scores = _scores(token_ids[num_sent:], (completion.logprobs or [])[num_sent:])
                    num_top = order["params"].get("prompt_logprobs")
                    if num_top is not None and not num_sent:
                        scores |= _prompt_scores(order["prompt"], num_top, completion.prompt_logprobs)
                    self._send({"kind": "tokens", "id": request_id, "token_ids": token_ids[num_sent:], **scores})
                num_sent = len(token_ids)
                reason = completion.finish_reason
            self._send({"kind": "end", "id": request_id, "reason": reason or "cancelled"})
        except Exception as error:  # noqa: BLE001 - of this request
            self._send(
                {"kind": "end", "id": request_id, "reason": "error", "error": f"{type(error).__name__}: {error}"}
            )
        finally:
            self._results.pop(request_id, None)

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


def made_params(params: dict[str, Any]) -> Any:
    """tensorrt_llm.SamplingParams of JSON values; see `sampling.trtllm_params`."""
    params = dict(params)
    if "guided_decoding" in params:
        guided_decoding_params = import_module("tensorrt_llm.llmapi").GuidedDecodingParams
        params["guided_decoding"] = guided_decoding_params(**params["guided_decoding"])
    if "embedding_bias" in params:
        torch = import_module("torch")
        given = params["embedding_bias"]
        bias = torch.zeros(given["vocab_size"], dtype=torch.float32)
        for token_id, value in given["biases"].items():
            bias[int(token_id)] = value
        params["embedding_bias"] = bias
    return import_module("tensorrt_llm").SamplingParams(**params)


def _scores(token_ids: list[int], entries: list[Any]) -> dict[str, Any]:
    """Log probabilities of tokens, and those of the most likely ones; nothing where none were asked for."""
    if not entries:
        return {}
    if isinstance(entries[0], float):
        return {"logprobs": entries}
    rows = [{int(token_id): float(entry.logprob) for token_id, entry in row.items()} for row in entries]
    return {
        "logprobs": [row[token_id] for token_id, row in zip(token_ids, rows, strict=True)],
        "top": [sorted(row.items(), key=lambda item: (-item[1], item[0])) for row in rows],
    }


def _prompt_scores(prompt: list[int], num_top: int, entries: list[Any]) -> dict[str, Any]:
    """The same of the prompt, for all of its tokens but the first.

    Entry i is for token i + 1, the last one for the first new token (`_compute_pytorch_prompt_logprobs` in
    tensorrt_llm/executor/base_worker.py at 000bd1a6c3231651a9abe3cc6e7494042b6d2228).
    """
    if len(entries) != len(prompt):
        raise ValueError(f"{len(entries)} entries of prompt_logprobs for {len(prompt)} tokens")
    scores = _scores(prompt[1:], entries[:-1]) or {"logprobs": [], "top": []}
    return {"prompt": {"logprobs": scores["logprobs"], "top": [row[:num_top] for row in scores["top"]]}}


async def _serve(llm: Any, sampling_params: Any, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**30)
    await Worker(llm, sampling_params, reader, writer).serve()


def _first_line(connection: socket.socket) -> dict[str, Any]:
    """Read byte by byte, so that later lines stay in the socket."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            raise SystemExit(0)
        line += piece
    order: dict[str, Any] = json.loads(line)
    return order


def main(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    llm_args = _first_line(connection)["llm_args"]

    def say(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        tensorrt_llm = import_module("tensorrt_llm")
    except ImportError as error:
        say({"kind": "missing", "error": f"{type(error).__name__}: {error}"})
        return
    try:
        llm = tensorrt_llm.LLM(**llm_args)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other end reports it
        say({"kind": "failed", "error": f"{type(error).__name__}: {error}"})
        return
    try:
        say({"kind": "ready", "version": str(getattr(tensorrt_llm, "__version__", "unknown"))})
        asyncio.run(_serve(llm, made_params, connection))
    finally:
        llm.shutdown()


if __name__ == "__main__":  # ranks that TensorRT-LLM spawns import this file
    main(int(sys.argv[1]))
