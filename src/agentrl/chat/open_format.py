"""Choose and open the chat format of a model's folder: by its configuration, tokenizer and template."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.family_renderer import (
    HARMONY,
    FamilyRenderer,
    make_family_renderer,
    names_for_tokenizer,
    names_of_type,
)
from agentrl.chat.model_folder import ChatFiles, read_chat_files
from agentrl.chat.parsers.base import PARSERS, ToolCallParser, get_parser, parser_of_template
from agentrl.chat.parsers.reasoning import tags_in
from agentrl.chat.probe import CONVERSATION, ENDS, TOOLS
from agentrl.chat.renderer import Renderer
from agentrl.chat.template_renderer import ChatTemplate, TemplateRenderer
from agentrl.chat.validate_format import reads_its_calls, validate_format
from agentrl.chat.vision import read_vision
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, ModelError, TrajectoryError

logger = logging.getLogger(__name__)


def open_chat_format(
    folder: str | Path, model: ModelConfig, parser: str | None = None, *, with_tools: bool = False
) -> ChatFormat:
    """Open and check the chat format of the model in ``folder``; ``parser`` is ``--tool_call_parser``.

    ``with_tools``: tools will be offered. Raises ModelError for a folder without a tokenizer or a template,
    and for a format that loses or renames a message.
    """
    files = read_chat_files(folder, model.chat_template)
    vision = read_vision(folder, files.config)
    opener = _Opener(
        str(folder), files, ControlTokens(files.tokenizer, files.template), _template_kwargs(model), model,
        parser, reads_images=vision is not None,
    )  # fmt: skip
    opened = opener.open()
    if isinstance(opened.renderer, TemplateRenderer):
        opened = replace(opened, vision=vision)
    if with_tools and opened.tool_problems:
        raise ModelError(
            f"the chat format of {folder} ({opened.description}) {opened.tool_problems[0]}",
            hint="give another by --chat_format, or a template for tools by --chat_template FILE",
        )
    logger.info("chat format: %s", opened.description)
    return opened


@dataclass(frozen=True)
class _Opener:
    folder: str
    files: ChatFiles
    tokens: ControlTokens
    kwargs: Mapping[str, Any]
    model: ModelConfig
    parser: str | None
    reads_images: bool
    """Then only the template is chosen: it shows images."""

    def open(self) -> ChatFormat:
        name = self.model.chat_format
        if name == "auto":
            return self._choose()
        if name == "template":
            return self._validate_template(self._template())
        return self._validate_family(self._of_family(name))

    def _choose(self) -> ChatFormat:
        """Return the renderer with the template's ids, else the template, else the family's renderer.

        A template that another parser reads than the one of its marks is the last choice: it writes calls
        as its family does not.
        """
        refusal: ModelError | None = None
        by_template = template = None
        try:
            template = self._template()
            if self.reads_images:
                return self._validate_template(template)
            for candidate in self._candidates(names_for_tokenizer(self.tokens)):
                if (equal := self._same_as_template(candidate, template)) is not None:
                    return equal
            by_template = self._validate_template(template)
            if self._is_read_as_marked(by_template):
                return by_template
        except ModelError as error:
            refusal = error
        for candidate in self._candidates(names_of_type(str(self.files.config.get("model_type", "")))):
            with suppress(ModelError):
                of_family = self._validate_family(candidate)
                if not of_family.tool_problems and _begins_alike(candidate, template):
                    return of_family
        if by_template is None:
            assert refusal is not None
            raise refusal
        return by_template

    def _is_read_as_marked(self, opened: ChatFormat) -> bool:
        """Return whether the parser that the template's marks name reads the calls in it."""
        if opened.tool_problems or opened.adaptation.calls_as_text:
            return False
        renderer = opened.renderer
        return self.parser is not None or (
            isinstance(renderer, TemplateRenderer)
            and renderer.parser_name == parser_of_template(renderer.template.source)
        )

    def _same_as_template(self, candidate: FamilyRenderer, template: TemplateRenderer) -> ChatFormat | None:
        """Return the candidate's format if it renders the conversation as the template does."""
        first = CONVERSATION[: ENDS[0]]
        try:
            if candidate.render(first, None) != template.render(first, None):
                return None
            opened = self._validate_family(candidate)
            for end in ENDS:
                messages = opened.adaptation.apply(CONVERSATION[:end])
                if candidate.render(messages, TOOLS) != template.render(messages, TOOLS):
                    return None
        except (ModelError, TrajectoryError):
            return None
        is_read = self.parser is not None or reads_its_calls(opened.renderer, opened.adaptation)
        return opened if is_read and not opened.tool_problems else None

    def _validate_template(self, template: TemplateRenderer) -> ChatFormat:
        """Validate the template; without ``--tool_call_parser``, find the parser that reads its calls."""
        opened = self._validate(template)
        if self.parser is not None or opened.tool_problems or opened.adaptation.calls_as_text:
            return opened
        likely = parser_of_template(template.template.source)
        for name in sorted(PARSERS.names(), key=lambda name: name != likely):
            candidate = template if name == template.parser_name else template.with_parser(name)
            if reads_its_calls(candidate, opened.adaptation):
                return replace(opened, renderer=candidate)
        problem = "writes tool calls that no parser reads; give --tool_call_parser"
        return replace(opened, tool_problems=(problem,))

    def _validate_family(self, renderer: FamilyRenderer) -> ChatFormat:
        """Validate a family's renderer; the text parser of the template reads its calls, if it can."""
        opened = self._validate(renderer)
        marks = self.files.template
        if (
            self.parser is None
            and marks is not None
            and renderer.name != HARMONY
            and not opened.tool_problems
        ):
            by_text = renderer.with_parser(get_parser(parser_of_template(marks)))
            if reads_its_calls(by_text, opened.adaptation):
                return replace(opened, renderer=by_text)
        return opened

    def _candidates(self, names: Iterable[str]) -> Iterator[FamilyRenderer]:
        for name in names:
            with suppress(ConfigError):
                yield self._of_family(name)

    def _of_family(self, name: str) -> FamilyRenderer:
        parser: ToolCallParser | None = None if self.parser is None else get_parser(self.parser)
        return make_family_renderer(name, self.files, self.tokens, self.kwargs, parser)

    def _template(self) -> TemplateRenderer:
        if self.files.template is None:
            raise ModelError(
                f"{self.folder} has no chat template",
                hint="give one by --chat_template FILE; see assets/chat_templates for examples",
            )
        template = ChatTemplate(self.files.template, self.files.special_tokens, self.kwargs)
        parser = self.parser or parser_of_template(template.source)
        return TemplateRenderer(template, self.tokens, self.files.stop_ids, parser)

    def _validate(self, renderer: Renderer) -> ChatFormat:
        return validate_format(renderer, self.model.thinking_retention, tags_in(self.files.template or ""))


def _begins_alike(candidate: FamilyRenderer, template: TemplateRenderer | None) -> bool:
    """Return whether a first prompt is the template's, or continues it: a thought opened there stays open.

    White space is not compared: gpt-oss's template and its encoder differ in two line breaks.
    """
    first = CONVERSATION[: ENDS[0]]
    try:
        theirs = "" if template is None else template.decode(template.render(first, None))
    except TrajectoryError:
        return True
    ours = candidate.decode(candidate.render(first, None))
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
