"""Which tests CI leaves out for their time: writes tests/slow_tests.txt from the durations that `scripts/test` keeps.

    python -m scripts.slow_tests build/tests_kernels.xml build/tests_rest.xml

Of a test with many long cases CI runs every fifth, the shortest first, and none of a single test that takes very long.
Tests that ran are judged anew; the others stay as they are, so that the reports of a part of the tests will do.
`scripts/test -m slow` runs what CI leaves out.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/slow_tests.txt"
MAX_CASE_S, MAX_TEST_S, EVERY = 1.5, 8.0, 5
NEEDED = (  # whatever they take: nothing else shows what they do
    "tests/contributing/test_kernel_recipes.py::test_the_new_operation_runs_in_the_library_and_is_documented",
    "tests/docs/test_commands.py::test_commands_run[docs/simulation.md]",
    "tests/docs/test_commands.py::test_commands_run[docs/start_gpu.md]",
    "tests/docs/test_commands.py::test_commands_run[docs/start_laptop.md]",
    "tests/docs/test_models.py::test_the_page_is_what_the_back_ends_say_now",
    "tests/docs/test_published_speeds.py::test_every_tenth_series_is_planned_as_the_page_says",
    "tests/docs/test_site.py::test_every_page_is_in_the_navigation",
    "tests/kernels/test_aot.py::test_every_kernel_compiles_for_hopper_and_blackwell_without_a_gpu",
    "tests/kernels/test_aot.py::test_no_attention_kernel_spills_registers_and_several_share_a_multiprocessor",
    "tests/kernels/test_drafter_variants.py::test_the_kernels_compile_without_spills_and_several_share_a_multiprocessor",
    "tests/kernels/test_fixed_variants.py::test_the_kernels_compile_without_spills_and_use_the_tensor_cores_of_each_architecture",
    "tests/kernels/test_gated_delta_variants.py::test_the_kernels_compile_without_spills_and_several_share_a_multiprocessor",
    "tests/kernels/test_gpu_visit.py::test_a_dry_run_leaves_json_and_tables_and_is_resumed",
    "tests/kernels/test_latent_variants.py::test_the_kernels_compile_without_spills_in_the_loop",
    "tests/kernels/test_packed_variants.py::test_the_kernels_compile_without_spills_and_use_the_tensor_cores_of_each_architecture",
    "tests/kernels/test_wide_heads.py::test_no_kernel_for_heads_of_512_spills_registers",
    "tests/scheduler/test_data_parallel.py::TestDataParallelServing::runTest",
    "tests/scheduler/test_scheduler_laws.py::TestServing::runTest",
    "tests/servers/dynamo/test_lifecycle.py::test_a_killed_replica_loses_only_its_requests_and_comes_back",
    "tests/servers/dynamo/test_lifecycle.py::test_every_socket_listens_on_loopback",
    "tests/test_slow_tests.py::test_every_listed_test_is_there",
    "tests/triton_server/test_ranks.py::test_eight_clients_get_the_tokens_of_one_rank",
)


def durations(report: Path) -> Iterator[tuple[str, float]]:
    """Node ids and seconds of a report in JUnit's format, skipped tests left out."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            yield _node_id(case.get("classname", ""), case.get("name", "")), float(case.get("time", 0))


def _node_id(class_name: str, name: str) -> str:
    """The parts of `class_name` are those of the file's path, then of classes."""
    parts = class_name.split(".")
    depth = next(i for i in range(1, len(parts) + 1) if (ROOT / "/".join(parts[:i])).with_suffix(".py").is_file())
    return "::".join([f"{'/'.join(parts[:depth])}.py", *parts[depth:], name])


def slow_tests(seconds: Mapping[str, float]) -> set[str]:
    cases: dict[str, list[str]] = defaultdict(list)
    for node_id in sorted(seconds, key=seconds.__getitem__):
        cases[node_id.partition("[")[0]].append(node_id)
    slow: set[str] = set()
    for node_ids in cases.values():
        long = [node_id for node_id in node_ids if seconds[node_id] > MAX_CASE_S]
        if len(node_ids) > 1:
            slow |= {node_id for i, node_id in enumerate(long) if i % EVERY}
        else:
            slow |= {node_id for node_id in node_ids if seconds[node_id] > MAX_TEST_S}
    return slow.difference(NEEDED)


def listed() -> set[str]:
    return set(LIST.read_text().splitlines())


def write(node_ids: Iterable[str]) -> None:
    LIST.write_text("".join(f"{node_id}\n" for node_id in sorted(node_ids)))


def main() -> int:
    seconds = {node_id: taken for name in sys.argv[1:] for node_id, taken in durations(Path(name))}
    slow = slow_tests(seconds)
    write(slow | (listed() - seconds.keys()))
    print(f"{len(slow)} of {len(seconds)} tests, {sum(seconds[x] for x in slow):.0f} of {sum(seconds.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
