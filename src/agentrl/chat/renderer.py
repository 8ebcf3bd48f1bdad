"""Define messages and renderers: rewrite messages without loss, and render them by a chat template.

The ids between two generations are the difference of two renderings. Their history has a marker instead of
the generated turn, so a template that rewrites history (drops thoughts, adds empty ones) changes no id.

Only a template writes control tokens. ``ControlTokens.protect`` puts a secret mark into each one that it
finds in a message, so that it stays text; ``encode`` removes the marks and tokenizes the text around each on
its own.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NoReturn

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from agentrl.base.batches import batches
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import (
    THINK,
    ParsedMessage,
    ReasoningTags,
    get_parser,
    opens_thought,
    parse_text,
    tags_in,
)
from agentrl.documents.document import replace_surrogates
from agentrl.documents.images import ImageSpan
from agentrl.errors import ModelError, TrajectoryError

Message = dict[str, Any]
"""One chat message, as in an OpenAI request; ``reasoning_content`` holds an assistant's thought."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""

TRAIN = "train"
"""Field of an assistant message: false makes it context of a conversation for fine-tuning."""


_PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""


_MARK = f"mark{uuid.uuid4().hex}"
"""Random in each process, so untrusted text cannot hold it. It is removed before tokenization."""

_SHAPED = r"<[^<>]{1,80}>|\[[^\[\]]{1,80}\]"
_KEYWORDS = re.compile(
    r"think|tool|call|arg|func|response|output|result|channel|message|turn|role|start|begin|end|sep|observation"
    r"|user|assistant|system|inst",
    re.IGNORECASE,
)
_SPOKEN = re.compile(r"think|tool.?call|tool.?sep|function|parameter|arg_|python_tag|code", re.IGNORECASE)
"""Tags that an assistant may write: they are not marked in its messages."""
_BATCH = 512
"""Pieces of text between marks that are tokenized at a time."""
_SLICE = 1 << 16
_WORD_END = re.compile(r"[0-9A-Za-z] ")
_WORD_END_IN_BYTES = re.compile("[0-9A-Za-z]Ġ")
"""The same in the alphabet of byte-level tokens."""
_COMPOSED = 4
"""Most characters that NFC composes into one."""


class ControlTokens:
    """A tokenizer, and the texts of its control tokens."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """``template`` is a chat template: the tags that it writes are control tokens too."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        texts = {
            token.content
            for token in added.values()
            if token.content.strip() and (token.special or _is_tag(token.content, template or ""))
        }
        self._control = frozenset(texts)
        self.special_ids = frozenset(number for number, token in added.items() if token.content in texts)
        self._spoken = frozenset(text for text in texts if _SPOKEN.search(text))
        # Put longer texts first: of alternatives the first wins, and a prefix would hide the whole token.
        odd = sorted((text for text in texts if not re.fullmatch(_SHAPED, text)), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, odd), _SHAPED]))
        self._first = re.compile(f"[<\\[{re.escape(''.join(sorted({text[0] for text in odd})))}]")
        self._adds_space = _adds_space(tokenizer)

    def protect(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose text holds no control token for ``encode``.

        Tags of thoughts and tool calls are not marked in assistant and system messages.
        """
        return [self._marked(dict(message), self._allowed(str(message.get("role")))) for message in messages]

    def protect_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return tool schemas whose text holds no control token for ``encode``."""
        return [self._marked(dict(tool), frozenset()) for tool in tools] if tools else None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; adds no special tokens. Lone surrogates are replaced."""
        if _MARK in text:
            return [token for token, _ in self.encode_with_offsets(text)]
        return list(self._encodings(self._tokenizer.encode_batch_fast, [text])[0].ids)  # without offsets

    def encode_with_offsets(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return each token id of rendered text with its position in ``text``, in characters: [start, end).

        The character before a mark and the text after it are tokenized on their own.
        """
        located: list[tuple[int, tuple[int, int]]] = []
        offset = 0
        pieces = text.split(_MARK)
        for start in range(0, len(pieces), _BATCH):
            batch = pieces[start : start + _BATCH]
            # text after a mark gets no space before it
            leads = [
                "\n" if self._adds_space and piece and start + i else "" for i, piece in enumerate(batch)
            ]
            whole = [lead + piece for lead, piece in zip(leads, batch, strict=True)]
            # Tokenize equal pieces once, and in batches: a call for each piece costs 0.1 ms.
            once = list(dict.fromkeys(whole))
            encodings = dict(zip(once, self._encodings(self._tokenizer.encode_batch, once), strict=True))
            for lead, piece, key in zip(leads, batch, whole, strict=True):
                skip = offset - len(lead)
                located += [
                    (token, (begin + skip, end + skip))
                    for token, (begin, end) in zip(encodings[key].ids, encodings[key].offsets, strict=True)
                    if not lead or end > len(lead)
                ]
                offset += len(piece) + len(_MARK)
        return located

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least; much faster than tokenizing it."""
        longest, ends_words = self._token_bounds
        if not longest:
            return 0
        words = sum(len(_WORD_END.findall(part)) for part in batches(text, _SLICE)) if ends_words else 0
        return max(words, len(text) // longest)

    @cached_property
    def _token_bounds(self) -> tuple[int, bool]:
        """Return the most characters of a token, 0 if unknown, and whether no token has a word's end inside.

        Known for BPE of all bytes, where tokens are exactly the text, up to Unicode's composition.
        """
        tokenizer = self._tokenizer
        normalizer, splitter = (
            b"" if part is None else part.__getstate__()
            for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
        )
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder().values()
        if (
            not isinstance(tokenizer.model, BPE)
            or b"ByteLevel" not in splitter
            or b"Removed" in splitter
            or normalizer not in (b"", b'{"type":"NFC"}')
            or not vocabulary.keys() >= set(ByteLevel.alphabet())
            or any(token.lstrip or token.rstrip for token in added)
        ):
            return 0, False
        composed = _COMPOSED if normalizer else 1
        return composed * max(map(len, vocabulary)), not any(map(_WORD_END_IN_BYTES.search, vocabulary))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def texts(self) -> list[str]:
        """Return the texts of all control tokens."""
        return sorted(self._control)

    def token_id(self, text: str) -> int | None:
        """Return the id of one token."""
        token = self._tokenizer.token_to_id(text)
        return None if token is None else int(token)

    def token_text(self, token: int) -> str | None:
        """Return the text of one id."""
        text = self._tokenizer.id_to_token(token)
        return None if text is None else str(text)

    def _allowed(self, role: str) -> frozenset[str]:
        return self._spoken if role in ("assistant", "system", "developer") else frozenset()

    def _marked(self, value: Any, allowed: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._mark(value, allowed)
        if isinstance(value, Mapping):
            return {self._marked(key, allowed): self._marked(item, allowed) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, allowed) for item in value]
        return value

    def _mark(self, text: str, allowed: frozenset[str]) -> str:
        """Return the text with a mark behind the first character of each control token.

        Python code loops over them: one search through a long text would hold the interpreter's lock.
        """
        parts: list[str] = []
        done = 0
        for offset in (match.start() for match in self._first.finditer(text)):
            match = self._pattern.match(text, offset)
            if match is not None and match.group() in self._control and match.group() not in allowed:
                parts += (text[done : offset + 1], _MARK)
                done = offset + 1
        return "".join([*parts, text[done:]]) if parts else text

    def _encodings(self, encode: Callable[..., list[Encoding]], texts: list[str]) -> list[Encoding]:
        try:
            return encode(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return encode([replace_surrogates(text) for text in texts], add_special_tokens=False)


def _is_tag(text: str, template: str) -> bool:
    """Return whether a token that is not special marks a part of a conversation."""
    return text[0] in "<[" and (text in template or _KEYWORDS.search(text) is not None)


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before text."""
    ids = tokenizer.encode("<", add_special_tokens=False).ids
    first = tokenizer.id_to_token(ids[0]) if ids else None
    return first is not None and first.startswith("▁")


@dataclass(frozen=True)
class TokenizedConversation:
    """``input_ids`` int64[n]; ``is_trainable`` bool[n] marks the tokens of trained assistant messages.

    ``images`` are the tokens that stand for images.
    """

    input_ids: NDArray[np.int64]
    is_trainable: NDArray[np.bool_]
    images: tuple[ImageSpan, ...] = ()


def split_train(messages: Sequence[Message]) -> tuple[list[Message], list[bool]]:
    """Return the messages without the field ``train``, and whether each is a trained assistant message."""
    flags = [m.get("role") == "assistant" and m.get(TRAIN, True) is True for m in messages]
    return [{key: value for key, value in m.items() if key != TRAIN} for m in messages], flags


class Renderer(ABC):
    """Renders messages as token ids. Text inside messages never becomes a control token."""

    name: str
    """The name for ``--chat_format``."""
    description: str
    """One line about the renderer."""
    agreed_settings: dict[str, str]
    """What all samplers of a run must have in common."""
    call_marks: tuple[str, ...] | None = None
    """The texts with which a tool call may begin; None if any text may be one."""

    def __init__(self, tokens: ControlTokens, stop_ids: Iterable[int]) -> None:
        """``stop_ids`` close an assistant turn."""
        self.tokens = tokens
        self.stop_ids = frozenset(stop_ids)
        self._decoded: tuple[Sequence[int], str] = ((), "")
        """The last ids given to ``decode`` and their text."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation, up to where the assistant continues with ``add_generation_prompt``.

        Raises TrajectoryError if the conversation cannot be rendered.
        """

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one: prompt, output, *these ids*, next output.

        ``history`` ends with the message that ``output_ids`` were parsed into; ``new_messages`` follow it.
        None if the renderer cannot extend the prompt.
        """

    @abstractmethod
    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message that was generated after ``prompt_ids``; its ``error`` reports a bad call."""

    @abstractmethod
    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says, for fine-tuning.

        Assistant messages with ``train: false`` are not in the mask. Raises ValueError or TrajectoryError
        for a conversation whose tokens cannot be attributed.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        last, text = self._decoded
        # Compare identity, of tuples only: a list may have been changed since.
        if isinstance(ids, tuple) and ids is last:
            return text
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        text = self.tokens.decode(ids[:end])
        self._decoded = (ids, text)
        return text

    def opens_thought(self, prompt_ids: Sequence[int], tags: ReasoningTags) -> bool:
        """Return whether a prompt ends inside a thought, as templates of thinking models write it."""
        return opens_thought(self.tokens.decode(prompt_ids[-_PROMPT_END:]), tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """How messages are rewritten for one template. By default only reasoning is put where it is read."""

    reasoning: Literal["field", "text"] = "field"
    """Reasoning is a field of its message (``reasoning_content``, ``thinking``), or tagged text before the
    content."""
    tags: ReasoningTags = THINK
    arguments_as_text: bool = False
    """Arguments are JSON text, not an object."""
    content_apart: bool = False
    """Text beside calls becomes a message of its own before them."""
    one_call_each: bool = False
    """Parallel calls become one message each, with the result behind it."""
    orphans_as_user: bool = False
    """A tool message without a call becomes a user message."""
    calls_as_text: bool = False
    """Calls become text of the content, in the Hermes form."""
    kimi_ids: bool = False
    """Calls have Kimi's ids, ``functions.NAME:NUMBER``, by which its results name them."""

    def with_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a whole conversation with the ids that the model writes."""
        return with_kimi_ids(messages) if self.kimi_ids else messages

    def apply(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages in this form, with results in the order of their calls."""
        adapted = [self.apply_to_one(message) for message in in_call_order(messages)]
        if self.content_apart:
            adapted = [part for message in adapted for part in _content_apart(message)]
        if self.one_call_each:
            adapted = _one_call_each(adapted)
        if not self.orphans_as_user:
            return adapted
        return [
            {"role": "user", "content": message.get("content")}
            if message.get("role") == "tool" and not message.get("tool_call_id")
            else message
            for message in adapted
        ]

    def describe(self) -> str:
        """Return what is changed, as the end of a sentence; empty if nothing is."""
        changes = [
            (self.arguments_as_text, "arguments as JSON text"),
            (self.content_apart, "text beside calls as a message before them"),
            (self.one_call_each, "parallel calls as one message each"),
            (self.orphans_as_user, "errors of malformed calls as user messages"),
            (self.calls_as_text, "calls as text in the Hermes form"),
        ]
        return ", ".join(text for is_changed, text in changes if is_changed)

    def apply_to_one(self, message: Message) -> Message:
        """Return one message in this form, with all its calls in it."""
        if message.get("role") != "assistant":
            return message
        adapted = dict(message)
        reasoning = adapted.pop("reasoning_content", None) or adapted.pop("thinking", None)
        adapted.pop("thinking", None)
        content = adapted.get("content") or ""
        if reasoning and self.reasoning == "text":
            content = f"{self.tags.open}\n{reasoning}\n{self.tags.close}\n\n{content}"
        elif reasoning:
            # Write both names: gpt-oss's template reads `thinking`, most others `reasoning_content`.
            adapted |= {"reasoning_content": reasoning, "thinking": reasoning}
        calls = [self._call(call) for call in adapted.pop("tool_calls", None) or ()]
        if calls and self.calls_as_text:
            content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
        elif calls:
            adapted["tool_calls"] = calls
        adapted["content"] = content
        return adapted

    def _call(self, call: Any) -> dict[str, Any]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if self.arguments_as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            function["arguments"] = _decoded(arguments)
        return {"type": "function", **{k: v for k, v in call.items() if k == "id"}, "function": function}


def with_kimi_ids(messages: Sequence[Message]) -> list[Message]:
    """Return a whole conversation whose calls are numbered from 0, and whose results name them by number."""
    renamed: list[Message] = []
    ids: dict[Any, str] = {}
    count = 0
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            ids, calls = {}, []
            for call in message["tool_calls"]:
                name = (call.get("function") or call).get("name")
                ids[call.get("id")] = f"functions.{name}:{count}"
                calls.append({**call, "id": ids[call.get("id")]})
                count += 1
            changed["tool_calls"] = calls
        if message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        renamed.append(changed)
    return renamed


def in_call_order(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with the results behind parallel calls in the order of these calls.

    Templates that find a result by its position would attribute it to another call. Results without the id of
    a call stay behind the others.
    """
    ordered: list[Message] = []
    indices: dict[Any, int] = {}
    start = 0
    for message in messages:
        ordered.append(message)
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            indices = {call["id"]: index for index, call in enumerate(calls) if call.get("id")}
            start = len(ordered)
        elif len(indices) > 1:
            ordered[start:] = sorted(
                ordered[start:], key=lambda result: indices.get(result.get("tool_call_id"), len(indices))
            )
    return ordered


def _call_text(call: Message) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _content_apart(message: Message) -> list[Message]:
    """Return the message in two if it has both text and calls; content beside calls is None then."""
    if not message.get("tool_calls"):
        return [message]
    spoken = {key: value for key, value in message.items() if key != "tool_calls"}
    called = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"], **_train(message)}
    return [spoken, called] if message.get("content") else [{**spoken, **called}]


def _train(message: Message) -> Message:
    return {TRAIN: message[TRAIN]} if TRAIN in message else {}


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, followed by its result."""
    separate: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if not calls:
            separate.append(message)
            continue
        results = list(takewhile(lambda result: result.get("role") == "tool", messages[index:]))
        index += len(results)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        for call, answers in zip(calls, _by_call(calls, results), strict=True):
            separate += [{**rest, "tool_calls": [call]}, *answers]
            content = None if rest.get("content") is None else ""
            rest = {"role": "assistant", "content": content, **_train(message)}
    return separate


def _by_call(calls: Sequence[Message], results: Sequence[Message]) -> list[list[Message]]:
    """Return the results of each call, by id or, without ids, by order; the last also gets the others."""
    ids = [call.get("id") for call in calls]
    answers: list[list[Message]] = [[] for _ in calls]
    for index, result in enumerate(results):
        if any(ids):
            index = ids.index(result["tool_call_id"]) if result.get("tool_call_id") in ids else len(calls)
        answers[min(index, len(calls) - 1)].append(result)
    return answers


class ChatTemplate:
    """A compiled chat template with its variables."""

    def __init__(
        self, source: str, variables: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Compile ``source``; ``variables`` are ``bos_token``, …, ``arguments`` ``--chat_template_kwargs``.

        Raises ModelError for a template that is not valid Jinja.
        """
        self.source = source
        self._variables = {**variables, **(arguments or {})}
        hashed = source + (json.dumps(arguments, sort_keys=True) if arguments else "")
        self.digest = hashlib.sha256(hashed.encode("utf-8", "replace")).hexdigest()[:16]
        self.marks_assistant = _GENERATION_TAG.search(source) is not None
        """Whether the template marks assistant text by ``{% generation %}``, as ``render_marked`` needs."""
        self.reads_clock = "strftime_now" in source
        """Whether the text of a conversation may depend on the time."""
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}", hint="give another by --chat_template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas | None,
        *,
        add_generation_prompt: bool,
        marks: Mapping[str, str] | None = None,
    ) -> str:
        """Return the text of a conversation. Raises TrajectoryError if the template refuses it."""
        try:
            return self._template.render(
                **self._variables,
                **(marks or {}),
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        # Catch everything: beside TemplateError, a template's expressions raise TypeError and others.
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TrajectoryError(
                f"the chat template cannot render the roles [{roles}]: {error}",
                hint="give a template that supports tools and these roles by --chat_template FILE",
            ) from error

    def render_marked(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where ``{% generation %}`` blocks lie in it: [start, end).

        Offsets count characters. Raises TrajectoryError if the template refuses the conversation.
        """
        start, end = (f"{side}{uuid.uuid4().hex}" for side in ("start", "end"))
        marked = self.render(messages, tools, add_generation_prompt=False, marks={_START: start, _END: end})
        text, spans = "", []
        before, *blocks = marked.split(start)
        text += before
        for block in blocks:
            inside, _, after = block.partition(end)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, spans


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


CLOCK: ContextVar[datetime | None] = ContextVar("agentrl_clock", default=None)
"""What chat templates take for the time; None: the clock of this machine.

For a trajectory it is its beginning: a later owner, after midnight or in another time zone, renders the same.
"""


def _strftime_now(form: str) -> str:
    return (CLOCK.get() or datetime.now().astimezone()).strftime(form)


_ATTRIBUTES = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Finds the keys of messages first: as attributes, each would cost an exception."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute`` as templates mean it: a key of a dict, unless dicts have the attribute."""
        if type(obj) is dict and attribute in obj and attribute not in _ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that chat templates expect: trimmed blocks, JSON not escaped for HTML."""
    # Render in a sandbox: a template is code from whoever made the model's folder.
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


_MAX_PROMPTS = 16


class TemplateRenderer(Renderer):
    """A chat template with its tokenizer, and a parser of tool calls by its name."""

    name = "template"

    def __init__(
        self, template: ChatTemplate, tokens: ControlTokens, stop_ids: Iterable[int], parser: str = "hermes"
    ) -> None:
        super().__init__(tokens, stop_ids)
        self.template = template
        self.parser_name = parser
        self._parser = get_parser(parser)
        if isinstance(self._parser, MarkedParser):
            self.call_marks = self._parser.marks
        self.description = f"the model's chat template, tool calls by the text parser {parser}"
        self.agreed_settings = {"chat_template": f"sha256 {template.digest}"}
        self._tags = tags_in(template.source)
        self._prompts: dict[bytes, list[int]] = {}
        """Ids of the latest prompts by ``_key``: all trajectories of a group start with one prompt."""
        self._keeping = threading.Lock()

    def with_parser(self, parser: str) -> TemplateRenderer:
        """Return the same renderer with another parser of tool calls."""
        return TemplateRenderer(self.template, self.tokens, self.stop_ids, parser)

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation; a prompt that was rendered before costs nothing."""
        key = self._key(messages, tools) if add_generation_prompt else None
        # Take it out and put it back: the prompt that was not used for longest is then the first to go.
        with self._keeping:
            ids = None if key is None else self._prompts.pop(key, None)
        if ids is None:
            ids = self.tokens.encode(
                self.template.render(
                    self.tokens.protect(messages),
                    self.tokens.protect_tools(tools),
                    add_generation_prompt=add_generation_prompt,
                )
            )
        if key is not None:
            with self._keeping:
                self._prompts[key] = ids
                if len(self._prompts) > _MAX_PROMPTS:
                    del self._prompts[next(iter(self._prompts))]
        # Return a copy: the kept prompt must not change with the list of a caller.
        return list(ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        text = self._text_after_generation(history, new_messages, tools)
        ids = self.tokens.encode(text)
        # Drop a closing token that the model has sampled; an output that was cut has none.
        closed = bool(output_ids) and output_ids[-1] in self.stop_ids
        return ids[1:] if closed and ids and ids[0] in self.stop_ids else ids

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        opened = self.opens_thought(prompt_ids, self._tags)
        return parse_text(self._parser, self.decode(output_ids), tools, self._tags, opened=opened)

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says.

        Raises ValueError for a template that does not render the start of a conversation as a prefix of it.
        """
        plain, flags = split_train(messages)
        masked = self._mask_by_marks if self.template.marks_assistant else self._mask_by_prefixes
        ids, mask = masked(plain, flags, tools)
        return TokenizedConversation(np.asarray(ids, np.int64), np.asarray(mask, np.bool_))

    def _key(self, messages: Sequence[Message], tools: ToolSchemas | None) -> bytes | None:
        """Return bytes that are equal only for prompts with equal text; None if the text may change."""
        if self.template.reads_clock:
            return None
        try:
            return marshal.dumps((list(messages), list(tools or ())), 0)  # 0: no marks of shared objects
        except ValueError:
            return None  # an object of another kind than JSON's

    def _text_after_generation(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: ToolSchemas | None
    ) -> str:
        """Return the rendered text after the generated turn: its closing tokens to the generation prompt."""
        # Choose the marker at random: a message that holds a fixed one would hide where the turn ends.
        marker = f"mark{uuid.uuid4().hex}"
        added = self.tokens.protect(new_messages)
        before = history[:-1]
        has_results = any(message.get("role") == "tool" for message in new_messages)
        if not (has_results and history[-1].get("tool_calls") and self._names_tools_by_calls):
            try:
                spoken = {"role": "assistant", "content": marker}
                return self._text_after(marker, [*before, spoken, *added], tools)
            except TrajectoryError:
                if not has_results:
                    raise
        called = _marked_call(history[-1], marker)
        text = self._text_after(marker, [*before, called, *added], tools)
        closings = (self.tokens.token_text(token) for token in self.stop_ids)
        ends = [end for end in (text.find(closing) for closing in closings if closing) if end >= 0]
        if not ends:
            raise TrajectoryError(
                "the chat template does not close an assistant turn with one of the model's stop tokens",
                hint="give a template that does by --chat_template FILE",
            )
        return text[min(ends) :]

    @cached_property
    def _names_tools_by_calls(self) -> bool:
        """Return whether the template writes a result under the name of the latest call that it can see.

        Then the generated turn must be a call: behind a text, an earlier call's name would be written.
        """
        earlier, marker = (f"mark{uuid.uuid4().hex}" for _ in range(2))
        question: Message = {"role": "user", "content": "1"}
        spoken: Message = {"role": "assistant", "content": marker}
        results: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": f"call0000{at}", "content": "1"}
            for at, name in enumerate((earlier, "later"))
        ]
        for arguments in ({"x": 1}, '{"x": 1}'):
            function = {"name": earlier, "arguments": arguments}
            calls = [{"id": "call00000", "type": "function", "function": function}]
            called: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            with suppress(TrajectoryError):
                messages = [question, called, results[0], spoken, results[1]]
                return earlier in self._text_after(marker, messages, None)
        return False

    def _text_after(self, marker: str, messages: Sequence[Message], tools: ToolSchemas | None) -> str:
        text = self.template.render(messages, tools, add_generation_prompt=True)
        if text.count(marker) != 1:
            raise TrajectoryError(
                f"the chat template renders an assistant message {text.count(marker)} times",
                hint="give a template that renders each message once by --chat_template FILE",
            )
        return text[text.index(marker) + len(marker) :]

    def _mask_by_marks(
        self, messages: Sequence[Message], flags: Sequence[bool], tools: ToolSchemas | None
    ) -> tuple[list[int], list[bool]]:
        text, spans = self.template.render_marked(
            self.tokens.protect(messages), self.tokens.protect_tools(tools)
        )
        trained = [
            flag for message, flag in zip(messages, flags, strict=True) if message["role"] == "assistant"
        ]
        if not all(trained):
            if len(spans) != len(trained):
                raise ValueError(
                    f"the chat template marks {len(spans)} parts of {len(trained)} assistant messages, so"
                    " messages with train: false cannot be found in it"
                )
            spans = [span for span, flag in zip(spans, trained, strict=True) if flag]
        ids, mask, left = [], [], list(reversed(spans))
        for token, (start, end) in self.tokens.encode_with_offsets(text):
            while left and left[-1][1] <= start:
                left.pop()
            ids.append(token)
            mask.append(bool(left) and start < end and left[-1][0] <= start)
        return ids, mask

    def _mask_by_prefixes(
        self, messages: Sequence[Message], flags: Sequence[bool], tools: ToolSchemas | None
    ) -> tuple[list[int], list[bool]]:
        """Mark what each trained message adds to the prompt before it, up to its last closing token."""
        whole = self.render(messages, tools, add_generation_prompt=False)
        mask = [False] * len(whole)
        for index, is_trained in enumerate(flags):
            if not is_trained:
                continue
            prompt = self.render(messages[:index], tools)
            spoken = self.render(messages[: index + 1], tools, add_generation_prompt=False)
            if whole[: len(spoken)] != spoken or spoken[: len(prompt)] != prompt:
                raise ValueError(
                    f"the chat template does not render messages up to {index} as a prefix of the"
                    " conversation"
                )
            start, end = len(prompt), len(spoken)
            closings = [at for at in range(start, end) if spoken[at] in self.stop_ids]
            if closings:
                end = closings[-1] + 1
            mask[start:end] = [True] * (end - start)
        return whole, mask


def _marked_call(message: Message, marker: str) -> Message:
    """Return the message with ``marker`` in its last call: some templates allow results only after calls."""
    calls = message.get("tool_calls") or [{"id": "call00000", "function": {"name": "f"}}]
    is_text = isinstance(calls[-1]["function"].get("arguments"), str)
    arguments = f'{{"x": "{marker}"}}' if is_text else {"x": marker}
    function = {"name": calls[-1]["function"]["name"], "arguments": arguments}
    last = {"id": calls[-1].get("id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}
