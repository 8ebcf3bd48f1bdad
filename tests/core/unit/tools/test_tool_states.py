"""What tools keep between their calls: declared, by default, and built again in a new session."""

from __future__ import annotations

from typing import Any

import number_game
import pytest
from made_documents import made_task
from open_tools import open_tools

from agentrl.calls.turns import execute
from agentrl.chat.parsers.parser import ToolCall
from agentrl.columns.outages import Clock, HeldTools, Outages
from agentrl.config.schema import ToolConfig
from agentrl.documents.document import plain
from agentrl.documents.model_call import Condensed, ToolExecution
from agentrl.documents.status import ToolState
from agentrl.documents.task import Claim
from agentrl.environments.environment import Environment, Observation, environment, open_environment
from agentrl.errors import OutageError
from agentrl.tools.config import Hook, Options, Scope, ToolOptions
from agentrl.tools.pool import ToolPool
from agentrl.tools.python import StatefulTool, tool, tool_state
from agentrl.tools.tool import Schema, ToolSession, TrajectoryInfo, function_schema

SENT: list[str] = []
DOWN: list[int] = []
"""The calls of ``add`` that find the disk away, by the number of lines before them."""


@tool()
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


@tool()
@tool_state("outside")
def send(text: str) -> str:
    """Send a message."""
    SENT.append(text)
    return f"message {len(SENT)}"


@tool()
class Pad:
    """Lines of one trajectory; ``boast`` is told otherwise each time."""

    told = 0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> str:
        """Add a line."""
        if len(self.lines) in DOWN:
            DOWN.remove(len(self.lines))
            raise OutageError("the disk is away")
        self.lines.append(line)
        return "\n".join(self.lines)

    @tool_state("stateless")
    def count(self) -> int:
        """Count the lines."""
        return len(self.lines)

    def boast(self) -> int:
        """Say how often anybody was told."""
        Pad.told += 1
        return Pad.told


class Purse(StatefulTool):
    """Coins, each of which is a reward."""

    def __init__(self, config: Any, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.coins: dict[str, int] = {}

    def get_openai_tool_schema(self) -> Schema:
        return function_schema("earn", "Earn a coin.", None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.coins[instance_id] = self.coins.get(instance_id, 0) + 1
        return f"{self.coins[instance_id]} coins", 0.5

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return float(self.coins.get(instance_id, 0))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.coins.pop(instance_id, None)


FLAGS = ToolConfig(
    tools=",".join(f"{__name__}:{name}" for name in ("shout", "send", "Pad", "Purse")),
    max_tool_result_chars=12,
)
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("add", {"line": "one"}), ("shout", {"text": "a"}), ("send", {"text": "hi"}), ("add", {"line": "two"}),
    ("earn", {}), ("add", {"line": 3}), ("add", {"line": "six and seven"}),
)  # fmt: skip
"""The fifth line is no text, which is an error; the last result is cut."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SENT", "DOWN"):
        monkeypatch.setattr(f"{__name__}.{name}", [])
    monkeypatch.setattr(Pad, "told", 0)


async def made(tools: ToolSession, *calls: tuple[str, dict[str, Any]]) -> list[ToolExecution]:
    """Call tools as a trajectory does; return what it stores."""
    return [await execute(ToolCall(name, arguments), tools) for name, arguments in calls]


async def test_a_new_session_gets_the_state_of_one_that_is_gone() -> None:
    async with open_tools(FLAGS) as tools:
        stored = await made(tools, *CALLS)
        rewards = await tools.rewards()
    assert [execution.error for execution in stored] == [False] * 5 + [True, False]
    assert stored[-1].result.endswith("more characters]")
    async with open_tools(FLAGS) as tools:
        assert await tools.replay(stored) is None
        for execution in stored:
            tools.recall(execution)
        assert await tools.rewards() == rewards
        assert (await tools.call("count", {})).text == "3"
    assert SENT == ["hi"], "what has effects outside is never called twice"


@pytest.mark.parametrize(
    "change", [{"result": "another"}, {"error": True}, {"arguments": "no object"}, {"name": "gone"}]
)
async def test_the_first_call_that_ends_otherwise_is_named(change: dict[str, Any]) -> None:
    async with open_tools(FLAGS) as tools:
        stored = await made(tools, *CALLS[:4])
    document = stored[3].to_document()
    stored[3] = ToolExecution.from_document({**document, **change})
    async with open_tools(FLAGS) as tools:
        assert await tools.replay(stored) == 3


async def test_a_tool_that_never_says_the_same_differs() -> None:
    async with open_tools(FLAGS) as tools:
        stored = await made(tools, ("boast", {}), ("boast", {}))
    async with open_tools(FLAGS) as tools:
        assert await tools.replay(stored[1:]) == 0


async def test_a_condensed_result_is_compared_by_what_the_tool_said_itself() -> None:
    condensed = Condensed(purpose="p", original="one", chars=3, tokens=1, calls=(), result="a number")
    async with open_tools(FLAGS) as tools:
        (plain,) = await made(tools, ("add", {"line": "one"}))
    read = {**plain.to_document(), "result": "a number"}
    for chars, differs in ((3, None), (4, 0)):
        own = {**condensed.to_document(), "chars": chars}
        stored = ToolExecution.from_document({**read, "condensed": own})
        async with open_tools(FLAGS) as tools:
            assert await tools.replay([stored]) == differs


async def test_an_outage_repeats_the_call_that_met_it_and_none_before() -> None:
    async with open_tools(FLAGS) as tools:
        stored = await made(tools, *((("add", {"line": line})) for line in "abc"))
    outages = Outages()
    async with open_tools(FLAGS) as tools:
        DOWN.append(1)
        held = HeldTools(tools, outages, Clock())
        assert await held.replay(stored) is None
        assert not DOWN
        assert (await held.call("count", {})).text == "3"
    outages.close()


async def test_python_tools_keep_what_they_declare_and_what_their_kind_says() -> None:
    async with open_tools(FLAGS) as tools:
        found = {name: tools.state_of(name) for name in ("shout", "send", "add", "count", "earn", "unknown")}
        assert tools.state_of("later", "Pad") is ToolState.REPLAY, "it is listed after a call only"
    assert found == {
        "shout": "stateless", "send": "outside", "add": "replay", "count": "stateless", "earn": "replay",
        "unknown": "outside",
    }  # fmt: skip
    with pytest.raises(ValueError, match="only the files of environments are kept"):
        tool_state("snapshot")


READS, REPEATS, NEITHER = (True, True), (False, True), (False, False)
"""Whether the annotations say read-only, and whether read-only or idempotent."""


@pytest.mark.parametrize(
    ("options", "hints", "state"),
    [
        (Options(), READS, "stateless"),
        (Options(), REPEATS, "stateless"),
        (Options(), NEITHER, "outside"),
        (Options(setup=(Hook(tool="load"),)), READS, "stateless"),
        (Options(setup=(Hook(tool="load"),)), REPEATS, "replay"),
        (Options(scope=Scope.TRAJECTORY), READS, "stateless"),
        (Options(scope=Scope.TRAJECTORY), REPEATS, "replay"),
        (Options(scope=Scope.TRAJECTORY), NEITHER, "replay"),
        (Options(state=ToolState.STATELESS), NEITHER, "stateless"),
        (
            Options(state=ToolState.STATELESS, tools={"t": ToolOptions(state=ToolState.OUTSIDE)}),
            READS,
            "outside",
        ),
        (Options(state=ToolState.REPLAY, tools={"t": ToolOptions(concurrency=1)}), READS, "replay"),
    ],
)
def test_a_server_keeps_what_its_entry_says_else_what_scope_and_annotations_say(
    options: Options, hints: tuple[bool, bool], state: str
) -> None:
    assert options.state_of("t", reads=hints[0], repeatable=hints[1]) == state


async def test_state_that_is_built_again_has_an_id_of_its_owner() -> None:
    task = made_task("t")
    began = Claim(task=task, traj_id=0, attempt=1, owner="a")
    goes_on = Claim(task=task, traj_id=0, attempt=3, begun=1, owner="b")
    assert [TrajectoryInfo.of(began).key(replayed=kept) for kept in (True, False)] == [began.record_id] * 2
    keys = [TrajectoryInfo.of(goes_on).key(replayed=kept) for kept in (True, False)]
    assert keys == [f"{began.record_id}@3", began.record_id]


@environment("declared_states")
class Declared(Environment):
    """Two tools, of which one has effects outside."""

    tools = ("look", "buy")

    def look(self) -> str:
        """Look."""
        return "a shop"

    @tool_state("outside")
    def buy(self) -> str:
        """Buy."""
        return "bought"


async def test_an_environment_takes_stored_messages_again() -> None:
    task = made_task("t", environment="number_game", meta={"secret": 5})
    steps = [("2", Observation("higher")), ("7", Observation("lower")), ("5", Observation("", done=True))]
    assert number_game.NumberGame.state is ToolState.REPLAY
    for stored, differs in ((steps, None), ([*steps[:2], ("5", Observation("lower"))], 2)):
        session = open_environment(task, call_timeout=10)
        assert session is not None
        await session.open()
        assert await session.replay([(text, plain(answer)) for text, answer in stored]) == differs
        assert await session.reward() == 1.0
        await session.close()


async def test_an_environment_declares_its_state_and_that_of_a_tool() -> None:
    task = made_task("t", environment="declared_states")
    session = open_environment(task, call_timeout=10)
    info = TrajectoryInfo(id="r", servers=())
    async with ToolPool(ToolConfig()) as pool, pool.session(info, session) as tools:
        assert [tools.state_of(name) for name in ("look", "buy")] == ["replay", "outside"]


def test_an_environment_with_another_attribute_state_is_refused() -> None:
    class Own(Environment):
        state: list[int] = []  # type: ignore[assignment, misc]  # noqa: RUF012

    with pytest.raises(TypeError, match=r"its class attribute 'state' is .*name your own otherwise"):
        environment("own_state")(Own)
