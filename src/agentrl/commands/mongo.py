"""``agentrl mongo up|status|down``: the embedded MongoDB of one machine."""

from __future__ import annotations

from agentrl.config.load import CommandParser


def main(argv: list[str]) -> int:
    """Run one action; ``status`` exits with 3 where the server is down."""
    parser = CommandParser(prog="agentrl mongo", description="The embedded MongoDB of this machine.")
    parser.add_argument("action", choices=("up", "status", "down"))
    parser.add_argument("--mongo_dir", "--dir", default=".agentrl/mongo", help="its folder (%(default)s)")
    parser.add_argument("--port", type=int, help="up: move it to this port (0: any free one)")
    arguments = parser.parse_args(argv)

    from agentrl.store.embedded import EmbeddedMongo

    mongo = EmbeddedMongo(arguments.mongo_dir)
    if arguments.action == "down":
        print("stopped" if mongo.down() else f"no embedded MongoDB is running under {mongo.directory}")
        return 0
    status = mongo.up(arguments.port) if arguments.action == "up" else mongo.status()
    if not status.running:
        print(f"no embedded MongoDB is running under {mongo.directory}\n  → agentrl mongo up")
        return 3
    print(f"running  pid {status.pid}  data {mongo.dbpath}  log {mongo.log}\n{status.uri}")
    return 0
