"""``agentrl runs``: list the runs of a server, tag them, note what they are for, rename and delete them."""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Final

from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import EngineConfig, RunConfig

_ACTIONS: Final = ("rm", "rename", "tag", "note")
_CHANGE: Final = re.compile(r"\+.*|-(?!h$)[^-].*", re.DOTALL)
"""A word that adds or removes a tag."""


def main(argv: list[str]) -> int:
    """List the runs, or run one subcommand; its handler's result is the exit code."""
    action = next((word for word in argv if word in _ACTIONS), None)
    changes = [word for word in argv if _CHANGE.fullmatch(word)] if action == "tag" else []
    arguments = parser().parse_args([word for word in argv if word not in changes])
    arguments.changes = changes
    return int(asyncio.run(arguments.handler(arguments)))


def parser() -> CommandParser:
    """Return the parser; each subcommand sets ``handler``, a coroutine function of the arguments."""
    outer = CommandParser(
        prog="agentrl runs",
        description="Lists the runs of a MongoDB server; tags, notes, renames and deletes them.",
    )
    outer.add_database()
    outer.add_argument("--json", action="store_true", help="print the list as one JSON value")
    outer.set_defaults(handler=list_runs)
    actions = outer.add_subparsers(dest="action", metavar="SUBCOMMAND", parser_class=CommandParser)
    remove = actions.add_parser("rm", help="delete runs that have ended")
    remove.add_argument("run_name", metavar="RUN", nargs="+", help="the runs to delete")
    remove.add_argument("--folders", action="store_true", help="delete their output folders too")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    rename = actions.add_parser("rename", help="rename a run that has ended, and its output folder")
    rename.add_argument("run_name", metavar="RUN", help="the run")
    rename.add_argument("new_name", metavar="NEW", help="its new name")
    tag = actions.add_parser(
        "tag", help="add and remove tags", usage="agentrl runs tag RUN [+TAG | -TAG] … [--flag VALUE …]"
    )
    tag.add_argument("run_name", metavar="RUN")
    note = actions.add_parser("note", help="note what a run is for")
    note.add_argument("run_name", metavar="RUN")
    note.add_argument("text", metavar="TEXT", help="the note; an empty one removes it")
    for action, handler in ((remove, rm_runs), (rename, rename_run), (tag, tag_run), (note, note_run)):
        action.add_database(default=argparse.SUPPRESS)  # a flag before the subcommand keeps its value
        action.set_defaults(handler=handler)
    return outer


def _run_config(arguments: argparse.Namespace, name: str = RunConfig.run_name) -> RunConfig:
    return group_of(RunConfig, argparse.Namespace(**vars(arguments) | {"run_name": name}))


async def list_runs(arguments: argparse.Namespace) -> int:
    """Print a row per run, those with the latest activity first."""
    from agentrl.observe.terminal import print_json, stdout_console, to_json
    from agentrl.screens.status_screen import render_run_list
    from agentrl.store.run_list import Runs, connect_server

    connection = await connect_server(_run_config(arguments))
    try:
        runs = await Runs(connection).all(EngineConfig().alive_seconds)
    finally:
        await connection.close()
    if arguments.json:
        print_json({"server": connection.host, "runs": to_json(runs)})
    else:
        stdout_console().print(render_run_list(connection.host, runs))
    return 0


async def rm_runs(arguments: argparse.Namespace) -> int:
    """Delete each named run once its database and its folder have been named and the answer is yes."""
    for name in dict.fromkeys(arguments.run_name):
        run = _run_config(arguments, name)
        if not await _remove_unfinished(run, arguments):
            await _remove(run, arguments)
    return 0


async def _remove_unfinished(run: RunConfig, arguments: argparse.Namespace) -> bool:
    """Return whether the database holds what an import or a fork left, and no run; delete it if asked."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.observe.terminal import confirm
    from agentrl.store.client import open_connection

    connection = await open_connection(run)
    try:
        admin = RunAdmin(connection)
        if not await admin.is_unfinished():
            return False
        what = f"the unfinished database {run.run_name} on MongoDB at {connection.host}"
        if not arguments.yes and not await asyncio.to_thread(confirm, what):
            print(f"{run.run_name} is kept")
            return True
        await admin.delete_unfinished()
    finally:
        await connection.close()
    print(f"deleted {what}")
    return True


async def _remove(run: RunConfig, arguments: argparse.Namespace) -> None:
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.observe.terminal import confirm
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        admin = RunAdmin(store.connection)
        await admin.require_ended(EngineConfig().alive_seconds)
        folder = await admin.output_folder() if arguments.folders else None
        what = f"database {run.run_name} on MongoDB at {store.host}"
        if folder is not None:
            what += f" and folder {folder}"
        if not arguments.yes and not await asyncio.to_thread(confirm, what):
            print(f"{run.run_name} is kept")
            return
        await admin.delete(folder, EngineConfig().alive_seconds)
    print(f"deleted {what}")
    if arguments.folders and folder is None:
        print(f"{run.run_name}: this machine has no output folder of it")


async def rename_run(arguments: argparse.Namespace) -> int:
    """Rename the run, or finish a renaming that was killed."""
    from agentrl.lab import manage_runs
    from agentrl.observe.progress import progress

    old, new = arguments.run_name, arguments.new_name
    with progress(f"renaming run {old}, documents") as work:
        folders = await manage_runs.rename_run(
            _run_config(arguments, old), new, EngineConfig().alive_seconds, on_documents=work.advance
        )
    print(f"{old} → {new}" + "".join(f", folder {folder}" for folder in folders if folder.exists()))
    return 0


async def tag_run(arguments: argparse.Namespace) -> int:
    """Change the tags if any are named, and print those that the run has then."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.store.client import open_existing

    changes: list[str] = arguments.changes
    add, remove = ([word[1:] for word in changes if word[0] == sign] for sign in "+-")
    async with await open_existing(_run_config(arguments, arguments.run_name)) as store:
        tags = await RunAdmin(store.connection).tag(add, remove)
    print(f"{arguments.run_name}: {', '.join(tags) or 'no tags'}")
    return 0


async def note_run(arguments: argparse.Namespace) -> int:
    """Store the note."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.store.client import open_existing

    async with await open_existing(_run_config(arguments, arguments.run_name)) as store:
        await RunAdmin(store.connection).note(arguments.text)
    print(f"{arguments.run_name}: {'noted' if arguments.text.strip() else 'no note'}")
    return 0
