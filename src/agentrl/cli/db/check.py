"""``agentrl db check``: whether a run keeps its invariants, on a live database."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.schema import RunConfig
    from agentrl.store.admin.check.reading import CheckOptions, Checkpoint


def register(subparsers: Any) -> None:
    """Add the subcommand ``check``."""
    parser = subparsers.add_parser(
        "check",
        help="verify the invariants of a run, while it goes on or at its end",
        description="Verify every invariant of a run. It only reads, and others may write meanwhile. The exit"
        " code is 0 without a violation, otherwise 1.",
    )
    parser.add_argument("--output_dir", help="the run's output folder: its last checkpoint is read too")
    parser.add_argument(
        "--final", action="store_true", help="the run is over: every slot is terminal, no step is planned"
    )
    parser.add_argument("--skip_files", action="store_true", help="do not hash the files of the weights")
    parser.add_argument(
        "--max_trained_count", type=int, default=1, help="the run's flag of that name (%(default)s)"
    )
    parser.add_argument(
        "--lease_seconds", type=float, default=60.0, help="the run's flag of that name (%(default)s)"
    )
    parser.add_argument(
        "--clock_skew_seconds", type=float, default=5.0,
        help="how far the clocks of trainer and samplers may be apart (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--settle_seconds", type=float, default=3.0,
        help="wait before what looks wrong is looked at again (%(default)s)",
    )  # fmt: skip
    parser.set_defaults(handler=check)


async def check(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print what was checked and every violation; 0 if there is none, otherwise 1."""
    from agentrl.store.admin.check.run import Checks
    from agentrl.store.client import open_existing

    options = options_of(arguments)
    async with await open_existing(run) as store:
        report = await Checks(store.connection).run(options)
    for line in report.lines():
        print(line)
    return 1 if report.violations else 0


def last_checkpoint(output: Path) -> Checkpoint | None:
    """Read what the last trainer's newest checkpoint in ``output`` says. ConfigError if one is unreadable."""
    from agentrl.store.admin.check.reading import Checkpoint

    found: list[tuple[int, Checkpoint]] = []
    for path in output.glob("checkpoint-*/state.json"):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            checkpoint = Checkpoint(path.parent.name, int(state["step"]), tuple(state["train_steps"]))
            found.append((int(state.get("attempt", 1)), checkpoint))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", hint="leave --output_dir out, or repair the checkpoint"
            ) from error
    newest = max(found, key=lambda item: (item[0], item[1].step), default=None)
    return None if newest is None else newest[1]


def options_of(arguments: argparse.Namespace) -> CheckOptions:
    """The options that the flags of ``check`` say."""
    from agentrl.config.schema import ClaimConfig
    from agentrl.data.verify import explain_difference
    from agentrl.store.admin.check.reading import CheckOptions

    output = arguments.output_dir
    return CheckOptions(
        compare_tokens=explain_difference,
        verify_files=None if arguments.skip_files else _verify_file,
        checkpoint=None if output is None else last_checkpoint(Path(output)),
        is_final=arguments.final,
        max_trained_count=arguments.max_trained_count,
        heartbeat_seconds=ClaimConfig(lease_seconds=arguments.lease_seconds).heartbeat_seconds,
        clock_skew_seconds=arguments.clock_skew_seconds,
        settle_seconds=arguments.settle_seconds,
    )


def _verify_file(folder: str, file: Mapping[str, Any]) -> str | None:
    """What differs between one file of a published folder and its checksum."""
    from agentrl.documents.serving import FileChecksum
    from agentrl.errors import PublishError
    from agentrl.weights.manifest import verify

    try:
        verify(folder, [FileChecksum.from_document(file)])
    except PublishError as error:
        return error.message
    return None
