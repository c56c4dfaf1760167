"""Settings of a worker, and the model card for front ends: tokenizer, chat template, target's config."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Literal

from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.core.frozen import Frozen
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir.manifest import TOKENIZER_DIR
from dflash_trt.engine_dir.stored_tokenizer import CARD_NAME, TEMPLATE_NAME, StoredTokenizer
from dflash_trt.servers.dynamo.roles import DEFAULT_MIN_TOKENS, DEFAULT_TRANSFER_BYTES, Role, TransferBackend

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir


class WorkerSettings(Frozen):
    """One engine and its front end, with the front end's planes and discovery backend.

    `num_replicas` share this machine. A prefill worker leaves prompts of fewer than `prefill_min_tokens` to the decode
    worker, which gets blocks by `transfer_backend`; over NIXL from `transfer_bytes` of memory of the prefill worker.
    Workers of one `component` serve one model. Sockets are at `host` (default: where Dynamo's variables say).
    `tool_call_parser` and `reasoning_parser` are names of Dynamo's parsers, which its front end runs. `card` is the
    directory of the model card (default: the engine's own). The worker writes its instance id into `id_file`.
    """

    engine_dir: Path
    runtime: RuntimeConfig = RuntimeConfig()
    model_name: str
    num_replicas: int = 1
    role: Role = "both"
    prefill_min_tokens: int = DEFAULT_MIN_TOKENS
    transfer_backend: TransferBackend = "files"
    transfer_bytes: int = DEFAULT_TRANSFER_BYTES
    host: str | None = None
    namespace: str = "dynamo"
    component: str = "backend"
    discovery_backend: Literal["file", "etcd", "kubernetes"] = "file"
    request_plane: Literal["tcp", "nats"] = "tcp"
    event_plane: Literal["zmq", "nats"] = "zmq"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    card: Path | None = None
    id_file: Path | None = None


class PageSettings(Frozen):
    """What the gateway's page says of its server, and asks of it. `baseline` is the model without the drafter."""

    model: str
    has_chat_template: bool
    is_chat_model: bool
    has_drafter: bool
    reports_drafts: bool
    baseline: str | None = None


class PromptLimits(Frozen):
    """What the engine's PromptReader takes, for the gateway, which has no tokenizer."""

    max_tokens: int
    max_text_bytes: int
    vocab_size: int


class GatewaySettings(Frozen):
    """The gateway's address, its front end's URL, and what prompts the engine takes.

    Without a tool call parser, requests with tools are refused. Without `page` there is none.
    """

    host: str
    port: int
    frontend_url: str
    prompts: PromptLimits
    has_tool_call_parser: bool
    page: PageSettings | None = None


def check_package() -> None:
    """Raises ConfigError without Dynamo, which is an extra."""
    from importlib.util import find_spec

    missing = [name for name in ("dynamo", "zmq", "prometheus_client", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError.about(
            "NVIDIA Dynamo",
            expected="the packages of the extra 'serve'",
            found=f"no {', '.join(missing)}",
            hint="Install them with: pip install 'dflash-trt[serve]'",
        )


def card_source(engine: EngineDir) -> Path:
    """The directory of an engine's tokenizer, with everything a model card needs.

    Raises:
        EngineDirError: the engine has no tokenizer, or was built before engines kept the target's config.json.
    """
    directory = engine.tokenizer_path
    subject = f"engine {engine.path}"
    if directory is None:
        hint = "Build the engine from a target directory with a tokenizer."
        raise EngineDirError.about(subject, expected="a tokenizer, to serve text", found="none", hint=hint)
    if not (directory / CARD_NAME).is_file():
        raise EngineDirError.about(
            subject,
            expected=f"the target's config.json in {directory.name}/, which the front end reads",
            found="none",
            hint="Build the engine again with this version of dflash-trt.",
        )
    return directory


def page_settings(engine: EngineDir, worker: WorkerSettings) -> PageSettings:
    return PageSettings(
        model=worker.model_name,
        has_chat_template=has_chat_template(card_source(engine)),
        is_chat_model=is_chat_model(card_source(engine), engine.manifest.target.eos_token_ids),
        has_drafter=engine.manifest.draft is not None and worker.runtime.use_drafter,
        reports_drafts=engine.manifest.reports_drafts,
    )


def shared_card(engine: EngineDir) -> Path:
    """A directory with an engine's model card, at one path for all its workers: Dynamo compares paths.

    It is the tokenizer's, unless the engine has chat template options.

    Raises:
        ConfigError: another user of this machine could write there.
    """
    source = card_source(engine)
    if not engine.manifest.chat_template_options:
        return source
    files = sorted(engine.manifest.files[f"{TOKENIZER_DIR}/{path.name}"].sha256 for path in source.iterdir())
    key = json.dumps([files, engine.manifest.chat_template_options], sort_keys=True)
    directory = Path(gettempdir(), f"dflash-trt-card-{os.geteuid()}-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check_private(directory)
    write_card(engine, directory)
    return directory


def _check_private(directory: Path) -> None:
    """Raises ConfigError: another user may have made it, to lead our files elsewhere or to change them."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        found = "a link" if stat.S_ISLNK(status.st_mode) else "a file"
    elif status.st_uid != os.geteuid():
        found = f"one of user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        found = f"one of mode {stat.S_IMODE(status.st_mode):o}"
    else:
        return
    expected, hint = "a directory that only this user can write", "Remove it, or set TMPDIR to a directory of your own."
    raise ConfigError.about(f"model card {directory}", expected=expected, found=found, hint=hint)


def write_card(engine: EngineDir, directory: Path) -> None:
    """Write an engine's model card.

    The engine's chat template options become defaults inside the template: a front end does not know them.
    """
    source = card_source(engine)
    for path in source.iterdir():
        shutil.copyfile(path, directory / path.name)
    templates = StoredTokenizer.open(source).chat_templates
    options = engine.manifest.chat_template_options
    if options and "default" in templates:
        (directory / TEMPLATE_NAME).write_text(_defaults(options) + templates["default"], encoding="utf-8")


def has_chat_template(card: Path) -> bool:
    return bool(StoredTokenizer.open(card).chat_templates)


def is_chat_model(card: Path, eos_token_ids: Iterable[int]) -> bool:
    """True if an end token of the model ends turns in its chat template: base models have templates, too."""
    tokenizer = StoredTokenizer.open(card)
    spelled = ["eos_token", *map(tokenizer.backend.id_to_token, eos_token_ids)]
    return any(token in template for template in tokenizer.chat_templates.values() for token in spelled if token)


def sampling_defaults(engine: EngineDir) -> dict[str, Any]:
    """Default sampling: the target's generation_config.json, as in other servers, else OpenAI's defaults."""
    path = card_source(engine) / "generation_config.json"
    fields: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {"temperature": 1.0} | {name: fields[name] for name in names if fields.get(name) is not None}


def _defaults(options: Mapping[str, Any]) -> str:
    """Assignments of template variables that a request does not set."""
    return "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif -%}}"
        for name, value in options.items()
    )


def _literal(value: Any) -> str:
    """Jinja's notation, which is JSON's but for null."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)}: {_literal(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
