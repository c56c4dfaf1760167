"""The Kubernetes example has real options of our worker and of Dynamo's front end, and a GPU for each replica."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dflash_trt.cli.main import cli
from dflash_trt.cli.serve import worker
from tests.docs.pages import ROOT, Page

EXAMPLE = ROOT / "examples" / "kubernetes" / "gpt-oss-120b.yaml"
OPERATOR_VARIABLES = {"DYN_NAMESPACE"}  # which Dynamo's operator sets in every pod


@pytest.fixture(scope="module")
def components() -> dict[str, dict[str, Any]]:
    graph = yaml.safe_load(EXAMPLE.read_text())
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    return {component["type"]: component for component in graph["spec"]["components"]}


def container(component: dict[str, Any]) -> dict[str, Any]:
    (main,) = component["podTemplate"]["spec"]["containers"]
    assert main["name"] == "main"  # the one that the operator fills in
    found: dict[str, Any] = main
    return found


def parsed(words: list[str]) -> dict[str, Any]:
    """Options of `dflash-trt worker`; raises click.UsageError."""
    return worker.make_context("worker", words).params


def test_the_worker_takes_its_options(components: dict[str, dict[str, Any]]) -> None:
    main = container(components["worker"])
    program, command, *words = [*main["command"], *main["args"]]
    assert (program, command) == ("dflash-trt", "worker")
    assert cli.get_command(click.Context(cli), command) is worker
    options = parsed(words)
    assert options["engine_dir"] == Path("/engines/gpt-oss-120b")
    assert options["discovery_backend"] == "kubernetes"
    assert options["namespace"] == "$(DYN_NAMESPACE)" and options["namespace"][2:-1] in OPERATOR_VARIABLES
    assert options["max_queue_len"] == 64
    with pytest.raises(click.UsageError):
        parsed([*words, "--no-such-option", "1"])


def test_a_replica_has_one_gpu_and_the_nodes_are_full(components: dict[str, dict[str, Any]]) -> None:
    limits = container(components["worker"])["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == 1
    assert components["worker"]["replicas"] * int(limits["nvidia.com/gpu"]) % 8 == 0


def test_the_front_end_takes_its_options_and_speaks_over_the_planes_of_the_worker(
    components: dict[str, dict[str, Any]],
) -> None:
    main = container(components["frontend"])
    assert main["command"] == ["python", "-m", "dynamo.frontend"]
    words = main["args"]
    helped = subprocess.run(
        [sys.executable, "-m", "dynamo.frontend", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert helped.returncode == 0, helped.stderr
    for option in words[::2]:
        assert option in helped.stdout, f"{option} is no option of Dynamo's front end"
    given = dict(zip(words[::2], words[1::2], strict=True))
    options = parsed([*container(components["worker"])["command"][2:], *container(components["worker"])["args"]])
    assert given["--request-plane"] == options["request_plane"] and given["--event-plane"] == options["event_plane"]


def test_every_mounted_volume_is_there(components: dict[str, dict[str, Any]]) -> None:
    for component in components.values():
        volumes = {volume["name"] for volume in component["podTemplate"]["spec"]["volumes"]}
        mounts = container(component)["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes
        assert {mount["mountPath"] for mount in mounts} == {"/engines"}


def test_the_page_applies_the_example() -> None:
    words = [shlex.split(command.text) for command in Page.read("docs/scaling.md").commands]
    (applied,) = [command[3] for command in words if command[:3] == ["kubectl", "apply", "-f"]]
    assert ROOT / applied == EXAMPLE
