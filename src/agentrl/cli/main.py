"""The ``agentrl`` command: imports only the chosen subcommand, and turns errors into exit codes."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable, Sequence

import agentrl
from agentrl.base.installation import missing as missing_package
from agentrl.config.commands import COMMANDS, function_of
from agentrl.errors import AgentRLError, nearest

_PIPE_CLOSED = 128 + 13
"""The exit code of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``agentrl COMMAND …`` and return its exit code. A reader of stdout may stop early, as ``head``.

    What the encoding of stdout lacks is printed as ``?``: no line of text is worth the work behind it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the exit still writes
        return _PIPE_CLOSED


def _has_no_reader() -> bool:
    """Return whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _main(argv: Sequence[str] | None) -> int:
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from agentrl.cli.completion import complete

        complete()
    if argv is None and not sys.flags.safe_path and os.path.isdir("."):
        sys.path.append(os.getcwd())  # a scorer `my_file:name` is found here, as under `python -m agentrl`
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"agentrl {agentrl.__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"\n  → {near}" if near else ""
        print(f"{_usage()}\nagentrl: error: unknown command {name!r}{hint}", file=sys.stderr)
        return 2
    return run(lambda: function_of(name)(words[1:]), f"agentrl {name}")


def run(command: Callable[[], int | None], name: str) -> int:
    """Call ``command`` and return its exit code; print an AgentRLError, or a missing extra, to stderr."""
    try:
        return command() or 0
    except AgentRLError as error:
        found = error
    except ModuleNotFoundError as error:
        missing = missing_package(error.name or "", name)
        if missing is None:
            raise
        found = missing
    except KeyboardInterrupt:
        return 130
    print(f"{name}: error: {found}", file=sys.stderr)
    return found.exit_code


def _usage() -> str:
    rows = "\n".join(f"  {name:<11} {help_line}" for name, (_, help_line) in COMMANDS.items())
    return (
        f"usage: agentrl COMMAND [--flag VALUE …]\n\n{rows}\n\n"
        "agentrl COMMAND --help lists the flags of a command."
    )


if __name__ == "__main__":
    sys.exit(main())
