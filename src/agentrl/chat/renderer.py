"""Render messages with a model's chat template and tokenizer: messages → text → token ids. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
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
    """A chat template with its tokenizer.

    ``eos_ids`` are the ids at which an engine stops. Each of them closes an assistant turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Compile ``template``; ``special_tokens`` are its variables ``bos_token``, ``eos_token``, ….

        Raises ModelError for a template that is not valid Jinja.
        """
        self._tokenizer = tokenizer
        self._variables = dict(special_tokens or {})
        self._template_hash = hashlib.sha256(template.encode("utf-8", "replace")).hexdigest()[:16]
        self.eos_ids = frozenset(eos_ids)
        self.marks_assistant = _GENERATION_TAG.search(template) is not None
        """Whether the template marks assistant text by ``{% generation %}``, as ``render_marked`` needs."""
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}", hint="give another by --chat_template FILE"
            ) from error

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        return {"chat_template": f"sha256 {self._template_hash}"}

    @classmethod
    def open(cls, folder: str | Path, chat_template: str | Path | None = None) -> Self:
        """Load the tokenizer and the template of a Hugging Face folder.

        ``chat_template`` is a file that replaces the folder's template. Raises ModelError for a folder
        without a tokenizer or a template.
        """
        root = Path(folder)
        if not root.is_dir():
            raise ModelError(
                f"{root} is not a folder", hint="give --model_name_or_path the folder of a Hugging Face model"
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
        """Return the text of a conversation. Raises TrajectoryError if the template refuses it."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where ``{% generation %}`` blocks lie in it: [start, end).

        Offsets count characters. Raises TrajectoryError if the template refuses the conversation.
        """
        start, end = (f"{side}{uuid.uuid4().hex}" for side in ("start", "end"))
        marked = self._render(messages, tools, marks={_START: start, _END: end})
        text, spans = "", []
        before, *blocks = marked.split(start)
        text += before
        for block in blocks:
            inside, _, after = block.partition(end)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, spans

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        marks: Mapping[str, str] | None = None,
    ) -> str:
        try:
            return self._template.render(
                **self._variables,
                **(marks or {}),
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TrajectoryError(
                f"the chat template cannot render the roles [{roles}]: {error}",
                hint="give a template that supports tools and these roles by --chat_template FILE",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; adds no special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_marked(self, text: str, spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Return the token ids of ``text``, and whether each token lies in one of the character ``spans``."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = [False] * len(encoding.ids)
        for start, end in spans:
            first = encoding.char_to_token(start) if start < end else None
            if first is not None:
                last = encoding.char_to_token(end - 1)
                stop = len(mask) if last is None else last + 1
                mask[first:stop] = [True] * (stop - first)
        return list(encoding.ids), mask

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))

    def eos_texts(self) -> list[str]:
        """Return the texts of the closing tokens."""
        texts = (self._tokenizer.id_to_token(token) for token in sorted(self.eos_ids))
        return [text for text in texts if text]


_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_START, _END = "_generation_start", "_generation_end"
"""Variables that hold the marks around a ``{% generation %}`` block; undefined, and so empty, by default."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: renders its body between the variables _START and _END."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between its two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line) for name in (_START, _END)
        )
        return [start, *body, end]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that chat templates expect: trimmed blocks, JSON not escaped for HTML."""
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
        raise ModelError(f"{path} cannot be read: {error}", hint="copy the model's folder again") from error
    return content if isinstance(content, dict) else {}


def _read_tokenizer(root: Path) -> Tokenizer:
    """Read ``tokenizer.json``; convert an older format by transformers."""
    path = root / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(
                f"{path} is not a tokenizer: {error}", hint="copy the model's folder again"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    if not any((root / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise ModelError(
            f"{root} has no tokenizer.json",
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
            hint="give one by --chat_template FILE; see assets/chat_templates for examples",
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
