"""One rank of a TensorRT engine in a process of its own: RANK NUM_RANKS TARGET DRAFTER STORE NCCL.

Everything around the engine is the product's: the process group over gloo, the communicator, the contexts that get it,
the executor and its checks. The engine is the interpreter, whose collectives call NCCL with the communicator that
their context was given; NCCL is a stand-in that sums what it gets. Rank 0 prints one JSON object.
"""

import ctypes
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorrt_rtx
import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.communicator import CAPSULE_NAME, Communicator
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.exchange_check import check_exchange
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor, captured_shapes
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineLimits
from tests.engines import PAGE_SIZE
from tests.logit_uses import answers
from tests.traces import SAMPLED, integers, trace
from tests.trt.fake_engine import USER_MANAGED, FakeContext, FakeEngine
from tests.trt.interpreter import NetworkInterpreter, Step
from tests.trt.networks import MAX_SEQ_LEN, DefinedStep, define_pair
from tests.trt.plugin_reference import PluginReference

CPU = torch.device("cpu")
REQUESTS: dict[str, Any] = {"samplings": SAMPLED, "num_draft_tokens": (3, 0, 3), "num_new": 6}
_LIMITS: dict[str, Any] = {
    "max_batch_size": 8,
    "max_seq_len": MAX_SEQ_LEN,
    "max_num_tokens": 64,
    "page_size": PAGE_SIZE,
}


class NcclInterpreter(NetworkInterpreter):
    """Collectives are calls of NCCL; deaf ones give back what they got."""

    communicator: int | None = None  # of the context that runs
    is_deaf = False

    def _dist_collective(self, layer: Any) -> Step:
        nccl, num_ranks, kind = ctypes.CDLL("libnccl.so.2"), layer.num_ranks, layer.name.split()[0]

        def exchange(given: list[Tensor]) -> list[Tensor]:
            x = given[0].contiguous()
            assert x.dtype == torch.float32 and self.communicator is not None
            out = x.new_empty(x.shape if kind == "ALL_REDUCE" else (num_ranks * len(x), *x.shape[1:]))
            pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
            count, float32, communicator = ctypes.c_size_t(x.numel()), 7, ctypes.c_void_p(self.communicator)
            if kind == "ALL_REDUCE":
                assert nccl.ncclAllReduce(*pointers, count, float32, 0, communicator, None) == 0
                return [x if self.is_deaf else out]
            assert nccl.ncclAllGather(*pointers, count, float32, communicator, None) == 0
            return [out]

        return exchange


class RankContext(FakeContext):
    """Runs with the communicator that it was given, and with none before."""

    communicator: int | None = None

    def set_communicator(self, capsule: Any) -> bool:
        read = ctypes.pythonapi.PyCapsule_GetPointer
        read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self.communicator = read(capsule, CAPSULE_NAME)
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.interpreter.communicator = self.communicator  # type: ignore[attr-defined]
        return super().execute_async_v3(stream)


class RankEngine(FakeEngine):
    def create_execution_context(self, strategy: str) -> FakeContext:
        made = super().create_execution_context(strategy)
        self.contexts[-1] = RankContext(made.interpreter, made.inputs, made.profiles)
        return self.contexts[-1]


class Graph:
    """A captured step, which can be seen to be gone."""

    def __init__(self, enqueue: Any) -> None:
        self.enqueue = enqueue

    def __call__(self) -> None:
        self.enqueue()


def make_engine(target: Path, drafter: Path, mapping: Mapping) -> tuple[RankEngine, DefinedStep]:
    defined = define_pair(tensorrt_rtx, target, drafter, mapping=mapping)

    class Step(DefinedStep):
        def interpreter(self, run_node: Any = None) -> NetworkInterpreter:
            return NcclInterpreter(self.trt, self.network, self.constants, (self.nodes, PluginReference()))

    step = Step(**vars(defined))
    limits = EngineLimits(max_draft_len=defined.spec.max_draft_len, **_LIMITS)
    return RankEngine(step, limits), step


def run_rank(rank: int, num_ranks: int, target: Path, drafter: Path, store: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=120.0)
    engine, defined = make_engine(target, drafter, Mapping(world_size=num_ranks, tp_size=num_ranks, rank=rank))
    interpreter: Any = engine.interpreter
    limits = ExecutorLimits(max_draft_len=defined.spec.max_draft_len, num_pages=256, max_prompt_scores=64, **_LIMITS)
    communicator = Communicator.join(ranks.shared_bytes, rank=rank, num_ranks=ranks.num_ranks)
    communicator.check_sum(CPU, 0)
    given = communicator.given_to(engine, mode="native", plugin_library=None)
    stream = SimpleNamespace(cuda_stream=0)
    captured = captured_shapes(defined.spec, limits, (3,))[:2]
    contexts = StepContexts(given, USER_MANAGED, stream, captured=captured, device=CPU)
    graphs: list[weakref.ref[Any]] = []

    def capture(enqueue: Any) -> Graph:
        graph = Graph(enqueue)
        graphs.append(weakref.ref(graph))
        return graph

    executor = TensorRTExecutor(contexts, defined.spec, limits, stream=stream, capture=capture, device=CPU)
    executor._owners = (engine,)
    executor._communicator = communicator
    executor.warm_up()
    check_exchange(executor, rank=rank, num_ranks=num_ranks)
    steps, _ = trace(executor, **REQUESTS)
    uses = answers(executor)
    interpreter.is_deaf = True
    try:
        check_exchange(executor, rank=rank, num_ranks=num_ranks)
        complaint = ""
    except EngineDirError as error:
        complaint = str(error)
    have_communicator = [context.communicator for context in engine.contexts]  # type: ignore[attr-defined]
    address, destroyed = communicator.address, []
    nccl, made = communicator._nccl, [*graphs, *map(weakref.ref, engine.contexts)]

    def destroy(handle: Any) -> int:
        """Notes what is still alive when the communicator goes."""
        destroyed.append(sum(item() is not None for item in made))
        return int(nccl.ncclCommDestroy(handle))

    communicator._nccl = SimpleNamespace(ncclCommDestroy=destroy)
    del engine, given, contexts, interpreter
    executor.close()
    executor.close()
    return {
        "steps": integers(steps),
        "uses of logits": uses,
        "complaint": complaint,
        "contexts": len(have_communicator),
        "contexts with the communicator": have_communicator.count(address),
        "graphs": len(graphs),
        "alive at the end": destroyed,
    }


if __name__ == "__main__":
    rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(sys.argv[6], ctypes.RTLD_GLOBAL)  # answers to the name libnccl.so.2 from now on
    found = run_rank(rank, num_ranks, *(Path(argument) for argument in sys.argv[3:6]))
    if rank == 0:
        sys.stdout.write(json.dumps(found))
