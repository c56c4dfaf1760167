"""A stream of Triton Inference Server over gRPC: `python examples/triton_client.py 127.0.0.1:8001 'import os'`.

Needs `pip install 'tritonclient[grpc]'`. The model is the one that `dflash-trt deploy triton` writes.
"""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

MODEL = "dflash"


def tensor(name: str, value: Any, dtype: str) -> grpc.InferInput:
    array = np.array([value], dtype={"BYTES": object, "INT32": np.int32, "BOOL": bool}[dtype])
    given = grpc.InferInput(name, [1], dtype)
    given.set_data_from_numpy(array)
    return given


def main() -> None:
    url, prompt = sys.argv[1:]
    inputs = [
        tensor("text_input", prompt.encode(), "BYTES"),
        tensor("max_tokens", 32, "INT32"),
        tensor("stream", True, "BOOL"),
    ]
    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get(timeout=60)
            if error is not None:
                raise error
            if (text := result.as_numpy("text_output")) is not None:
                print(text[0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
    print()


if __name__ == "__main__":
    main()
