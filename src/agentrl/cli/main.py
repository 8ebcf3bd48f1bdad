"""The ``agentrl`` command: imports only the chosen subcommand, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

import agentrl
from agentrl.cli.commands import COMMANDS
from agentrl.errors import AgentRLError


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``agentrl COMMAND …`` and return its exit code."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from agentrl.cli.completion import complete

        complete()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"agentrl {agentrl.__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        print(f"agentrl: error: unknown command {name!r}\n{_usage()}", file=sys.stderr)
        return 2
    return run(lambda: importlib.import_module(COMMANDS[name][0]).main(words[1:]), f"agentrl {name}")


def run(command: Callable[[], int | None], name: str) -> int:
    """Call ``command`` and return its exit code; print an AgentRLError to stderr."""
    try:
        return command() or 0
    except AgentRLError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    rows = "\n".join(f"  {name:<11} {help_line}" for name, (_, help_line) in COMMANDS.items())
    return (
        f"usage: agentrl COMMAND [--flag VALUE …]\n\n{rows}\n\n"
        "agentrl COMMAND --help lists the flags of a command."
    )


if __name__ == "__main__":
    sys.exit(main())
