"""``agentrl completion SHELL``: complete commands, flags, choices, run names, metrics and files by Tab.

The shell runs ``agentrl`` with the variable ``_ARGCOMPLETE`` at each Tab; ``complete`` answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from agentrl.config.commands import COMMANDS, function_of
from agentrl.config.flags import collect
from agentrl.config.load import CommandParser, recipe_names
from agentrl.config.run import EngineConfig, RunConfig
from agentrl.errors import AgentRLError

SHELLS = ("bash", "zsh", "fish")
PAGES = {"audit": ("run", "record", "records", "curve"), "eval": ("compare", "report")}
"""Command → the words that may follow it and that no parser knows."""

_DATABASE_SECONDS = 1.5
"""How long a Tab waits for names from the database."""


def main(argv: list[str]) -> int:
    """Print the code that a shell evaluates at its start."""
    parser = CommandParser(
        prog="agentrl completion",
        description="Prints the completion of a shell. In bash and zsh, write the first example into"
        " ~/.bashrc or ~/.zshrc, with the shell's name.",
    )
    parser.add_argument("shell", choices=SHELLS)
    arguments = parser.parse_args(argv)
    from argcomplete.shell_integration import shellcode

    print(shellcode(["agentrl"], shell=arguments.shell))
    return 0


def complete() -> NoReturn:
    """Answer the shell that asks what may follow ``COMP_LINE``, and end the process."""
    import argcomplete
    from argcomplete.lexers import split_line

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = split_line(line, point)[3]
    parser, skipped = parser_of(words[1:])
    os.environ["_ARGCOMPLETE"] = str(1 + skipped)
    has_positionals = any(not action.option_strings for action in parser._actions)
    argcomplete.autocomplete(parser, always_complete_options=not has_positionals)
    raise SystemExit(1)  # not reached: autocomplete ends the process


def parser_of(words: list[str]) -> tuple[argparse.ArgumentParser, int]:
    """Return the parser that completes what follows ``words``, and how many words name its command.

    ``words`` are complete and do not begin with ``agentrl``.
    """
    if not words or words[0] not in COMMANDS:
        return _choice(COMMANDS), 0
    command, rest = words[0], words[1:]
    skipped = 1
    if command in PAGES and rest and rest[0] in PAGES[command]:
        skipped = 2
    elif command == "audit":
        return _choice(PAGES["audit"]), 1
    run = function_of(command)
    try:
        collected = collect(lambda: run(rest[: skipped - 1]))
    except AgentRLError:
        collected = None
    if collected is None:
        return argparse.ArgumentParser(add_help=False), skipped
    parser = collected.parser
    if command == "eval" and skipped == 1:
        parser.add_argument("page", nargs="?", choices=PAGES["eval"])
    for name, completer in (("RUN", _runs), ("METRIC", _metrics)):
        if name in collected.command:
            _set_completer(parser.add_argument(name.lower(), nargs="*"), completer)
    if collected.command.endswith((" ID", " A B")):
        parser.add_argument("id", nargs="*")
    _complete_values(parser)
    return parser, skipped


def _choice(words: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("word", choices=list(words))
    return parser


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Complete ``--run_name``, ``--recipe`` and switches in ``parser`` and the parsers of its subcommands."""
    for action in parser._actions:
        if action.dest == "run_name":
            _set_completer(action, _runs)
        elif action.dest == "recipe":
            _set_completer(action, lambda **_: recipe_names())
        elif action.const is True and action.nargs == "?":
            _set_completer(action, lambda **_: ("true", "false"))
        elif isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                _complete_values(nested)


def _set_completer(action: argparse.Action, completer: Any) -> None:
    setattr(action, "completer", completer)  # noqa: B010 - argcomplete reads it, and argparse has no such field


Completer = Callable[..., list[str]]


def _from_database(read: Callable[[argparse.Namespace], Coroutine[Any, Any, list[str]]]) -> Completer:
    """Return the completer by the names that ``read`` finds; none if the database does not answer."""

    def names(parsed_args: argparse.Namespace, **kwargs: Any) -> list[str]:
        try:
            return asyncio.run(read(parsed_args))
        except AgentRLError:
            return []

    return names


@_from_database
async def _runs(words: argparse.Namespace) -> list[str]:
    """Return the names of the runs on the server that the words so far name."""
    from agentrl.store.run_list import Runs, connect_server

    connection = await connect_server(_run_config(words))
    try:
        return [run.name for run in await Runs(connection).all(EngineConfig().alive_seconds)]
    finally:
        await connection.close()


@_from_database
async def _metrics(words: argparse.Namespace) -> list[str]:
    """Return the names of the metrics of the run that the words so far name."""
    from agentrl.observe.plotting import metric_names
    from agentrl.store.client import open_existing

    async with await open_existing(_run_config(words)) as store:
        return metric_names(await store.steps.metrics(last=3))


def _run_config(words: argparse.Namespace) -> RunConfig:
    """Return the database that the words so far name."""
    default = RunConfig()
    return RunConfig(
        run_name=words.run_name if "run_name" in words and words.run_name else default.run_name,
        db_connection_string=getattr(words, "db_connection_string", None),
        mongo_dir=getattr(words, "mongo_dir", None) or default.mongo_dir,
        db_timeout_seconds=_DATABASE_SECONDS,
    )
