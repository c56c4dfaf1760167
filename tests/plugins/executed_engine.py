"""A whole TensorRT step whose plugin nodes are the plugin library's own launches; see executed_library.py.

    python -m tests.plugins.executed_engine LIBRARY DRIVER MANIFEST DIR

Everything but the nodes is the network that TensorRT-RTX holds, executed in PyTorch; pages are reached as on a GPU, by
the addresses in `state_pools`. Prints one JSON object.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx
import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.batch import StepSampling, run_batch
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.kernels.programs import PROGRAMS
from scripts import tensorrt_self_test as self_test
from tests import engines
from tests.engines import decode, make_executor
from tests.factories import make_target
from tests.plugins.c_api import PluginLibrary
from tests.plugins.delta_cases import NET, NUM_RECORDS
from tests.plugins.executed_library import ExecutingDriver
from tests.plugins.latent_cases import LATENT_DIM, ROPE_DIM
from tests.scored_pairs import SCORES, score_as
from tests.traces import GREEDY, integers, trace
from tests.trt import networks
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_SEQ_LEN
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import CPU, HOST_STREAM, LIMITS

KS = (3, 1)
FP8_PAGES = QuantizationSpec(
    target_kv=(LayerKvScales(k=0.02, v=0.01), LayerKvScales(k=0.03, v=0.01)), draft_kv=(LayerKvScales(k=0.03, v=0.007),)
)


class LibraryNodes:
    """Runs plugin nodes through the library's C interface."""

    def __init__(self, library: PluginLibrary) -> None:
        self._library = library
        self._inputs = {plugin.name: plugin.input_names for plugin in PROGRAMS}

    def __call__(self, node: Any, given: list[Tensor]) -> list[Tensor]:
        named = {name: tensor.contiguous() for name, tensor in zip(self._inputs[node.name], given, strict=True)}
        outputs = self._library(node.name, named, node.fields)
        return outputs or [torch.zeros(1, dtype=torch.int32)]  # of WriteDraftContext, which has no value


def open_engine(pair: Any, nodes: LibraryNodes, *, pages: Any = None, spoil: Any = None, **options: Any) -> Any:
    defined = networks.define_pair(tensorrt_rtx, *pair, pages=pages, **options)
    plugin_nodes = defined.nodes
    if spoil is not None:
        spoil(plugin_nodes)
    limits = ExecutorLimits(
        max_batch_size=8,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=64,
        max_draft_len=defined.spec.max_draft_len,
        page_size=LIMITS.page_size,
        num_pages=64,
    )
    engine = FakeEngine(defined, LIMITS, run_node=nodes)
    contexts = StepContexts(engine, USER_MANAGED, HOST_STREAM, captured=(), device=CPU)
    return TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=None, device=CPU)


def canary(executor: Any) -> str:
    try:
        return check_pages(executor)
    except EngineDirError as error:
        return str(error)


def without_address(pair: Any, nodes: LibraryNodes) -> str:
    """An address of 0 in the table."""
    executor = open_engine(pair, nodes)
    executor.state.tensors["state_pools"][1] = 0
    return canary(executor)


def of_one_state_twice(plugin_nodes: list[Any]) -> None:
    plugin_nodes[1].fields["state"] = plugin_nodes[0].fields["state"]


def past_the_own_pages(executor: Any) -> str:
    """A pool that begins a page late: rows land where nobody reads them."""
    pools, first = executor.state.tensors["state_pools"], executor.state.pages["target_kv.0"]
    pools[0] += first[0].nbytes
    return canary(executor)


HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": NET.num_key_heads,
    "linear_num_value_heads": NET.num_value_heads,
    "linear_key_head_dim": NET.key_head_dim,
    "linear_value_head_dim": NET.value_head_dim,
    "linear_conv_kernel_dim": NET.conv_size,
}


def make_hybrid(root: Path) -> Any:
    """Of the sizes that the library has kernels for."""
    options = {"num_layers": 1, "target_layer_ids": (0, 2), "head_dim": 16, "block_size": NUM_RECORDS}
    return make_pair(root, family="qwen3_5_text", target=HYBRID, **options)


def same_verified(ours: Any, pair: Any) -> bool:
    """The tokens of a trace whose blocks are cut at each of their tokens, beside prompts of two chunks."""
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    texts = trace(theirs, GREEDY[:2], num_draft_tokens=(0,), num_new=9)[1]
    proposals = [[(token + (i % 3 == 2)) % 12 for i, token in enumerate(text.tokens)] for text in texts]
    options: dict[str, Any] = {"num_draft_tokens": (3, 0, 2), "num_new": 8, "chunk": 6, "proposals": proposals}
    expected, found = (trace(executor, GREEDY[:2], **options)[0] for executor in (theirs, ours))
    assert {row.num_accepted for step in expected for row in step} == {0, 1, 2}
    return integers(found) == integers(expected)


def same_again(ours: Any) -> bool:
    """A step that runs twice folds its records once."""
    prompt = sequence_batch([5, 9, 2], page_size=LIMITS.page_size, num_draft_tokens=3)
    block = sequence_batch([4, 1, 7, 7], page_size=LIMITS.page_size, context_len=3, num_draft_tokens=3)
    after = sequence_batch([8, 1], page_size=LIMITS.page_size, context_len=6, num_draft_tokens=3)
    found = [
        [run_batch(ours, batch) for batch in batches]
        for batches in ((prompt, block, after), (prompt, block, block, after, after))
    ]
    (_, once, last), (_, first, second, behind, again) = found
    return once == first == second and last == behind == again


def late(executor: Any, name: str) -> str:
    """A state, or a part of one, that begins a page or slot late."""
    index = list(executor.state.contents).index(name)
    executor.state.tensors["state_pools"][index] += executor.state.contents[name][0].nbytes
    return canary(executor)


def hybrid(pair: Any, nodes: LibraryNodes) -> dict[str, Any]:
    without = open_engine(pair, nodes)
    without.state.tensors["state_pools"][0] = 0
    return {
        "tokens": same_verified(open_engine(pair, nodes), pair),
        "again": same_again(open_engine(pair, nodes)),
        "chained": chained_steps(open_engine(pair, nodes), pair, self_test.GREEDY[:1]),
        "canary": canary(open_engine(pair, nodes)),
        "no address": canary(without),
        "a slot late": late(open_engine(pair, nodes), "target_state.2.deltas"),
        "one state twice": canary(open_engine(pair, nodes, spoil=of_one_net_twice)),
    }


def chained_steps(ours: Any, pair: Any, samplings: tuple[StepSampling, ...]) -> str:
    """What the self test says of them."""
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    theirs.limits = replace(theirs.limits, max_draft_len=ours.limits.max_draft_len)
    return self_test._chain(theirs, ours, 12, samplings)


def of_one_net_twice(plugin_nodes: list[Any]) -> None:
    first, second = (node for node in plugin_nodes if node.name == "GatedDelta")
    second.fields["state"] = first.fields["state"]


def make_chain(root: Path) -> Any:
    """Of the sizes that the library has kernels for. PyPI `speculators` writes the head."""
    from tests.eagle3_files import save_eagle3_head

    target = make_target(root / "target", num_hidden_layers=2, head_dim=16, vocab_size=12, tokenizer=False)
    return target, save_eagle3_head(root / "drafter", target_dir=target, aux_hidden_state_layer_ids=(2, 1))


def chain(pair: Any, nodes: LibraryNodes) -> dict[str, Any]:
    options = {"max_draft_len": KS[0]}
    late_rows = open_engine(pair, nodes, **options)
    return {
        "tokens": same_tokens(open_engine(pair, nodes, **options), pair),
        "rejection sampling": chained_steps(open_engine(pair, nodes, **options), pair, self_test.REJECTION),
        "canary": canary(open_engine(pair, nodes, **options)),
        "a page late": late(late_rows, "draft_features"),
    }


def make_latents(root: Path) -> Any:
    """Of the sizes that the library has kernels for, without experts."""
    sizes = {"kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": ROPE_DIM, "first_k_dense_replace": 2}
    options = {"num_layers": 1, "target_layer_ids": (0, 1), "head_dim": 16}
    return make_pair(root, family="deepseek_v3", target={"num_hidden_layers": 2} | sizes, **options)


def latents(pair: Any, nodes: LibraryNodes) -> dict[str, Any]:
    return {
        "tokens": same_tokens(open_engine(pair, nodes), pair),
        "FP8 pages": same_tokens(open_engine(pair, nodes, pages=FP8_PAGES), pair, pages=FP8_PAGES),
        "a prompt attended directly": same_after_a_long_prompt(open_engine(pair, nodes), pair),
        "canary": canary(open_engine(pair, nodes)),
        "no address": without_address(pair, nodes),
    }


def same_after_a_long_prompt(ours: Any, pair: Any) -> bool:
    """Of as many tokens as the step may have; its last token depends on all of them."""
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    prompt = [index * index % 11 for index in range(64)]
    expected, found = (decode(x, prompt, 3, num_draft_tokens=1) for x in (theirs, ours))
    assert max(abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True)) < 1e-4
    return found.tokens == expected.tokens


def same_tokens(ours: Any, pair: Any, *, pages: Any = None) -> bool:
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN, quantization=pages)
    expected, found = (trace(x, GREEDY[:1], num_draft_tokens=KS, num_new=4)[0] for x in (theirs, ours))
    return integers(found) == integers(expected)


def main() -> dict[str, Any]:
    library_path, driver_path, manifest_path, root = (Path(argument) for argument in sys.argv[1:])
    driver = ExecutingDriver(driver_path, manifest_path)
    nodes = LibraryNodes(PluginLibrary(library_path))
    pair = make_pair(root, target={"num_hidden_layers": 2}, num_layers=1, target_layer_ids=(0, 1), head_dim=16)
    results: dict[str, Any] = {"tokens": {}, "canary": {}}
    results["tokens"]["FP8 pages"] = same_tokens(open_engine(pair, nodes, pages=FP8_PAGES), pair, pages=FP8_PAGES)
    with pytest.MonkeyPatch.context() as patch:
        score_as(patch, SCORES["sinks, a scale and a soft cap"], engines, networks)
        results["tokens"]["sinks, a scale and a soft cap"] = same_tokens(open_engine(pair, nodes), pair)
    results["rejection sampling"] = chained_steps(open_engine(pair, nodes), pair, self_test.REJECTION)
    results["canary"]["with drafts"] = canary(open_engine(pair, nodes))
    results["canary"]["without drafts"] = canary(open_engine(pair, nodes, max_draft_len=0))
    results["canary"]["an address of 0"] = without_address(pair, nodes)
    results["canary"]["one state twice"] = canary(open_engine(pair, nodes, spoil=of_one_state_twice))
    results["canary"]["a page late"] = past_the_own_pages(open_engine(pair, nodes))
    results["hybrid"] = hybrid(make_hybrid(root / "hybrid"), nodes)
    has_writer = importlib.util.find_spec("speculators") is not None
    results["chain"] = chain(make_chain(root / "chain"), nodes) if has_writer else None
    results["latents"] = latents(make_latents(root / "latents"), nodes)
    results["errors"] = driver.errors
    return results


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
