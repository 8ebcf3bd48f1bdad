"""``agentrl db accept``: settings that a run was begun with may be set anew."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from agentrl.documents.run import SETTINGS

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig


def register(subparsers: Any) -> None:
    """Add the subcommand ``accept``."""
    parser = subparsers.add_parser("accept", help="let the next process set settings of the run anew")
    parser.add_argument("concern", nargs="+", choices=SETTINGS, help=f"one or more of: {', '.join(SETTINGS)}")
    parser.set_defaults(handler=accept)


async def accept(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Forget the settings and print what they were."""
    from agentrl.observe.terminal import clean
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        for concern in arguments.concern:
            forgotten = await store.settings.forget(concern)
            if forgotten is None:
                print(f"{concern}: the run has none")
                continue
            values = ", ".join(f"{name} {value!r}" for name, value in forgotten.values.items())
            print(clean(f"{concern}: the next process sets its own; it was {values} (by {forgotten.by})"))
    return 0
