"""Run ChatLearn's agent graphs: their file imports from this module what it imported from ``chatlearn``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatResult
from langgraph.errors import GraphRecursionError

from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.langgraph.chat_model import PolicyChatModel
from agentrl.rollout.langgraph.graph import outcome_of
from agentrl.rollout.langgraph.messages import from_messages
from agentrl.rollout.outcome import Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.user_code import describe

__all__ = ["AgentGraphOutput", "BaseAgentGraph", "CustomChatModel", "run_agent_graph"]

_instances: WeakKeyDictionary[type, dict[Path | None, Any]] = WeakKeyDictionary()
"""Agent graphs by their class and the agent's file: a process makes each once."""


@dataclass(kw_only=True)
class AgentGraphOutput:
    """What ``run`` of an agent graph returns.

    The tokens of the trajectory are those that the engine sampled, so an output names none.
    """

    state: Mapping[str, Any]
    """The final state of the graph."""
    reward_score: float | None = None
    """The agent's own score; None leaves the trajectory to the scorer of its task."""
    num_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


class BaseAgentGraph:
    """The base of an agent graph: ``build_graph`` makes ``self.graph``, and ``run`` runs it on a task."""

    graph: Any

    def __init__(self, agent_name: str, cfg: Any, llm: Any = None, tokenizer: Any = None, **_: Any) -> None:
        """``cfg`` is the agent's YAML file; ``llm`` and ``tokenizer`` are None: the chat model needs none."""
        self.agent_name = agent_name
        self.cfg = cfg
        self.llm = llm
        self.tokenizer = tokenizer

    def build_graph(self) -> Any:
        """Make the chat model; a subclass also makes its graph."""
        self.chatmodel = CustomChatModel(model=self.agent_name)

    async def run(self, messages: Any, sampling_params: dict[str, Any], **fields: Any) -> AgentGraphOutput:
        """Run the graph on ``messages``; ``fields`` are ``ground_truth`` and the other fields of the task."""
        config = {"configurable": {"sampling_params": sampling_params, **fields}}
        return self.convert_agent_graph_output(
            await self.graph.ainvoke({"messages": messages}, config=config)
        )

    def convert_agent_graph_output(self, messages: Mapping[str, Any]) -> AgentGraphOutput:
        """Return the output that a final state describes."""
        kept = messages["messages"]
        turns = max((place for place, item in enumerate(kept, 1) if isinstance(item, AIMessage)), default=0)
        return AgentGraphOutput(state=messages, num_turns=turns)


class CustomChatModel(PolicyChatModel):
    """The policy as ChatLearn's chat model: ``sampling_params`` of a call, ``loss_mask`` of its answer."""

    model: str | None = None
    llm: Any = None
    tokenizer: Any = None

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        params = dict(kwargs.pop("sampling_params", None) or {})
        if "max_new_tokens" in params:
            params["max_tokens"] = params.pop("max_new_tokens")
        result = await super()._agenerate(messages, stop, run_manager, **kwargs, **params)
        for generation in result.generations:
            answer = generation.message
            if isinstance(answer, AIMessage) and answer.usage_metadata is not None:
                used = answer.usage_metadata
                mask = _mask_before(messages, used["input_tokens"]) + [1] * used["output_tokens"]
                answer.response_metadata["loss_mask"] = mask
        return result


async def run_agent_graph(found: type, rollout: Rollout) -> Outcome:
    """Run an agent graph on the task of ``rollout``; the answer is read as that of a LangGraph agent.

    ``run`` gets the first messages, empty ``sampling_params`` (those of the run then hold), ``ground_truth``
    and the fields of ``meta``.
    """
    instances = _instances.setdefault(found, {})
    path = rollout.agent_cfg_path
    if path not in instances:
        name = rollout.task.agent_name or rollout.config.agent_name
        instances[path] = found(agent_name=name, cfg=rollout.cfg, llm=None, tokenizer=None)
    fields = {"ground_truth": rollout.task.answer, **rollout.task.meta}
    messages = from_messages(rollout.first_messages)
    try:
        output = await instances[path].run(**{**fields, "messages": messages, "sampling_params": {}})
    except GraphRecursionError:
        return Outcome(StopReason.TURNS_LIMIT)
    if not isinstance(output, AgentGraphOutput):
        raise TrajectoryError(
            f"run of {found.__name__} returned {describe(output)}",
            hint="return self.convert_agent_graph_output(final_state)",
        )
    outcome = outcome_of(output.state, rollout.task.answer_schema)
    return outcome if output.reward_score is None else replace(outcome, score=float(output.reward_score))


def _mask_before(messages: list[BaseMessage], prompt_tokens: int) -> list[int]:
    """Return the mask of a prompt: 1 for the tokens that the policy sampled in an answer before.

    It is right for a conversation that only grows. Training does not read it.
    """
    before = [mask for item in messages if (mask := item.response_metadata.get("loss_mask")) is not None]
    known: list[int] = before[-1] if before and len(before[-1]) <= prompt_tokens else []
    return known + [0] * (prompt_tokens - len(known))
