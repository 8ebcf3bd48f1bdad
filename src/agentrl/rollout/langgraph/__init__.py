"""Run LangGraph graphs as agents: a LangChain chat model over the policy, its tools, and the graph's outcome.

Needs ``pip install 'agentrl[langgraph]'``; nothing else of AgentRL imports it.
"""

from __future__ import annotations

from importlib.util import find_spec

from agentrl.errors import ConfigError

_MISSING = [name for name in ("langchain_core", "langgraph") if find_spec(name) is None]
if _MISSING:
    raise ConfigError(f"{' and '.join(_MISSING)} are not installed", hint="pip install 'agentrl[langgraph]'")

from agentrl.rollout.langgraph.agent_graph import policy_tools, run_graph  # noqa: E402
from agentrl.rollout.langgraph.chat_model import PolicyChatModel  # noqa: E402

__all__ = ["PolicyChatModel", "policy_tools", "run_graph"]
