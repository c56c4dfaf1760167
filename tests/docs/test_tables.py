"""Tables of the documentation against the code that they describe."""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dflash_trt.cli.main import cli
from dflash_trt.core.other_engines import field_of, hint_for
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS
from dflash_trt.engine_dir.manifest import EngineManifest
from dflash_trt.engine_dir.provenance import Provenance
from plugins.aot.compile import DEFAULT_ARCHITECTURES
from plugins.aot.variants import LibrarySpec
from scripts.docs_tables import tables, written_again
from tests.docs.pages import ROOT, Page

ENGINE_DIR = Page.read("docs/engine_dir.md")


def nested(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model and all models of its fields."""
    yield model
    for field in model.model_fields.values():
        for kind in models_in(field.annotation):
            yield from nested(kind)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


MODELS = dict.fromkeys(model for root in (EngineManifest, Provenance) for model in nested(root))


def documented_keys(model: type[BaseModel], page: Page) -> list[str]:
    """Keys of the table whose header names the model."""
    rows = [table.rows for table in page.tables if table.header[0] == f"key of `{model.__name__}`"]
    return [name for table in rows for row in table for name in re.findall(r"`(\w+)`", row[0])]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_page_lists_every_key_of_an_engine_directory_and_no_other(model: type[BaseModel]) -> None:
    assert sorted(documented_keys(model, ENGINE_DIR)) == sorted(model.model_fields)


def test_no_table_describes_a_model_that_is_gone() -> None:
    described = {table.header[0] for table in ENGINE_DIR.tables if table.header[0].startswith("key of ")}
    assert described == {f"key of `{model.__name__}`" for model in MODELS}


def test_a_key_that_is_not_documented_is_noticed() -> None:
    shortened = Page("engine_dir.md", re.sub(r"^\| `mask_token_id`.*\n", "", ENGINE_DIR.text, flags=re.MULTILINE))
    assert "mask_token_id" in documented_keys_of_all(ENGINE_DIR)
    assert "mask_token_id" not in documented_keys_of_all(shortened)


def documented_keys_of_all(page: Page) -> set[str]:
    return {key for model in MODELS for key in documented_keys(model, page)}


@pytest.mark.parametrize("row", Page.read("docs/from_vllm.md").tables[0].rows, ids=lambda row: row[2])
def test_options_of_other_engines_are_answered_with_ours(row: list[str]) -> None:
    """What the table says of a foreign name is what a command or a class says, at the place in the last column."""
    *foreign, ours = ([field_of(name) for name in re.findall(r"`([\w-]+)`", cell)] for cell in row[:-1])
    for place in row[-1].strip("`").split(", "):
        command = cli.commands.get(place)
        known = [str(param.opts[-1]) for param in command.params] if command else [f.name for f in SAMPLING_FIELDS]
        known = [field_of(name) for name in known] + ["no_prefix_caching"] * (place in ("run", "serve"))
        assert ours[0] in known, f"{place} has no {ours[0]}"
        for name in (name for names in foreign for name in names if name not in ours):
            assert hint_for(name, known).startswith(f"Use {ours[0]}."), f"{place}: {name}"


@pytest.mark.parametrize(("name", "table"), [(name, table) for name, of_page in tables().items() for table in of_page])
def test_a_generated_table_is_current(name: str, table: str) -> None:
    page = (ROOT / name).read_text()
    assert written_again(page, table) == page, "run `python -m scripts.docs_tables`"


def test_a_changed_table_is_written_again() -> None:
    page = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nafter\n"
    assert written_again(page, "| a | b |\n|---|---|\n| 5 | 6 |") == page.replace("| 1 | 2 |\n| 3 | 4 |", "| 5 | 6 |")


def test_the_page_shows_every_key_of_quantization() -> None:
    (example,) = [text for language, text in Page.read("docs/quantization.md").blocks if language == "yaml"]
    shown = set(re.findall(r"^  (?:  )?(\w+):", example, re.MULTILINE))
    known = {name for model in nested(QuantizationConfig) for name in model.model_fields}
    assert shown == known


def test_the_options_of_the_plugin_library_are_those_of_its_compiler() -> None:
    tables = [table for table in Page.read("plugins/README.md").tables if table.header[0] == "option"]
    listed = {row[0].strip("`"): row[1] for table in tables for row in table.rows}
    made = {f"--{item.name.replace('_', '-')}": item.default for item in fields(LibrarySpec)}
    made = {"--arch": DEFAULT_ARCHITECTURES, **made}
    assert listed == {name: ",".join(map(str, values)) for name, values in made.items()} | {"--jobs": "cores"}
