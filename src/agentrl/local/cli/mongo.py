"""``agentrl mongo up|status|uri|down``: the embedded MongoDB of one machine."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from agentrl.config.load import CommandParser
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.local.mongod import EmbeddedMongo, EmbeddedStatus


def main(argv: list[str]) -> int:
    """Run one action; ``status`` and ``uri`` exit with 3 if the server is down."""
    parser = CommandParser(prog="agentrl mongo", description="The embedded MongoDB of this machine.")
    parser.add_argument(
        "action", choices=("up", "status", "uri", "down"), help="uri prints the URI with the password"
    )
    parser.add_argument("--mongo_dir", "--dir", default=RunConfig.mongo_dir, help="its folder (%(default)s)")
    parser.add_argument("--mongod", help="up: the mongod to start (default: the newest usable one)")
    parser.add_argument("--port", type=int, help="up: move it to this port (0: any free one)")
    parser.add_argument("--json", action="store_true", help="status: print one JSON value")
    arguments = parser.parse_args(argv)

    from agentrl.local.mongod import EmbeddedMongo

    mongo = EmbeddedMongo(arguments.mongo_dir)
    if arguments.json:
        return _print_json(mongo, arguments.action)
    if arguments.action == "down":
        print("stopped" if mongo.down() else f"no embedded MongoDB is running under {mongo.directory}")
        return 0
    if arguments.action == "up":
        status = mongo.up(arguments.port, mongod=arguments.mongod)
        _report_choice(status)
    else:
        status = mongo.status()
    if not status.running:
        print(f"no embedded MongoDB is running under {mongo.directory}\n  → agentrl mongo up")
        return 3
    print(status.uri if arguments.action == "uri" else _description(mongo, status))
    return 0


def _report_choice(status: EmbeddedStatus) -> None:
    """Say which mongod was started and why others were not; say nothing if the server was running."""
    from agentrl.local.mongod import version_text

    choice = status.choice
    if choice is None:
        return
    for reason in choice.skipped:
        print(f"skipped {reason}")
    print(f"started {choice.mongod}")
    if choice.upgrades and choice.data_version is not None:
        written, now = version_text(choice.data_version), version_text(choice.mongod.version)
        print(f"the data of {written} now belong to {now}: an older mongod cannot open them any more")


def _print_json(mongo: EmbeddedMongo, action: str) -> int:
    """Print the state of the server without its password; return 3 if it is down."""
    from agentrl.observe.terminal import print_json

    if action != "status":
        raise ConfigError(f"--json goes with status, not with {action}", hint="leave --json out")
    status = mongo.status()
    print_json(
        {
            "running": status.running, "pid": status.pid, "port": status.port, "data": mongo.dbpath,
            "log": mongo.log, "uri": status.shown_uri if status.running else None,
            "version": ".".join(map(str, status.version)) if status.version else None,
        }
    )  # fmt: skip
    return 0 if status.running else 3


def _description(mongo: EmbeddedMongo, status: EmbeddedStatus) -> str:
    from agentrl.local.mongod import end_of_life_notice, version_text

    version = f"MongoDB {version_text(status.version)}  " if status.version else ""
    described = (
        f"running  {version}pid {status.pid}  data {mongo.dbpath}  log {mongo.log}\n{status.shown_uri}"
    )
    notice = end_of_life_notice(status.version, date.today()) if status.version else None
    if notice:
        described += f"\n{notice}\n  → a newer mongod: docs/databases.md"
    return f"{described}\nfor Compass, with the password: agentrl mongo uri --mongo_dir {mongo.directory}"
