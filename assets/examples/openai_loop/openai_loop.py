"""An ordinary tool loop with OpenAI's client, trained as it is: only ``openai_loop`` knows AgentRL."""

import ast
import json
import operator

from openai import AsyncOpenAI

from agentrl import Outcome, Rollout, StopReason, agent

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATE = {"name": "calculate", "description": "Evaluates arithmetic.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATE}]


def calculate(expression: str = "") -> str:
    """Return the value of a sum, a difference or a product of two whole numbers."""
    try:
        tree = ast.parse(expression, mode="eval").body
        return str(OPERATIONS[type(tree.op)](tree.left.value, tree.right.value))
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"


async def solve(client: AsyncOpenAI, model: str, question: str) -> str:
    """Answer a question with the calculator."""
    messages = [{"role": "user", "content": question}]
    while True:
        answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = calculate(str(arguments.get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@agent("openai_loop")
async def openai_loop(rollout: Rollout) -> Outcome:
    """Give the loop a base URL of its own; its answer is the trajectory's."""
    async with rollout.gateway() as endpoint:
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=2)
        async with client:
            text = await solve(client, endpoint.model, rollout.question)
    answer = text.partition("<answer>")[2].partition("</answer>")[0]
    return Outcome(StopReason.ANSWERED, answer or text)
