"""A model's chat template and tokenizer: messages → text → token ids, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agentrl.errors import ModelError, TrajectoryError

Message = dict[str, Any]


class ChatRenderer:
    """Renders conversations as the model was trained to see them.

    ``eos_ids`` are the ids at which an engine stops: each of them closes an assistant turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token``, ….

        Raises ModelError for a template that is no Jinja.
        """
        self._tokenizer = tokenizer
        self._variables = dict(special_tokens or {})
        self._template_hash = hashlib.sha256(template.encode("utf-8", "replace")).hexdigest()[:16]
        self.eos_ids = frozenset(eos_ids)
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ModelError(
                f"the chat template is no valid Jinja: {error}", hint="give another by --chat_template FILE"
            ) from error

    @property
    def facts(self) -> dict[str, str]:
        """What every sampler of a run must have alike."""
        return {"chat_template": f"sha256 {self._template_hash}"}

    @classmethod
    def open(cls, folder: str | Path, chat_template: str | Path | None = None) -> Self:
        """The renderer of a Hugging Face folder; ``chat_template`` is a file that replaces its template.

        Raises ModelError for a folder without tokenizer or template.
        """
        root = Path(folder)
        if not root.is_dir():
            raise ModelError(
                f"{root} is no folder", hint="give --model_name_or_path the folder of a Hugging Face model"
            )
        settings = _read_json(root / "tokenizer_config.json")
        tokenizer = _read_tokenizer(root)
        template = _read_template(root, settings, chat_template)
        special = _special_tokens(root, settings)
        eos = _eos_ids(root, tokenizer, special.get("eos_token"))
        return cls(tokenizer, template, eos_ids=eos, special_tokens=special)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation; TrajectoryError where the template refuses it."""
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TrajectoryError(
                f"the chat template cannot render the roles [{roles}]: {error}",
                hint="give a template that knows tools and these roles by --chat_template FILE",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; nothing is added to it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens included, less the ids that close the turn."""
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))

    def eos_texts(self) -> list[str]:
        """How the closing tokens are written in a rendering."""
        texts = (self._tokenizer.id_to_token(token) for token in sorted(self.eos_ids))
        return [text for text in texts if text]


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for other tools; it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: blocks are trimmed, JSON is not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="copy the model's folder anew") from error
    return content if isinstance(content, dict) else {}


def _read_tokenizer(root: Path) -> Tokenizer:
    """``tokenizer.json``; a folder that has only an older format goes through transformers' conversion."""
    path = root / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(
                f"{path} is no tokenizer: {error}", hint="copy the model's folder anew"
            ) from error
    if not any((root / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise ModelError(
            f"{root} has no tokenizer (tokenizer.json)",
            hint="copy tokenizer.json and tokenizer_config.json of the model into the folder",
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(root, local_files_only=True)
        return Tokenizer.from_str(converted.backend_tokenizer.to_str())
    except (AttributeError, OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"the tokenizer in {root} cannot be converted: {error}",
            hint="save it once with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        ) from error


def _read_template(root: Path, settings: Mapping[str, Any], replacement: str | Path | None) -> str:
    if replacement is not None:
        return _read_text(Path(replacement), "--chat_template")
    for name in ("chat_template.jinja", "chat_template.json"):
        if (root / name).is_file():
            text = _read_text(root / name, "the chat template")
            return text if name.endswith(".jinja") else str(json.loads(text).get("chat_template", ""))
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str) or not template:
        raise ModelError(
            f"{root} has no chat template",
            hint="give one by --chat_template FILE; assets/chat_templates holds examples",
        )
    return template


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{what} {path} cannot be read: {error}", hint="give an existing text file"
        ) from error


def _special_tokens(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    values = {**_read_json(root / "special_tokens_map.json"), **settings}
    found = {}
    for name, value in values.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _eos_ids(root: Path, tokenizer: Tokenizer, eos_token: str | None) -> set[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(root / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    named = tokenizer.token_to_id(eos_token) if eos_token else None
    return ids | ({named} if named is not None else set())
