"""``agentrl retract RUN``: withdraw trajectories and tasks after the fact, and train without them."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.config.load import CommandParser, Configs, group_of
from agentrl.config.schema import ClaimConfig, RunConfig, TaskConfig


def main(argv: list[str]) -> int:
    """Parse ``argv``, and withdraw."""
    return asyncio.run(retract(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the parser of ``agentrl retract``."""
    parser = CommandParser(
        prog="agentrl retract",
        description="Withdraws trajectories: deletes them everywhere in the run, says which steps and weights"
        " trained them, and leaves tombstones without content. Stop the trainer first. Without a selection it"
        " finishes a call that was killed.",
    )
    parser.add_argument("run_name", metavar="RUN", help="the run")
    parser.add_argument(
        "--scorer", action="append", default=[], help="what this scorer scored; may be repeated"
    )
    parser.add_argument(
        "--task", action="append", default=[],
        help="a task as a whole, in every epoch, with query and answer: its _id, or its id in the file; may"
        " be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="append", default=[],
        help="one trajectory, with all attempts at it; may be repeated",
    )  # fmt: skip
    parser.add_argument("--because", default="", help="why; it is kept, so name no content")
    parser.add_argument(
        "--rebuild", action="store_true",
        help="go back to the last checkpoint before the first step that trained any of it, and delete later"
        " weights; the next trainer trains these steps again without it",
    )  # fmt: skip
    parser.add_argument(
        "--archive", action="append", default=[], metavar="DIR",
        help="take it out of this export of the run too, or of those below this folder (agentrl db export,"
        " with and without --hf); may be repeated",
    )  # fmt: skip
    parser.add_argument("--family", action="store_true", help="withdraw it from the run's children too")
    parser.add_argument("--output_dir", help="the run's output folder (that of its trainer)")
    parser.add_argument("--dry_run", action="store_true", help="say what would go, change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_database()
    parser.add_flags(RunConfig, "log_dir")
    parser.add_flags(ClaimConfig, "lease_seconds")
    parser.add_flags(TaskConfig, "import_modules", "allowed_modules")
    return parser


async def retract(arguments: argparse.Namespace) -> int:
    """Withdraw, and print what and where it went; return the exit code."""
    from agentrl.lab.retract import RetractFlags
    from agentrl.lab.retract import retract as withdraw
    from agentrl.observe.terminal import confirm

    groups = (RunConfig, ClaimConfig, TaskConfig, RetractFlags)
    return await withdraw(Configs([group_of(group, arguments) for group in groups]), confirm)
