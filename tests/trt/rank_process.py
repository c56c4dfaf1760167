"""One rank of a TensorRT engine in a process of its own: RANK NUM_RANKS TARGET DRAFTER STORE NCCL KIND.

Ranks of KIND "tp" divide attention, those of "dp" have requests of their own, which are the same ones here.

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
from dflash_trt.backends.tensorrt.exchange_check import check_exchange, check_shared_rows
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

_NCCL: Any = None  # the stand-in
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
        num_ranks, kind = layer.num_ranks, layer.name.split()[0]
        collectives = {
            "ALL_REDUCE": self._all_reduce,
            "ALL_GATHER": self._all_gather,
            "REDUCE_SCATTER": self._reduce_scatter,
            "ALL_TO_ALL": self._all_to_all,
        }

        def exchange(given: list[Tensor]) -> list[Tensor]:
            assert self.communicator is not None
            x = given[0].contiguous().view(torch.float32)  # integers are moved alone
            return [collectives[kind](x, num_ranks).view(given[0].dtype)]

        return exchange

    def _all_reduce(self, x: Tensor, num_ranks: int) -> Tensor:
        out = torch.empty_like(x)
        self._call("ncclAllReduce", x, out, x.numel(), 0)
        return x if self.is_deaf else out

    def _all_gather(self, x: Tensor, num_ranks: int) -> Tensor:
        out = x.new_empty(num_ranks * len(x), *x.shape[1:])
        self._call("ncclAllGather", x, out, x.numel())
        return out

    def _reduce_scatter(self, x: Tensor, num_ranks: int) -> Tensor:
        out = x.new_empty(len(x) // num_ranks, *x.shape[1:])
        self._call("ncclReduceScatter", x, out, out.numel(), 0)
        return x[: len(out)] if self.is_deaf else out

    def _all_to_all(self, x: Tensor, num_ranks: int) -> Tensor:
        out = torch.empty_like(x)
        assert _NCCL.ncclGroupStart() == 0
        for peer, (sent, received) in enumerate(zip(x.chunk(num_ranks), out.chunk(num_ranks), strict=True)):
            for name, part in (("ncclSend", sent), ("ncclRecv", received)):
                self._call(name, part, None, part.numel(), peer)
        assert _NCCL.ncclGroupEnd() == 0
        return out

    def _call(self, name: str, x: Tensor, out: Tensor | None, count: int, *options: int) -> None:
        """With float32, and the operation or the other rank of `options`."""
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out) if tensor is not None]
        more = (ctypes.c_size_t(count), 7, *options, ctypes.c_void_p(self.communicator), None)
        assert getattr(_NCCL, name)(*pointers, *more) == 0


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


def run_rank(
    rank: int, num_ranks: int, target: Path, drafter: Path, store: Path, *, has_own_requests: bool
) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=120.0)
    sizes = {"dp_size" if has_own_requests else "tp_size": num_ranks}
    engine, defined = make_engine(target, drafter, Mapping(world_size=num_ranks, rank=rank, **sizes))

    def check() -> None:
        if has_own_requests:
            check_shared_rows(executor, ranks)
        else:
            check_exchange(executor, rank=rank, num_ranks=num_ranks)

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
    check()
    steps, _ = trace(executor, **REQUESTS)
    uses = answers(executor)
    interpreter.is_deaf = True
    try:
        check()
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
    _NCCL = ctypes.CDLL(sys.argv[6], ctypes.RTLD_GLOBAL)  # answers to the name libnccl.so.2 from now on
    paths = [Path(argument) for argument in sys.argv[3:6]]
    found = run_rank(rank, num_ranks, *paths, has_own_requests=sys.argv[7] == "dp")
    if rank == 0:
        sys.stdout.write(json.dumps(found))
