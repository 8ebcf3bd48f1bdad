"""A graph that solves sums: the model, its calculator, the model again; README.md has the command."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from agentrl.worlds.langgraph import PolicyChatModel

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


@tool
def calculate(expression: str) -> str:
    """Calculate an expression of numbers, +, -, *, / and parentheses."""
    try:
        return f"{_value(ast.parse(expression[:200], mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"Error: {error}"


def build_graph(cfg: Any) -> Any:
    """Return the graph; ``cfg`` are the settings in agent.yml."""
    tools = [calculate]
    model = PolicyChatModel(temperature=cfg.model.temperature, max_tokens=cfg.model.max_tokens)
    with_tools = model.bind_tools(tools)

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    def after(state: MessagesState) -> str:
        answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
        return "tools" if answers[-1].tool_calls and len(answers) <= cfg.max_tool_rounds else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", think)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile()


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, +, -, *, / and parentheses are known")
