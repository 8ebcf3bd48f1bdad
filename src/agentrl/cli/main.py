"""The ``agentrl`` command: imports only the chosen subcommand, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from agentrl import __version__
from agentrl.errors import AgentRLError

COMMANDS: dict[str, tuple[str, str]] = {
    "mongo": ("agentrl.cli.mongo", "the embedded MongoDB: up, status, down"),
    "tasks": ("agentrl.cli.tasks", "load a JSONL file of tasks; list what is loaded"),
    "db": ("agentrl.cli.db", "the database of a run: check, copy, prune, rescore, reopen, migrate"),
    "serve": ("agentrl.cli.serve", "run one inference engine that follows the published weights"),
    "sample": ("agentrl.cli.sample", "a sampler: claims, runs and scores trajectories"),
    "gateway": ("agentrl.cli.gateway", "model APIs in front of rollouts, for any agent"),
    "score": ("agentrl.cli.score", "scores sampled trajectories that wait for a score"),
    "train": ("agentrl.cli.train", "the trainer"),
    "try": ("agentrl.cli.try_task", "run one task's trajectory, print it, store nothing"),
    "eval": ("agentrl.cli.evaluate", "evaluate a policy on a task file; compare and list evaluations"),
    "sft": ("agentrl.cli.sft", "supervised fine-tuning on conversations"),
    "audit": ("agentrl.cli.audit", "look at a run: its state, a trajectory, its curve"),
    "parity": ("agentrl.cli.parity", "compare the trainer's logprobs with an engine's"),
    "doctor": ("agentrl.cli.doctor.command", "check this machine, and say how to fix each fault"),
    "quickstart": ("agentrl.cli.quickstart", "the whole loop on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``agentrl COMMAND …`` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"agentrl {__version__}")
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
