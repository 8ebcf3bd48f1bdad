"""A Python tool of your own, with state: every trajectory has a ``Calculator`` that keeps its last result.

Name it on every sampler, no registration needed; the folder must be on PYTHONPATH::

    agentrl sample --run_name my_run --tools custom_tool:Calculator …

Every public method is a tool; the model sees its name, its docstring and its parameters.
"""

import operator

from agentrl import tool

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@tool("calculator")
class Calculator:
    def __init__(self) -> None:
        self.last = 0

    async def calculate(self, expression: str) -> int:
        """Evaluates arithmetic."""
        left, sign, right = expression.replace("last", str(self.last)).split()
        self.last = OPERATORS[sign](int(left), int(right))
        return self.last
