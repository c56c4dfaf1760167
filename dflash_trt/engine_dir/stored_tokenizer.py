"""An engine's tokenizer, read by the tokenizers library: a running engine imports no transformers.

A build stores the tokenizer that transformers makes of the checkpoint's files; this module reads the files and knows
how transformers chooses a chat template. It knows no class of tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.core.json_object import parse_json_object, read_json_object

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
CARD_NAME = "config.json"  # the target's own, for other programs; not read here
TEMPLATE_NAME = "chat_template.jinja"  # else the template stands in tokenizer_config.json

# From transformers' PreTrainedTokenizerBase: variables of every chat template.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class StoredTokenizer:
    """`backend` is a Tokenizer without truncation and padding."""

    backend: Any
    special_tokens: Mapping[str, Any]
    chat_templates: Mapping[str, str]  # by name; a single one is "default"

    @classmethod
    def open(cls, directory: Path) -> StoredTokenizer:
        """Read the files of a directory; nothing is fetched, and no code of theirs runs.

        Raises:
            OSError, ValueError: a file is missing, or no JSON object.
            Exception: whatever the tokenizers library raises.
        """
        if not (directory / TOKENIZER_NAME).is_file():
            raise FileNotFoundError(f"no {TOKENIZER_NAME} in {directory}")
        config = _read_optional(directory / CONFIG_NAME) or {}
        backend = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        special_tokens, template = _read_optional(directory / SPECIAL_TOKENS_NAME), directory / TEMPLATE_NAME
        if special_tokens is None:
            special_tokens = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
        return cls(
            backend=backend,
            special_tokens={name: _spelled(token) for name, token in special_tokens.items()},
            chat_templates=_templates(template.read_text(encoding="utf-8") if template.is_file() else None, config),
        )

    def chat_template(self, *, has_tools: bool) -> str:
        """The template that transformers chooses.

        Raises:
            ValueError: there are templates of other names only.
        """
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self.chat_templates:
                return self.chat_templates[name]
        raise ValueError(f"no template 'default' among {', '.join(sorted(self.chat_templates)) or 'none'}")


def _read_optional(path: Path) -> dict[str, Any] | None:
    return read_json_object(path) if path.is_file() else None


def _spelled(token: Any) -> Any:
    """The text of a token, of which tokenizer_config.json may hold the flags, too."""
    return token["content"] if isinstance(token, Mapping) else token


def stored_chat_templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """Chat templates by name in the contents of a tokenizer's files, which a build has checked."""
    config = parse_json_object(files[CONFIG_NAME]) if CONFIG_NAME in files else {}
    template = files[TEMPLATE_NAME].decode() if TEMPLATE_NAME in files else None
    return _templates(template, config)


def _templates(file: str | None, config: Mapping[str, Any]) -> dict[str, str]:
    found: Any = file if file is not None else config.get("chat_template") or ""
    if isinstance(found, str):
        return {"default": found} if found else {}
    if isinstance(found, Sequence):
        found = {template["name"]: template["template"] for template in found}
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"chat_template: expected text, or texts by name, found {found!r:.80}")
    return dict(found)
