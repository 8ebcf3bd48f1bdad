"""Let a model other than the policy play a role of a trajectory: recorded, and never trained."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.chat.chat_format import Message, without_thought
from agentrl.chat.parsers.base import ParsedMessage, ToolCall
from agentrl.chat.vision import require_text_only
from agentrl.concurrency import Deadline
from agentrl.documents.base import sanitize_bson
from agentrl.documents.model_call import FixedModelCall
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError, TrajectoryError, judge
from agentrl.inference.engine import Generation
from agentrl.llm.agent_config import AgentSection, ModelEndpoint
from agentrl.llm.ask import Answer, NoAnswerError, ask
from agentrl.rollout.agent_io import failure_text
from agentrl.rollout.model_call import PendingCall, Turn, cleaned, message_of, with_text_arguments
from agentrl.rollout.prompts import Prompt
from agentrl.rollout.role import Role, Shared
from agentrl.tools.base import Schema
from agentrl.validation import Positive, PositiveWhole, Settings, Text, read_config

Reply = Answer[str]

_NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedModel(Settings):
    """A model behind an OpenAI-compatible API. Its key stays in the environment."""

    base_url: Text
    """With ``/v1``."""
    model: Text
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; None for a server that wants none."""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of every request, such as ``temperature``."""
    timeout: Positive = 120.0
    """Seconds for one request."""
    max_retries: PositiveWhole = 3
    max_concurrency: PositiveWhole = 32
    """Requests of this process under way at a time."""

    @classmethod
    def of(cls, given: Any, what: str) -> FixedModel:
        """Return the model that a mapping of a file describes. Raises ConfigError that names ``what``."""
        return read_config(cls, given, what, hint="docs/multi_agent.md describes a fixed model")

    @property
    def shown_url(self) -> str:
        """Return the base URL without user name, password, query and fragment."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def section(self) -> AgentSection:
        """Return the endpoint with its limits. Raises ConfigError if the key's variable is not set."""
        key = _NO_KEY if self.api_key_env is None else os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(
                f"the fixed model {self.model} takes its key from ${self.api_key_env}, which is not set",
                hint="set it for the sampler, or give api_key_env=None for a server without keys",
            )
        endpoint = ModelEndpoint(
            model=self.model, base_url=self.base_url, api_key=key, params={},
            max_concurrency=self.max_concurrency,
        )  # fmt: skip
        return AgentSection(
            name="fixed_model", models=(endpoint,), max_retries=self.max_retries, timeout=self.timeout
        )


class FixedRole(Role):
    """A role that a FixedModel plays, with the methods of every role.

    Its calls are recorded without ids. The policy does not see them, unless an agent gives their text to one
    of the policy's roles.
    """

    _fixed = True

    def __init__(
        self,
        shared: Shared,
        name: str,
        model: FixedModel,
        *,
        first_messages: Sequence[Message],
        schemas: Sequence[Schema],
        max_turns: int | None = None,
    ) -> None:
        self.model = model
        self._section = model.section()
        super().__init__(shared, name, first_messages=first_messages, schemas=schemas, max_turns=max_turns)

    @property
    def prompt_tokens(self) -> int:
        """Return 0: the model's tokens are not known here."""
        return 0

    def would_fit(self, messages: Sequence[Message]) -> bool:
        """Return True: the model's context length is not known here."""
        return True

    async def generate(self, **changes: Any) -> Turn:
        """Make one call of the model; ``changes`` are parameters of the request for this call only.

        Waits while the model is down. Raises TrajectoryError if it refuses the request, and TurnsLimitError
        at the limit of the role.
        """
        self._require_turns()
        parent = await self._store_before()
        new = self._conversation.unseen
        params = {**self.model.params, **changes}
        reply = await self._calls.hold(lambda: self._ask(params))
        parsed = _parsed(reply)
        message = message_of(parsed, f"call{self._calls.turns % 1000:03d}")
        prompt = Prompt(
            ids=[], context_ids=[], messages=self._conversation.messages, new_messages=new,
            parent=None if parent is None else parent.id, opens_branch=parent is None,
        )  # fmt: skip
        pending = PendingCall(
            record=self._calls.record,
            prompt=prompt,
            role=self.name,
            tools=self.schemas,
            params=SamplingParams(),
            generation=_generation(reply, self.model),
            response=message,
            read=() if parent is None else parent.executions,
            settled=not parsed.tool_calls and parsed.error is None,
            fixed=FixedModelCall(
                model=self.model.model,
                base_url=self.model.shown_url,
                params=sanitize_bson(params),
                prompt_tokens=reply.spent.prompt_tokens,
                completion_tokens=reply.spent.completion_tokens,
                cost=reply.spent.cost,
            ),
        )
        self._calls.add(pending)
        self._conversation.append_message(message)
        self._made(pending)
        return self._calls.turn(pending, parsed, parsed.content)

    async def _ask(self, params: Mapping[str, Any]) -> Reply:
        require_text_only(self._conversation.messages, f"the fixed model of role {self.name}")
        messages = [with_text_arguments(without_thought(each)) for each in self._conversation.messages]
        tools = {"tools": self.schemas} if self.schemas else {}
        seconds = self.model.timeout * self.model.max_retries
        try:
            return await ask(
                self._section, messages, lambda text: text, Deadline(seconds), {**params, **tools}
            )
        except NoAnswerError as error:
            raise TrajectoryError(
                f"the model {self.model.model} of role {self.name} gave no answer:"
                f" {failure_text(str(error))}",
                outage=judge(self.model.model) if error.is_outage else None,
                retry_after=error.retry_after,
            ) from error


def _parsed(reply: Reply) -> ParsedMessage:
    """Return the message of a reply; a tool call that cannot be read is its error."""
    if reply.completion.is_cut:
        return cleaned(ParsedMessage(reply.value))
    calls, error = [], None
    for call in reply.completion.tool_calls:
        try:
            function = call["function"]
            arguments = json.loads(function.get("arguments") or "{}")
            if not isinstance(arguments, dict):
                raise TypeError("the arguments are not a JSON object")
            calls.append(ToolCall(str(function["name"]), arguments))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            error = error or f"a tool call cannot be read: {failure_text(problem)}"
    return cleaned(ParsedMessage(reply.value, tuple(calls), error))


def _generation(reply: Reply, model: FixedModel) -> Generation:
    """Return a generation without tokens of the policy."""
    return Generation(
        output_ids=(), logprobs=(), versions=(),
        finish_reason="length" if reply.completion.is_cut else "stop",
        prompt_tokens=0, cached_tokens=0, seconds=reply.spent.seconds, engine_url=model.shown_url,
    )  # fmt: skip
