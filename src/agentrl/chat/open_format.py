"""Choose and open the chat format of a model's folder: by its configuration, tokenizer and template."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.chat_format import ToolSchemas
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.cycle_proof import may_skip_cycles
from agentrl.chat.model_folder import ChatFiles, read_chat_files
from agentrl.chat.parsers import PARSERS, ToolCallParser, get_parser
from agentrl.chat.parsers.detect import parser_of_template
from agentrl.chat.parsers.reasoning import tags_in
from agentrl.chat.proof import CONVERSATION, ENDS, TOOLS, prove, reads_its_calls
from agentrl.chat.proven_format import ProvenFormat, RenderingFormat
from agentrl.chat.renderer_family import make_renderer_format, names_for_tokenizer, names_of_type
from agentrl.chat.renderer_format import RendererFormat
from agentrl.chat.template import ChatTemplate
from agentrl.chat.template_format import TemplateFormat
from agentrl.chat.vision import read_vision
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, ModelError, TrajectoryError

logger = logging.getLogger(__name__)


def open_chat_format(
    folder: str | Path, model: ModelConfig, parser: str | None = None, *, with_tools: bool = False
) -> ProvenFormat:
    """Open and check the chat format of the model in ``folder``; ``parser`` is ``--tool_call_parser``.

    ``with_tools``: tools will be offered. Raises ModelError for a folder without a tokenizer or a template,
    and for a format that loses or renames a message.
    """
    files = read_chat_files(folder, model.chat_template)
    kwargs = _template_kwargs(model)
    vision = read_vision(folder, files.config)
    opener = _Opener(
        files, ControlTokens(files.tokenizer, files.template), kwargs, model, parser, vision is not None
    )
    proven = opener.open(str(folder))
    if vision is not None and isinstance(proven.base, TemplateFormat):
        proven = proven.with_vision(vision)
    if with_tools and proven.tool_problems:
        raise ModelError(
            f"the chat format of {folder} ({proven.description}) {proven.tool_problems[0]}",
            hint="give another by --chat_format, or a template for tools by --chat_template FILE",
        )
    logger.info("chat format: %s", proven.description)
    return proven


@dataclass(frozen=True)
class _Opener:
    files: ChatFiles
    tokens: ControlTokens
    kwargs: Mapping[str, Any]
    model: ModelConfig
    parser: str | None
    reads_images: bool = False
    """Then only the template is chosen: it shows images."""

    def open(self, folder: str) -> ProvenFormat:
        wanted = self.model.chat_format
        if wanted == "auto":
            return self._choose(folder)
        if wanted == "template":
            return self._prove_template(self._template(folder))
        return self._prove(self._renderer(wanted))

    def _choose(self, folder: str) -> ProvenFormat:
        """Return the renderer with the template's ids, else the template, else the family's renderer.

        A template that another parser reads than the one of its marks is the last choice: it writes calls
        as its family does not.
        """
        refusal: ModelError | None = None
        template = None
        try:
            template = self._template(folder)
            if self.reads_images:
                return self._prove_template(template)
            for candidate in self._candidates(names_for_tokenizer(self.tokens)):
                if (proven := self._same_as_template(candidate, template)) is not None:
                    return proven
            proven = self._prove_template(template)
            if self._is_read_as_marked(proven):
                return proven
        except ModelError as error:
            refusal, proven = error, None
        for candidate in self._candidates(names_of_type(str(self.files.config.get("model_type", "")))):
            with suppress(ModelError):
                of_family = self._prove(candidate)
                if not of_family.tool_problems and _begins_alike(candidate, template):
                    return of_family
        if refusal is not None:
            raise refusal
        assert proven is not None
        return proven

    def _is_read_as_marked(self, proven: ProvenFormat) -> bool:
        """Return whether the parser that the template's marks name reads the calls in it."""
        if proven.tool_problems or proven.adaptation.calls_as_text:
            return False
        base = proven.base
        by_marks = isinstance(base, TemplateFormat) and base.parser_name == parser_of_template(
            base.template.source
        )
        return self.parser is not None or by_marks

    def _same_as_template(self, candidate: RendererFormat, template: TemplateFormat) -> ProvenFormat | None:
        """Return the candidate, proven, if it renders the proof's conversation as the template does."""
        try:
            if any(_rendered(candidate, end) != _rendered(template, end) for end in ENDS[:1]):
                return None
            proven = self._prove(candidate)
        except (ModelError, TrajectoryError):
            return None
        for end in ENDS:
            messages = proven.adaptation.apply(CONVERSATION[:end])
            try:
                if candidate.render(messages, TOOLS) != template.render(messages, TOOLS):
                    return None
            except TrajectoryError:
                return None
        if proven.tool_problems or not (self.parser or reads_its_calls(candidate, proven.adaptation)):
            return None
        return proven

    def _prove_template(self, template: TemplateFormat) -> ProvenFormat:
        """Prove the template; without ``--tool_call_parser``, find the parser that reads its calls."""
        proven = self._prove(template)
        if self.parser is not None or proven.tool_problems or proven.adaptation.calls_as_text:
            return proven
        likely = parser_of_template(template.template.source)
        for name in sorted(PARSERS.names(), key=lambda name: name != likely):
            candidate = template.with_parser(get_parser(name), name)
            if reads_its_calls(candidate, proven.adaptation):
                return self._prove(candidate)
        return proven.without_tools("writes tool calls that no parser reads; give --tool_call_parser")

    def _candidates(self, names: Any) -> Iterator[RendererFormat]:
        for name in names:
            with suppress(ConfigError):
                yield self._renderer(name)

    def _renderer(self, name: str) -> RendererFormat:
        return make_renderer_format(name, self.files, self.tokens, self.kwargs, self._parser())

    def _template(self, folder: str) -> TemplateFormat:
        if self.files.template is None:
            raise ModelError(
                f"{folder} has no chat template",
                hint="give one by --chat_template FILE; see assets/chat_templates for examples",
            )
        template = ChatTemplate(self.files.template, self.files.special_tokens, self.kwargs)
        parser = self.parser or parser_of_template(template.source)
        return TemplateFormat(template, self.tokens, get_parser(parser), self.files.stop_ids, parser)

    def _parser(self) -> ToolCallParser | None:
        return None if self.parser is None else get_parser(self.parser)

    def _prove(self, base: RenderingFormat) -> ProvenFormat:
        try:
            tags = tags_in(self.files.template or "")
            proven = prove(base, self.tokens, self.model.thinking_retention, tags)
        except TrajectoryError as error:
            raise ModelError(error.message, hint=error.hint) from error
        return proven.skipping_cycles() if may_skip_cycles(proven) else proven


def _rendered(base: RenderingFormat, end: int, tools: ToolSchemas | None = None) -> list[int]:
    return base.render(CONVERSATION[:end], tools)


def _begins_alike(candidate: RendererFormat, template: TemplateFormat | None) -> bool:
    """Return whether a first prompt is the template's, or continues it: a thought opened there stays open.

    White space is not compared: gpt-oss's template and its encoder differ in two line breaks.
    """
    try:
        theirs = "" if template is None else template.decode(_rendered(template, ENDS[0]))
    except TrajectoryError:
        return True
    ours = candidate.decode(_rendered(candidate, ENDS[0]))
    return "".join(ours.split()).startswith("".join(theirs.split()))


def _template_kwargs(model: ModelConfig) -> dict[str, Any]:
    try:
        kwargs = json.loads(model.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(
            f"--chat_template_kwargs is not JSON: {error}", hint="give '{\"enable_thinking\": false}'"
        ) from error
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f"--chat_template_kwargs is not a JSON object: {model.chat_template_kwargs}",
            hint="give '{\"enable_thinking\": false}'",
        )
    return kwargs
