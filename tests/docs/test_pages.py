"""Files, names and links that the documentation mentions exist."""

import re
import subprocess
from functools import cache
from pathlib import PurePosixPath

import pytest

from tests.docs.pages import PAGES, ROOT, Page

LANGUAGES = {"bash", "console", "python", "yaml", "ini", "text"}

# What commands write, other software has, or a user brings.
_FOREIGN_PATHS = re.compile(
    r"build/|\.venv|\.triton_server|/v2/|tokenizer/|include/$|OUT/|bin/|rank\d|rank\{r\}|\.NAME|"
    r"(llm_args|model|build)\.yaml$|^(target|drafter)/$|"
    r"(config|provenance|hf_quant_config|results)\.(json|jsonl|jsonl\.partial|md)$|cubins\.bin$|"
    r"(prompts|held_out)\.jsonl$|config\.pbtxt$|CONFIG\.yaml$|triton_backend/|libpython|libcuda|cuda\.h$|NvInferRuntime\.h$|nvcr\.io|"
    r"(lib)?dflash_trt_(kernels|plugin)\.so$|launch_rules\.h$|manifest\.json$|engine/|(convert_checkpoint|quantize|fill_template)\.py$"
)
_FOLDERS = "dflash_trt|docs|plugins|scripts|tests"
_SUFFIXES = "py|md|json|jsonl|yaml|h|so|txt|safetensors|pbtxt|bin|toml"
_PATH = re.compile(rf"[\w.*{{}}/-]+(/|\.({_SUFFIXES}))|({_FOLDERS})/[\w.*/-]+")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
_FOREIGN_NAMES = {
    "NCCL_IB_HCA",
    "DISTRIBUTIVE_INDEPENDENCE",
    "getAliasedInput",
    "getAliasedInputTensor",
    "host_kv_cache_pool_pointers",
    "USER_MANAGED",
    "client_timeout",
    "start_stream",
    "IMoELayer",
    "free_gpu_memory_fraction",
    "draft_len_schedule",
}  # of TensorRT, tritonclient and TensorRT-LLM


@cache
def tracked() -> list[str]:
    """Files of the checkout, those that are not committed yet among them."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    files = [
        inner for path in paths for inner in (path.iterdir() if path.is_dir() else [path])
    ]  # build_configs is a link
    return [str(path.relative_to(ROOT)) for path in files if path.is_file()]


@cache
def known_words() -> set[str]:
    """Every word of the sources: whatever the documentation names is one of them."""
    suffixes = {".py", ".cpp", ".h", ".yaml", ".toml", ".txt", ".json", ""}
    sources = [
        name
        for name in tracked()
        if PurePosixPath(name).suffix in suffixes and not name.startswith(("tests/data/", "tests/docs/"))
    ]
    return {word for name in sources for word in re.findall(r"\w+", (ROOT / name).read_text(errors="ignore"))}


@cache
def files_and_folders() -> frozenset[PurePosixPath]:
    files = [PurePosixPath(name) for name in tracked()]
    return frozenset(files).union(*(file.parents for file in files))


def exists(path: str) -> bool:
    """Also where the page leaves off the beginning of the path."""
    return any(known.match(path.removesuffix("/")) for known in files_and_folders())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
class TestPage:
    def test_every_code_block_says_its_language(self, page: Page) -> None:
        assert {language for language, _ in page.blocks} <= LANGUAGES

    def test_every_path_exists(self, page: Page) -> None:
        code = [*page.code_spans, *(command.text for command in page.commands)]
        words = [word for text in code for word in text.split() if _PATH.fullmatch(word)]
        paths = [word for word in words if not _FOREIGN_PATHS.search(word)]
        assert [path for path in paths if not exists(path)] == []

    def test_every_name_of_code_is_in_the_sources(self, page: Page) -> None:
        names = [span for span in page.code_spans if _IDENTIFIER.fullmatch(span) and not _PATH.fullmatch(span)]
        words = [(name, word) for name in names for word in re.findall(r"\w+", name.removeprefix("dflash_trt_"))]
        assert [name for name, word in words if word not in known_words() | _FOREIGN_NAMES] == []

    def test_every_link_leads_somewhere(self, page: Page) -> None:
        broken = []
        for link in page.links:
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            file = (ROOT / page.name).parent / path if path else ROOT / page.name
            if not file.exists() or (anchor and anchor not in Page.read(str(file.resolve().relative_to(ROOT))).anchors):
                broken.append(link)
        assert broken == []


def test_a_path_and_a_name_that_do_not_exist_are_noticed() -> None:
    page = Page(
        "README.md", "`core/no_such_file.py`, `backends/*/linear.py`, `NoSuchName`, [x](docs/none.md)\n\n    code\n"
    )
    assert [exists(path) for path in page.code_spans[:2]] == [False, True]
    checks = [check for name, check in vars(TestPage).items() if name.startswith("test_")]
    assert len(checks) == 4
    for check in checks:
        with pytest.raises(AssertionError):
            check(TestPage(), page)
