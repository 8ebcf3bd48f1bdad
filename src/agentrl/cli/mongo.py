"""``agentrl mongo up|status|uri|down``: the embedded MongoDB of one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.load import CommandParser

if TYPE_CHECKING:
    from agentrl.store.embedded.server import EmbeddedMongo, EmbeddedStatus


def main(argv: list[str]) -> int:
    """Run one action; ``status`` and ``uri`` exit with 3 if the server is down."""
    parser = CommandParser(prog="agentrl mongo", description="The embedded MongoDB of this machine.")
    parser.add_argument(
        "action", choices=("up", "status", "uri", "down"), help="uri prints the URI with the password"
    )
    parser.add_argument("--mongo_dir", "--dir", default=".agentrl/mongo", help="its folder (%(default)s)")
    parser.add_argument("--port", type=int, help="up: move it to this port (0: any free one)")
    arguments = parser.parse_args(argv)

    from agentrl.store.embedded.server import EmbeddedMongo

    mongo = EmbeddedMongo(arguments.mongo_dir)
    if arguments.action == "down":
        print("stopped" if mongo.down() else f"no embedded MongoDB is running under {mongo.directory}")
        return 0
    status = mongo.up(arguments.port) if arguments.action == "up" else mongo.status()
    if not status.running:
        print(f"no embedded MongoDB is running under {mongo.directory}\n  → agentrl mongo up")
        return 3
    print(status.uri if arguments.action == "uri" else _description(mongo, status))
    return 0


def _description(mongo: EmbeddedMongo, status: EmbeddedStatus) -> str:
    described = f"running  pid {status.pid}  data {mongo.dbpath}  log {mongo.log}\n{status.shown_uri}"
    if status.guarded:
        return f"{described}\nfor Compass, with the password: agentrl mongo uri --mongo_dir {mongo.directory}"
    return (
        f"{described}\nan older version started it, and it requires no password\n"
        "  → stop the processes of its runs, then: agentrl mongo down; agentrl mongo up"
    )
