"""Agents: async functions that drive one trajectory."""

from agentrl.rollout.agents.registry import Agent, agent, agent_names, get_agent

__all__ = ["Agent", "agent", "agent_names", "get_agent"]
