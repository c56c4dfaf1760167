"""Plans as streams, through TensorRT-RTX's own writer, and through readers that behave as TensorRT's do."""

from types import SimpleNamespace

import pytest

from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.plan_stream import READ_BYTES, read_plan, write_plan
from dflash_trt.core.errors import BuildError

PLAN = bytes(range(256)) * 8


class Chunks:
    """A sink that keeps what it gets, up to a size."""

    def __init__(self, max_bytes=1 << 30):
        self.content, self.max_bytes = b"", max_bytes

    def write(self, chunk):
        if len(self.content) + len(chunk) > self.max_bytes:
            raise BuildError("the disk is full")
        self.content += bytes(chunk)


def tiny_network(trt):
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (4, 4))
    y = network.add_unary(x, trt.UnaryOperation.NEG).get_output(0)
    network.mark_output(y)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    return logger, builder, network, config


def test_a_streamed_plan_is_as_large_as_one_in_memory(trt):
    owner, builder, network, config = tiny_network(trt)
    sink = Chunks()
    num_bytes = write_plan(trt, builder, network, config, sink)
    assert num_bytes == len(sink.content) == builder.build_serialized_network(network, config).nbytes
    assert owner.errors == [] or all("cuda" in line.lower() for line in owner.errors)


def test_an_error_of_the_disk_arrives_although_tensorrt_ignores_it(trt):
    _, builder, network, config = tiny_network(trt)
    with pytest.raises(BuildError, match="the disk is full"):
        write_plan(trt, builder, network, config, Chunks(max_bytes=100))


def test_a_builder_without_streams_gives_the_plan_at_once():
    plan = SimpleNamespace(build_serialized_network=lambda network, config: Plan(PLAN))
    sink = Chunks()
    assert write_plan(None, plan, None, None, sink) == len(PLAN)
    assert sink.content == PLAN


class Plan(bytearray):
    """Has the buffer protocol and `nbytes`, as IHostMemory."""

    nbytes = property(len)


class Runtime:
    """Reads a header, seeks as TensorRT's reader may, and asks until it has all."""

    def deserialize_cuda_engine(self, source):
        if not hasattr(source, "seek") or not hasattr(source, "error"):
            return bytes(source)
        content = source.read(16, 0)
        assert source.seek(-16, 1) and source.seek(8, 0)
        content = content[:8]
        while chunk := source.read(10 * READ_BYTES, 0):
            assert len(chunk) <= READ_BYTES
            content += chunk
        return content


STREAMS = SimpleNamespace(IStreamReaderV2=type("IStreamReaderV2", (), {"__init__": lambda self: None}))


@pytest.mark.parametrize("module", [STREAMS, SimpleNamespace()], ids=["a stream", "a mapped file"])
def test_a_plan_is_read_whole(tmp_path, module, monkeypatch):
    monkeypatch.setattr("dflash_trt.backends.tensorrt.plan_stream.READ_BYTES", 100)
    monkeypatch.setattr("tests.trt.test_plan_stream.READ_BYTES", 100)
    (tmp_path / "rank0.engine").write_bytes(PLAN)
    assert read_plan(module, Runtime(), tmp_path / "rank0.engine") == PLAN


def test_an_error_of_the_reader_arrives(tmp_path):
    class Seeking:
        def deserialize_cuda_engine(self, source):
            assert source.seek(-1, 0) is False
            assert source.read(-(1 << 70), 0) == b""

    (tmp_path / "rank0.engine").write_bytes(PLAN)
    with pytest.raises(OSError, match="Invalid argument"):
        read_plan(STREAMS, Seeking(), tmp_path / "rank0.engine")


@pytest.mark.parametrize("name", ["tensorrt_rtx", "tensorrt_lean"])
def test_the_classes_of_streams_are_those_of_the_real_modules(name):
    module = pytest.importorskip(name)

    for stream, methods in ((module.IStreamReaderV2, ("read", "seek")), (module.IStreamWriter, ("write",))):
        assert all(callable(getattr(stream, method)) for method in methods)  # making a reader takes a driver
    positions = module.SeekPosition
    assert [int(each) for each in (positions.SET, positions.CUR, positions.END)] == [0, 1, 2]  # as os.SEEK_*
