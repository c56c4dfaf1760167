"""Prompts to calibrate on: a JSONL file, or a small set that comes with the package; as token ids.

The only module of this package that uses tokenizers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.quantization import CalibrationConfig

BUILT_IN_PROMPTS = Path(__file__).with_name("calibration_prompts.jsonl")

_FIELDS = ("prompt", "messages", "prompt_token_ids")
_MAX_LISTED = 5


def calibration_prompts(
    config: CalibrationConfig,
    *,
    base_dir: Path,
    tokenizer_dir: Path | None,
    vocab_size: int,
    template_options: Mapping[str, Any],
) -> list[list[int]]:
    """At most `num_prompts` prompts of 2 to `max_prompt_tokens` tokens each.

    `tokenizer_dir` is None without a tokenizer. Conversations are rendered with `template_options`, which a row's own
    `chat_template_kwargs` replace name by name.

    Raises:
        ConfigError: the file cannot be read, a row is wrong, or text meets a target without a tokenizer.
    """
    path = BUILT_IN_PROMPTS if config.prompts is None else base_dir / config.prompts
    problems: list[str] = []
    rows = list(_rows(path, problems))[: config.num_prompts]
    needs_tokenizer = any("prompt_token_ids" not in row for _, row in rows)
    tokenizer = _tokenizer(tokenizer_dir, path) if needs_tokenizer else None
    prompts = []
    for number, row in rows:
        token_ids = _token_ids(row, tokenizer, template_options, f"{path} line {number}", vocab_size, problems)
        if len(token_ids) >= 2:
            prompts.append(token_ids[: config.max_prompt_tokens])
    raise_all(ConfigError, "calibration prompts", problems[:_MAX_LISTED])
    if not prompts:
        hint = 'Write one JSON object per line, for example {"prompt": "Once upon a time"}.'
        raise ConfigError.about(str(path), expected="prompts of 2 tokens or more", found="none", hint=hint)
    return prompts


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_bytes().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = "Check the path, or leave it out to use the prompts that come with the package."
        raise ConfigError.about(str(path), expected="a JSONL file", found=str(error), hint=hint) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            row, found = None, str(error)
        else:
            found = "another row"
        if not isinstance(row, dict) or sum(field in row for field in _FIELDS) != 1:
            expected = f"a JSON object with one of {', '.join(_FIELDS)}"
            problems.append(problem(f"{path} line {number}", expected=expected, found=found))
            continue
        yield number, row


def _tokenizer(directory: Path | None, path: Path) -> Any:
    if directory is None:
        hint = "Give rows of prompt_token_ids, or add the tokenizer's files to the target."
        subject = f"calibration prompts {path}"
        raise ConfigError.about(subject, expected="a target with a tokenizer", found="none", hint=hint)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _token_ids(
    row: dict[str, Any],
    tokenizer: Any,
    template_options: Mapping[str, Any],
    subject: str,
    vocab_size: int,
    problems: list[str],
) -> list[int]:
    try:
        if "prompt_token_ids" in row:
            token_ids = [int(token_id) for token_id in row["prompt_token_ids"]]
        elif "messages" in row:
            kwargs = {**template_options, **row.get("chat_template_kwargs", {})}
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=False, **kwargs)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = tokenizer.encode(row["prompt"])
    except Exception as error:  # noqa: BLE001 - tokenizers and chat templates raise whatever their parsers raise
        found = f"{type(error).__name__}: {error}"
        problems.append(problem(subject, expected="a prompt to tokenize", found=found))
        return []
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        expected, found = f"token ids below the target's vocab_size {vocab_size}", "others"
        problems.append(problem(subject, expected=expected, found=found, hint="Use the target's own tokenizer."))
        return []
    return token_ids
