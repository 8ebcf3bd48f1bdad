"""LangGraph graphs as agents: the policy as a chat model, token in and token out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import pytest
from trajectories import ADD, Trajectory, trained

from agentrl.config.schema import AgentConfig
from agentrl.documents.status import CallStatus, StopReason
from agentrl.errors import ConfigError, FailureError, TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout, current_rollout

pytest.importorskip("langgraph", reason="not installed: langgraph (pip install -e '.[langgraph]')")

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition

from agentrl.worlds.langgraph import (
    AgentGraphOutput,
    BaseAgentGraph,
    CustomChatModel,
    PolicyChatModel,
    policy_tools,
    run_graph,
)


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def looped(call: Any, tools: Any) -> Any:
    """Build the graph model → tools → model."""
    graph = StateGraph(MessagesState)
    graph.add_node("model", call)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def asking(model: Any) -> Any:
    """A node that asks a model."""

    async def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return call


def with_tools(tools: Any, **settings: Any) -> Any:
    return looped(asking(PolicyChatModel(**settings).bind_tools(tools)), tools)


async def run(found: Any, *script: Any, **flags: Any) -> tuple[Trajectory, Outcome]:
    """Run a graph as the agent that it is registered as."""
    agent("graph_of_test")(found)
    trajectory = Trajectory(*script, **flags)
    return trajectory, await trajectory.run("graph_of_test")


async def test_a_compiled_graph_with_tools_is_one_chain_of_sampled_ids() -> None:
    graph = with_tools([add])
    trajectory, outcome = await run(graph, ADD, "<answer>3</answer>")
    assert (outcome.stop_reason, outcome.final_answer) == (StopReason.ANSWERED, "3")
    assert [call.parent for call in trajectory.calls] == [None, trajectory.calls[0].id]
    assert trajectory.calls[0].tools is not None
    assert trajectory.calls[0].tools[0]["function"]["name"] == "add"
    assert [message["content"] for message in trajectory.calls[1].messages] == ["3"]
    assert trained(trajectory) == trajectory.engine.outputs
    both = [await run(graph, ADD, f"<answer>{answer}</answer>") for answer in (4, 5)]
    assert [outcome.final_answer for _, outcome in both] == ["4", "5"], "one graph serves every trajectory"


async def test_the_tools_of_the_trajectory_are_recorded() -> None:
    async def drive(rollout: Rollout) -> Outcome:
        return await run_graph(rollout, with_tools(policy_tools()))

    fail = '<tool_call>{"name": "fail", "arguments": {}}</tool_call>'
    trajectory = Trajectory(ADD, fail, "<answer>3</answer>")
    assert (await trajectory.run(drive)).final_answer == "3"
    results = [[item.result for item in call.tool_executions] for call in trajectory.calls]
    assert results == [["3"], ["it broke"], []]
    assert trajectory.statuses == [CallStatus.COMPLETED, CallStatus.TOOL_FAILED, CallStatus.COMPLETED]
    assert trajectory.tools.calls == [("add", {"a": 1, "b": 2}), ("fail", {})]


async def test_build_graph_gets_the_cfg_file_and_is_built_once(tmp_path: Path) -> None:
    built = []

    def build_graph(cfg: Any) -> Any:
        built.append(cfg.model.temperature)
        return with_tools([add], temperature=cfg.model.temperature, max_tokens=cfg["model"].max_tokens)

    file = tmp_path / "agent.yml"
    file.write_text("model:\n  temperature: 0.5\n  max_tokens: 64\n", encoding="utf-8")
    for _ in range(2):
        trajectory, outcome = await run(build_graph, "<answer>3</answer>", agent_cfg_path=str(file))
        assert outcome.final_answer == "3"
        assert trajectory.calls[0].sampling_params["temperature"] == 0.5
        assert trajectory.calls[0].sampling_params["max_new_tokens"] == 64
    assert built == [0.5]
    agent("graph_of_test")(build_graph)
    named = tmp_path / "named.yml"
    named.write_text("graph: graph_of_test\nmodel: {temperature: 1.0, max_tokens: 8}\n", encoding="utf-8")
    trajectory = Trajectory("<answer>3</answer>", agent_cfg_path=str(named))
    assert (await trajectory.run("langgraph")).final_answer == "3"
    with pytest.raises(ConfigError, match="names no graph"):
        await Trajectory("x").run("langgraph")
    empty = tmp_path / "empty.yml"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(FailureError, match="the agent's cfg has no 'model'"):
        await run(build_graph, "x", agent_cfg_path=str(empty))


async def test_a_graph_that_drops_messages_branches() -> None:
    model = PolicyChatModel()
    think = asking(model)

    async def shorten(state: MessagesState) -> dict[str, Any]:
        summary = await model.ainvoke([*state["messages"], HumanMessage("Summarize.")])
        gone = [RemoveMessage(id=str(message.id)) for message in state["messages"]]
        return {"messages": [*gone, HumanMessage(f"So far: {summary.content}. Go on.")]}

    graph = StateGraph(MessagesState)
    for name, node in (("think", think), ("shorten", shorten), ("end", think)):
        graph.add_node(name, node)
    for edge in ((START, "think"), ("think", "shorten"), ("shorten", "end"), ("end", END)):
        graph.add_edge(*edge)
    trajectory, outcome = await run(graph.compile(), "hm", "it is three", "<answer>3</answer>")
    assert outcome.final_answer == "3"
    first, summary, last = trajectory.calls
    assert (summary.parent, last.parent, last.opens_branch) == (first.id, None, True)
    assert sorted(trained(trajectory)) == sorted(trajectory.engine.outputs)
    prompt = trajectory.engine.chat_format.decode(trajectory.engine.prompts[2])
    assert "hm" not in prompt
    assert "So far: it is three." in prompt


class _Both(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    left: str
    right: str
    level: int
    score: float
    rewards: dict[str, float]
    final_answer: str


async def test_parallel_nodes_roles_fields_and_the_graphs_own_score() -> None:
    def side(name: str) -> Any:
        model = PolicyChatModel(role=name)

        def node(state: _Both) -> dict[str, Any]:  # a plain function: it runs in a thread
            return {name: model.invoke([HumanMessage(f"{name} of level {state['level']}")]).content}

        return node

    def join(state: _Both) -> dict[str, Any]:
        return {
            "final_answer": f"{state['left']}|{state['right']}", "score": 0.75,
            "rewards": {"left": 1.0, "right": 0.5},
        }  # fmt: skip

    graph = StateGraph(_Both)
    for name in ("left", "right"):
        graph.add_node(f"{name}_node", side(name))
        graph.add_edge(START, f"{name}_node")
    graph.add_node("join", join)
    graph.add_edge(["left_node", "right_node"], "join")
    trajectory, outcome = await run(
        graph.compile(), lambda prompt: prompt.split("user\n")[1].split(" of")[0].upper(),
        task={"meta": {"level": 7, "unknown": 1}},
    )  # fmt: skip
    assert outcome.final_answer == "LEFT|RIGHT"
    assert (outcome.score, outcome.rewards) == (0.75, {"left": 1.0, "right": 0.5})
    assert {call.role for call in trajectory.calls} == {"left", "right"}
    assert all("level 7" in str(call.messages) for call in trajectory.calls)
    assert trajectory.rollout.agent_score is not None
    assert trajectory.rollout.agent_score["role_rewards"] == {"left": 1.0, "right": 0.5}


@agent("adder_of_test")
class Adder(BaseAgentGraph):
    """An agent graph as one writes it for ChatLearn, with other imports."""

    made = 0
    masks: ClassVar[list[list[int]]] = []

    def __init__(self, agent_name: str, cfg: Any, llm: Any, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(agent_name, cfg, llm, tokenizer, **kwargs)
        Adder.made += 1
        self.build_graph()

    def build_graph(self) -> None:
        chat = CustomChatModel(model=self.agent_name, llm=self.llm, tokenizer=self.tokenizer)
        self.model = chat.bind_tools([add])

        async def call(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
            params = {**config["configurable"]["sampling_params"], "max_new_tokens": self.cfg.tokens}
            return {"messages": [await self.model.ainvoke(state["messages"], sampling_params=params)]}

        self.graph = looped(call, [add])

    async def run(self, messages: Any, sampling_params: dict[str, Any], **kwargs: Any) -> AgentGraphOutput:
        assert (kwargs["ground_truth"], kwargs["level"]) == ("3", 7)
        output = await super().run(messages, sampling_params, **kwargs)
        answers = [message for message in output.state["messages"] if isinstance(message, AIMessage)]
        self.masks.extend(answer.response_metadata["loss_mask"] for answer in answers)
        output.reward_score = 0.5
        return output


async def test_an_agent_graph_of_chatlearn_runs_by_its_registered_name(tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("tokens: 48\n", encoding="utf-8")
    task = {"answer": "3", "meta": {"level": 7}}
    for _ in range(2):
        trajectory = Trajectory(ADD, "<answer>3</answer>", task=task, agent_cfg_path=str(file))
        outcome = await trajectory.run("adder_of_test")
        assert (outcome.final_answer, outcome.score) == ("3", 0.5)
        assert [call.parent for call in trajectory.calls] == [None, trajectory.calls[0].id]
        assert trajectory.calls[0].sampling_params["max_new_tokens"] == 48
    assert Adder.made == 1
    first, last = Adder.masks[:2]
    outputs = [len(output) for output in trajectory.engine.outputs]
    assert (sum(first), sum(last)) == (outputs[0], sum(outputs))
    assert last[: len(first)] == first
    assert len(last) == len(trajectory.engine.prompts[1]) + outputs[1]


async def test_streams_add_up_to_the_answer_and_continue_its_ids() -> None:
    async def drive(rollout: Rollout) -> Outcome:
        model = PolicyChatModel(rollout=rollout).bind_tools([add])
        chunks = [chunk async for chunk in model.astream("Think about it.")]
        assert len(chunks) > 2
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.content == "Let me add the two numbers:"
        assert [call["name"] for call in whole.tool_calls] == ["add"]
        answer = AIMessage(whole.content, tool_calls=whole.tool_calls)
        done = await model.ainvoke([HumanMessage("Think about it."), answer, HumanMessage("And?")])
        return Outcome(StopReason.ANSWERED, str(done.content), 1.0)

    trajectory = Trajectory(f"Let me add the two numbers: {ADD}", "3")
    await trajectory.run(drive)
    assert [call.parent for call in trajectory.calls] == [None, trajectory.calls[0].id]


EXAMPLE = ({"role": "user", "content": "5*7?"}, {"role": "assistant", "content": "<answer>35</answer>"})


@pytest.mark.parametrize(
    ("said", "added", "expected"),
    [
        ("<answer>4</answer>", [], None),
        ("<answer>4</answer>", ["policy"], "4"),
        ("<answer>35</answer>", ["policy"], "35"),
        ("<answer>4</answer>", ["copy"], "4"),
        ("<answer>4</answer>", ["policy", "<answer>9</answer>"], "4"),
        (ADD.replace('"b": 2}}', '"b": "<answer>4</answer>"'), ["policy"], None),
    ],
)
async def test_the_answer_is_the_policys_and_no_examples(
    said: str, added: list[str], expected: str | None
) -> None:
    model = PolicyChatModel()

    async def think(state: MessagesState) -> dict[str, Any]:
        answer = await model.ainvoke(state["messages"])
        made = {"policy": answer, "copy": AIMessage(answer.content)}
        return {"messages": [made.get(kind) or AIMessage(kind) for kind in added]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    _, outcome = await run(graph.compile(), said, task={"messages": EXAMPLE})
    assert outcome.final_answer == expected
    assert outcome.stop_reason is (StopReason.ANSWERED if expected else StopReason.TURNS_LIMIT)


async def test_limits_and_wrong_uses_are_named() -> None:
    graph = with_tools([add])
    trajectory, outcome = await run(graph, ADD, max_turns=3)
    assert (outcome.stop_reason, len(trajectory.calls)) == (StopReason.TURNS_LIMIT, 3)
    _, outcome = await run(graph, "no answer")
    assert (outcome.stop_reason, outcome.final_answer) == (StopReason.TURNS_LIMIT, None)
    with pytest.raises(TrajectoryError, match="no agent of AgentRL runs here"):
        current_rollout()
    with pytest.raises(ConfigError, match="tool_choice is 'any'"):
        PolicyChatModel().bind_tools([add], tool_choice="any")

    def wrong(**kwargs: Any) -> Any:
        async def drive(rollout: Rollout) -> Outcome:
            await PolicyChatModel().ainvoke("x", **kwargs)
            return Outcome(StopReason.ANSWERED)

        return drive

    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for arguments, problem in (({"stop": ["x"]}, "stop sequences"), ({"n": 2}, "no parameter 'n'")):
        with pytest.raises(ConfigError, match=problem):
            await Trajectory("x").run(wrong(**arguments))

    async def blocking(rollout: Rollout) -> Outcome:
        PolicyChatModel().invoke("x")
        return Outcome(StopReason.ANSWERED)

    async def shown(rollout: Rollout) -> Outcome:
        await PolicyChatModel().ainvoke([HumanMessage(image)])
        return Outcome(StopReason.ANSWERED)

    with pytest.raises(ConfigError, match="would block it"):
        await Trajectory("x").run(blocking)
    with pytest.raises(TrajectoryError, match="type 'image_url'"):
        await Trajectory("x").run(shown)
    with pytest.raises(TrajectoryError, match="the agent's graph is"):
        await run(lambda cfg: 3, "x")
    assert AgentConfig().agent_name == "react"


async def test_the_example_in_the_docs_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "your_own" / "langgraph.md"
    code = page.read_text(encoding="utf-8").split('```python title="my_graph.py"\n')[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
    file = tmp_path / "agent.yml"
    file.write_text("temperature: 0.5", encoding="utf-8")
    trajectory = Trajectory("<answer>3</answer>", agent_cfg_path=str(file))
    assert (await trajectory.run("thinker")).final_answer == "3"
