"""Plans as streams: TensorRT writes a plan while it serializes, and reads it while it deserializes.

The module in use is asked for its streams; one without them gets the whole plan at once. TensorRT prints an exception
of a stream and goes on, so a stream keeps its first one, which is raised when TensorRT has returned.
"""

import mmap
from pathlib import Path
from typing import Any, BinaryIO, Final

from dflash_trt.engine_dir.tensor_file import ByteSink

READ_BYTES: Final = 64 * 2**20  # at a time; TensorRT asks again for the rest


class NoBytes:
    """A sink that keeps nothing, for a plan that only shows that TensorRT can make it."""

    def write(self, chunk: bytes | memoryview, /) -> None:
        """Drop the chunk."""


def write_plan(trt: Any, builder: Any, network: Any, config: Any, sink: ByteSink) -> int | None:
    """Build the network into `sink`; the size of the plan, or None if TensorRT could not build it.

    Raises:
        Exception: the first one of `sink`.
    """
    if not hasattr(builder, "build_serialized_network_to_stream"):
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            return None
        sink.write(memoryview(plan))
        return int(plan.nbytes)
    writer = _make_writer(trt, sink)
    is_built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.error is not None:
        raise writer.error
    return writer.num_bytes if is_built else None


def read_plan(trt: Any, runtime: Any, path: Path) -> Any:
    """The deserialized engine, or None if TensorRT refuses it. Without streams the file is mapped.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if not hasattr(trt, "IStreamReaderV2"):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
                return runtime.deserialize_cuda_engine(plan)
        reader = _make_reader(trt, file)
        engine = runtime.deserialize_cuda_engine(reader)
        if reader.error is not None:
            raise reader.error
        return engine


def _make_writer(trt: Any, sink: ByteSink) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # the base comes from a module chosen at run time
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.num_bytes = 0
            self.error: BaseException | None = None

        def write(self, chunk: bytes) -> int:
            """Bytes taken: all, or none after an error."""
            if self.error is not None:
                return 0
            try:
                sink.write(chunk)
            except BaseException as error:  # noqa: BLE001 - raised when TensorRT has returned
                self.error = error
                return 0
            self.num_bytes += len(chunk)
            return len(chunk)

    return Writer()


def _make_reader(trt: Any, file: BinaryIO) -> Any:
    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]  # the base comes from a module chosen at run time
        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)
            self.error: BaseException | None = None

        def read(self, num_bytes: int, stream: int) -> bytes:
            """At most READ_BYTES; none ends the deserialization."""
            try:
                return file.read(min(num_bytes, READ_BYTES))
            except BaseException as error:  # noqa: BLE001 - raised when TensorRT has returned
                self.error = self.error or error
                return b""

        def seek(self, offset: int, where: Any) -> bool:
            """SeekPosition counts as `os.SEEK_*` do."""
            try:
                file.seek(offset, int(where))
            except BaseException as error:  # noqa: BLE001 - raised when TensorRT has returned
                self.error = self.error or error
                return False
            return True

    return Reader()
