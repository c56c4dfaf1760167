"""Every published config.json at hand: read whole, or refused for a reason of its model that docs/models.md gives."""

import re
from pathlib import Path

import pytest

from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.errors import ConfigError
from scripts.published_configs import read_config, repositories, write_checkpoint
from scripts.published_shapes import TARGETS, write_shape
from tests.published_pairs import needs_published_configs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
NUM_FILES, NUM_READ = 89, 57


@needs_published_configs
def test_as_many_files_are_read_as_the_page_says() -> None:
    assert len(repositories()) == NUM_FILES
    assert len(re.findall(r"^\| `[\w./-]+` \|", PAGE, re.MULTILINE)) == NUM_READ


@needs_published_configs
@pytest.mark.parametrize("repository", repositories())
def test_a_published_file_is_read_or_refused_for_what_its_model_needs(repository: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, repository)
    row = re.search(rf"^\| `{re.escape(repository)}` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    if row is None:
        (reason,) = re.findall(rf"^- (.*)\. Refused: .*`{re.escape(repository)}`", PAGE, re.MULTILINE)
        with pytest.raises(ConfigError, match=re.escape(reason)):
            read_specs(checkpoint, None)
        return
    specs = read_specs(checkpoint, None)
    formats = set(specs.quantization.linears.values())
    found = formats | ({"fp8 K/V"} if specs.quantization.target_kv else set())
    assert (specs.target.family, found or {"unquantized"}) == (row[1], set(row[2].split(", ")))
    fields = read_config(repository)
    inner = fields.get("text_config", fields)
    assert (specs.target.num_layers, specs.target.hidden_size) == (inner["num_hidden_layers"], inner["hidden_size"])


@needs_published_configs
@pytest.mark.parametrize("name", sorted(TARGETS.keys() & set(repositories())))
def test_the_shapes_of_known_pairs_are_those_of_the_published_files(name: str, tmp_path: Path) -> None:
    ours = read_specs(write_shape(tmp_path / "ours", name), None).target
    theirs = read_specs(write_checkpoint(tmp_path / "theirs", name), None).target
    assert (ours.layers, ours.hidden_size, ours.vocab_size) == (theirs.layers, theirs.hidden_size, theirs.vocab_size)
