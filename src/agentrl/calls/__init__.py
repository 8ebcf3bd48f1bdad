"""Make the policy's model calls: messages → a stored call, for agents, LangGraph, gateway and evaluation.

``prompts``: messages → ids, behind the longest known conversation. ``trajectory_calls``: a call, from its
generation to its document. ``histories``: the calls of frameworks that send whole conversations.
``tool_calls`` runs the tools that a call asks for; ``trace`` opens spans around both.
"""
