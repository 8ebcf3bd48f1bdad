"""Make the policy's model calls: messages → a stored call, for agents, LangGraph, gateway and evaluation.

``prompts``: messages → ids, behind the longest known conversation. ``turns``: one call, from its generation
over its tools to its document. ``trajectory_calls``: all calls of a trajectory, sampled and written in order.
``trace``: spans around calls and tools.
"""
