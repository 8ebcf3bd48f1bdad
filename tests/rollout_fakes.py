"""Stand-ins for engine and tools, and a byte tokenizer: rollouts without services."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.calls.journal import Journal
from agentrl.calls.trajectory_calls import TrajectoryCalls
from agentrl.calls.turns import Tools, Turn
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.renderer import ChatTemplate, ControlTokens, TemplateRenderer
from agentrl.config.schema import AgentConfig
from agentrl.documents.images import Image
from agentrl.documents.model_call import Event, PartialGeneration, ToolExecution, VersionSpan
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ToolState
from agentrl.documents.task import Claim
from agentrl.environments.environment import EnvironmentSession
from agentrl.errors import ImageError, ToolServerError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EncodedIds, Engine, Generation, Held, Progress
from agentrl.rollout.agents import CONTEXT_MANAGERS
from agentrl.rollout.rollout import ContextManager, Rollout
from agentrl.tools.tool import OwnSession, Schema, ToolResult, TrajectoryInfo, function_schema

T = TypeVar("T")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>"]
END, END_OF_TEXT = 257, 258
CUT = "✂"

PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer() -> Tokenizer:
    """A token a byte, and the special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def format_of(template: str = PLAIN, parser: str = "hermes") -> ChatFormat:
    """A template with the byte tokenizer."""
    tokens = ControlTokens(byte_tokenizer(), template)
    return ChatFormat(TemplateRenderer(ChatTemplate(template, {}), tokens, {END, END_OF_TEXT}, parser))


class ScriptedEngine:
    """Says what the script says, in order; an exception in it is raised, a callable sees the prompt.

    A line that ends in ``CUT`` is cut there by the length limit.
    """

    def __init__(self, chat_format: ChatFormat, *script: str | BaseException | Callable[[str], str]) -> None:
        self.chat_format = chat_format
        self.script = list(script)
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.version = 3
        self.context_length: int | None = None
        self.partial: PartialGeneration | None = None
        self.experts_of: Callable[[Sequence[int]], bytes] | None = None
        """The routing of token ids, if the engine returns any."""

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """The next line, closed by the end-of-turn token; ``progress`` gets it in pieces of four tokens."""
        self.prompts.append(list(input_ids))
        line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(line, BaseException):
            raise line
        text = line if isinstance(line, str) else line(self.chat_format.decode(input_ids))
        is_cut = text.endswith(CUT)
        ids = [*self.chat_format.tokens.encode(text.removesuffix(CUT)), *([] if is_cut else [END])]
        self.outputs.append(ids)
        for start in range(0, len(ids) if progress is not None else 0, 4):
            progress(start, ids[start : start + 4])  # type: ignore[misc]
            await asyncio.sleep(0)
        return Generation(
            output_ids=tuple(ids),
            logprobs=tuple(-0.5 for _ in ids),
            versions=(VersionSpan(version=self.version, start=0, end=len(ids)),),
            finish_reason="length" if is_cut else "stop",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            seconds=0.01,
            engine_url="http://engine",
            routing=b""
            if self.experts_of is None
            else self.experts_of([*input_ids, *ids][routed_from or 0 : -1]),
        )

    @asynccontextmanager
    async def session(
        self,
        traj_id: str,
        group: str | None = None,
        partial: PartialGeneration | None = None,
        held: Held = nullcontext,
    ) -> AsyncIterator[ScriptedEngine]:
        """As a router: itself for every trajectory."""
        yield self


async def call_at_once(call: Callable[[], Awaitable[T]], /) -> T:
    """Make a call once."""
    return await call()


def make_rollout(
    claim: Claim,
    config: AgentConfig,
    *,
    chat_format: ChatFormat,
    engine: Engine,
    write: Callable[[Turn], Awaitable[None]],
    tools: Tools | None = None,
    schemas: Sequence[Schema] = (),
    params: SamplingParams | None = None,
    seed: int = 7,
    images: MemoryImages | None = None,
    manage_context: ContextManager | None = None,
    environment: EnvironmentSession | None = None,
    journal: Journal | None = None,
) -> Rollout:
    """A trajectory whose finished model calls go to ``write``; by default without tools and images."""
    calls = TrajectoryCalls(
        claim, config, chat_format=chat_format, engine=engine, params=params or SamplingParams(), seed=seed,
        writer=_Writes(write), journal=journal or Journal((), nothing, nothing), hold=call_at_once,
        images=images or MemoryImages(), environment=environment, tools=tools,  # type: ignore[arg-type]
    )  # fmt: skip
    return Rollout(
        claim, config, calls=calls, tools=tools or FakeTools(), schemas=schemas,  # type: ignore[arg-type]
        manage_context=manage_context or CONTEXT_MANAGERS.get(config.new_context), environment=environment,
    )  # fmt: skip


async def nothing(_: object) -> None:
    """Do nothing."""


class _Writes:
    """Gives calls that change no more to ``write``."""

    def __init__(self, write: Callable[[Turn], Awaitable[None]]) -> None:
        self._write = write

    async def write(self, call: Turn) -> None:
        """It changes no more."""
        await self._write(call)

    def offer(self, call: Turn) -> None:
        """It may change again."""

    async def flush(self) -> None:
        """Nothing waits."""

    async def note_snapshot(self, call: Turn) -> None:
        """The call has it."""

    async def keep_events(self, events: Sequence[Event]) -> None:
        """Nobody goes on with it."""


class MemoryImages:
    """Images of a process without a database."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}

    async def put(self, *images: Image) -> None:
        """Keep images."""
        self._images |= {image.id: image for image in images}

    async def get(self, hashes: Collection[str]) -> dict[str, Image]:
        """Return images by hash. Raises ImageError for an unknown one."""
        unknown = [key for key in hashes if key not in self._images]
        if unknown:
            raise ImageError(f"the image {unknown[0][:12]}… is not stored", hint="load the tasks again")
        return {key: self._images[key] for key in hashes}


class OneEngine:
    """The client of an engine, as the engine of a trajectory."""

    partial: PartialGeneration | None = None

    def __init__(self, client: EngineClient, context_length: int | None = None) -> None:
        self.client = client
        self.context_length = context_length

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """One request, without resumption."""
        return await self.client.generate(
            input_ids, params, uuid.uuid4().hex, images=images, encoded=encoded, routed_from=routed_from
        )


class FakeTools:
    """``add`` adds, or answers ``text``; ``fail`` answers with an error; ``raised`` is raised by any call."""

    down: Mapping[str, ToolServerError] = {}
    known: frozenset[str] | None = None

    async def connect(self, name: str) -> None:
        """None is down."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.raised: Exception | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.rewards: list[float] = []
        """The rewards of the next calls of ``add``."""

    def list(self, servers: Sequence[str] | None = None) -> Sequence[Schema]:
        """The two tools, or none where the task wants none."""
        number = {"type": "integer"}
        parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
        schemas = [function_schema("add", "Adds.", parameters), function_schema("fail", "Fails.", None)]
        return schemas if servers is None or servers else []

    @asynccontextmanager
    async def session(
        self, trajectory: TrajectoryInfo, environment: OwnSession | None = None
    ) -> AsyncIterator[FakeSession]:
        """The tools that the task of a trajectory names."""
        yield FakeSession(self, trajectory.servers)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one."""
        if self.raised is not None:
            raise self.raised
        self.calls.append((name, dict(arguments)))
        if name == "fail":
            return ToolResult(text="it broke", error=True, seconds=0.0, server="fake")
        text = self.text or str(arguments["a"] + arguments["b"])
        reward = self.rewards.pop(0) if self.rewards else None
        return ToolResult(text=text, error=False, seconds=0.0, server="fake", reward=reward)


class FakeSession:
    """The tools of one trajectory."""

    def __init__(self, tools: FakeTools, servers: Sequence[str] | None) -> None:
        self.tools = tools
        self.servers = servers

    async def list(self) -> Sequence[Schema]:
        """The tools that the task wants."""
        return self.tools.list(self.servers)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one."""
        return await self.tools.call(name, arguments)

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        """None keeps anything."""
        return ToolState.STATELESS

    def recall(self, execution: ToolExecution) -> None:
        """None gives a reward."""

    async def replay(self, executions: Sequence[ToolExecution]) -> int | None:
        """Nothing is to be made again."""
        return None

    keeps_files = False

    async def snapshot(self) -> str | None:
        """Nothing is kept."""
        return None

    async def restore(self, reference: str) -> bool:
        """Nothing is kept."""
        return False

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """None gives one."""
        return {}
