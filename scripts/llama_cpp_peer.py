"""llama.cpp as a side of scripts/bench_peers.py, in the environment of scripts/install_llama_cpp.

    python scripts/llama_cpp_peer.py CHECKPOINT f32|f16|q8_0|q4_0 NUM_THREADS

Writes the Qwen3 CHECKPOINT as GGUF without a tokenizer, loads it, and answers every line {"prompt", "max_new_tokens"}
of its input by {"tokens", "wall_s", "cpu_s"}: greedy, token ids in and out. Matrices have the type; norms are float32.
Pages are float32 for f32, else llama.cpp's default.
"""

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

_TYPES = {kind: gguf.GGMLQuantizationType[kind.upper()] for kind in ("f32", "f16", "q8_0", "q4_0")}
_CONTEXT = 2048


def write_gguf(checkpoint: Path, kind: str, to: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(to, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, values in _tensors(checkpoint):
        if (to_name := names.get_name(name, try_suffixes=(".weight",))) is None:
            sys.exit(f"{name}: GGUF has no name for it")
        stored = _TYPES[kind if values.ndim > 1 else "f32"]
        writer.add_tensor(to_name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """In float32, of bfloat16."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, header in json.loads(content[8:start]).items():
            if name == "__metadata__":
                continue
            if header["dtype"] != "BF16":
                sys.exit(f"{path}: {name}: expected BF16, found {header['dtype']}")
            first, stop = header["data_offsets"]
            halves = np.frombuffer(content[start + first : start + stop], np.uint16)
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(header["shape"])


class Llama:
    """A model and a context of one sequence."""

    def __init__(self, path: Path, *, has_float_pages: bool, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _CONTEXT
        params.n_threads = params.n_threads_batch = num_threads
        if has_float_pages:
            params.type_k = params.type_v = int(gguf.GGMLQuantizationType.F32)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            sys.exit(f"{path}: llama.cpp cannot load it")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tokens = [self._next(prompt)]
        while len(tokens) < max_new_tokens:
            tokens.append(self._next(tokens[-1:]))
        return tokens

    def _next(self, tokens: list[int]) -> int:
        given = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(given, len(tokens))):
            sys.exit("llama_decode failed")
        address = ctypes.cast(llama_cpp.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())


def main() -> None:
    checkpoint, kind, num_threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_gguf(checkpoint, kind, path)
        llama = Llama(path, has_float_pages=kind == "f32", num_threads=num_threads)
        print(json.dumps({"version": llama_cpp.__version__}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            tokens = llama.generate(asked["prompt"], asked["max_new_tokens"])
            wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
            print(json.dumps({"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
