"""An agent of the openai-agents SDK with two tools of its own. It knows nothing of AgentRL."""

import asyncio
import os
from pathlib import Path

from agents import Agent, Runner, function_tool


@function_tool
def read_file(name: str) -> str:
    """Return the text of a file in the working directory."""
    return Path(Path(name).name).read_text(encoding="utf-8")


@function_tool
def write_file(name: str, text: str) -> str:
    """Write a file in the working directory."""
    Path(Path(name).name).write_text(text, encoding="utf-8")
    return "written"


async def main() -> None:
    agent = Agent(
        name="Files",
        instructions="Solve the task with the tools; then say what you did.",
        model=os.environ["OPENAI_MODEL"],
        tools=[read_file, write_file],
    )
    result = await Runner.run(agent, "Read number.txt. Write twice its number to double.txt.", max_turns=8)
    print(result.final_output)


asyncio.run(main())
