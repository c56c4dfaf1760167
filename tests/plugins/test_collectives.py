"""The library's sums and joins over ranks, against numpy; see collectives_of_threads.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.building import BuiltLibrary, run_python
from tests.plugins.collectives_of_threads import COLLECTIVES, TYPES, outcome_of, values_of


@pytest.fixture(scope="module")
def results(built: BuiltLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("libraries")
    done = run_python("tests.plugins.collectives_of_threads", built.kernels, built.fake_nccl, directory)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_rank_gets_the_sum_and_its_parts_in_order(results: dict[str, Any], name: str, num_ranks: int) -> None:
    parts = [values_of(rank) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        expected = outcome_of(name, parts, rank).reshape(-1).tolist()
        assert results["ranks"][str(num_ranks)][str(rank)][name] == [expected] * len(TYPES)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("without", "communicator: expected one of 2 ranks, found none"),
        ("of another world", "communicator: expected one of 3 ranks, found one of 2"),
        ("after", "communicator: expected one of 2 ranks, found none"),
    ],
)
def test_a_collective_without_its_communicator_is_refused(results: dict[str, Any], when: str, message: str) -> None:
    for rank in ("0", "1"):
        assert message in results["ranks"]["2"][rank][when]


def test_elements_that_ranks_do_not_share_evenly_are_refused(results: dict[str, Any]) -> None:
    for rank in ("0", "1"):
        assert "as many elements for each of 2 ranks, found 49" in results["ranks"]["2"][rank]["uneven"]


def test_a_machine_without_nccl_is_told_of_it(results: dict[str, Any]) -> None:
    code, message = results["missing"]
    assert code == 1
    assert "NCCL: expected libnccl.so.2, found" in message
