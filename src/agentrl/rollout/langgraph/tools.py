"""Offer the tools of a trajectory as LangChain tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.messages.tool import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool

from agentrl.rollout.current import current_rollout
from agentrl.rollout.rollout import Rollout


class PolicyTool(BaseTool):
    """A tool of the trajectory: its runs are recorded with the model call that asked for them."""

    role: str | None = None

    async def ainvoke(
        self, input: str | dict[str, Any] | ToolCall, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """Run the tool; answer a tool call with a ToolMessage, and bare arguments with text."""
        is_call = isinstance(input, dict) and input.get("type") == "tool_call"
        arguments: Any = input["args"] if is_call else input  # type: ignore[index]
        call_id = str(input.get("id") or "") if is_call else ""  # type: ignore[union-attr]
        rollout = current_rollout()
        role = rollout if self.role is None else rollout.role(self.role)
        text, failed = await role.call_tool(call_id, self.name, arguments)
        if not is_call:
            return text
        return ToolMessage(
            text, tool_call_id=call_id, name=self.name, status="error" if failed else "success"
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("tools of a trajectory are asynchronous: use ainvoke")


def policy_tools(rollout: Rollout | None = None, role: str | None = None) -> Sequence[BaseTool]:
    """Return the tools that the trajectory offers, for ``bind_tools`` and ToolNode.

    Without ``rollout`` those of the running agent's. ``role`` names the role whose calls they answer.
    """
    rollout = rollout or current_rollout()
    functions = [schema["function"] for schema in rollout.schemas]
    return [
        PolicyTool(
            name=function["name"],
            description=function.get("description") or "",
            args_schema=function.get("parameters") or {"type": "object", "properties": {}},
            role=role,
        )
        for function in functions
    ]
