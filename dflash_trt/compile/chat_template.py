"""Chat template options that an engine stores: its drafter's training options, and the user's."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.drafter_card import CARD_NAME, card_options
from dflash_trt.core.chat_template_options import shown_options
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.known_pairs import KnownPair, pair_of_drafter, pair_of_drafter_directory
from dflash_trt.engine_dir.stored_tokenizer import stored_chat_templates

_FIELD = "chat_template_options"


@dataclass(frozen=True, kw_only=True)
class ChatTemplateSettings:
    """`notes` say where each option comes from."""

    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def chat_template_settings(
    config: BuildConfig, drafter: Path | None, tokenizer_files: Mapping[str, bytes]
) -> ChatTemplateSettings:
    """Options of the known pair, then the drafter's card, then `config`; later ones replace earlier ones.

    Options of pair and card are left out if the chat template does not read them.

    Raises:
        ConfigError: `config` has an option that the chat template does not read.
    """
    templates = list(stored_chat_templates(tokenizer_files).values())
    unread = [name for name in config.chat_template_options if not _reads(templates, name)]
    hint = "Check its spelling." if templates else "The target has no chat template; leave the option out."
    raise_all(
        ConfigError,
        _FIELD,
        [
            problem(name, expected="a variable of the chat template", found="none of that name", hint=hint)
            for name in unread
        ],
    )
    options: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for found, reason in _sources(config, drafter):
        for name, value in found.items():
            if _reads(templates, name):
                options[name], reasons[name] = value, reason
    notes = tuple(f"chat template: {shown_options({name: options[name]})} ({reasons[name]})" for name in options)
    return ChatTemplateSettings(options=options, notes=notes)


def _sources(config: BuildConfig, drafter: Path | None) -> Iterator[tuple[Mapping[str, Any], str]]:
    if drafter is not None and config.drafter_checkpoint != config.target:
        known = _known_pair(config, drafter)
        if known is not None:
            yield known.chat_template_options, f"for {known.drafter}: {known.reason}"
        yield card_options(drafter), f"from the examples of the drafter's {CARD_NAME}"
    yield config.chat_template_options, "given"


def _known_pair(config: BuildConfig, drafter: Path) -> KnownPair | None:
    name = (config.drafter or "").partition("@")[0]
    return pair_of_drafter(name) or pair_of_drafter_directory(drafter)


def _reads(templates: list[str], name: str) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", template) for template in templates)
