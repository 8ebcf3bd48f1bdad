"""The run of a chaos test: a tiny model, short tasks with a score for any text, and its processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from agentrl.errors import AgentRLError
from chaos.actors import Actor, environment
from chaos.database import Database
from chaos.notes import LOG as NOTES_LOG
from chaos.plan import TRAINER, Members

RUN = "chaos"
LEASE_SECONDS = 12.0
MANY_EPOCHS = 100_000
"""More epochs than are ever begun; at the end the processes are restarted with fewer."""

OPENINGS = 6
"""Number of epochs of the split that is opened and never sampled."""

_TASKS = 24
_BUILD_SECONDS = 300.0
_SCORER = "chaos.scoring:slow_score"
_AGENT = "chaos.notes:stamped"
_STOPS = list(range(3, 400, 5))
"""Ids at which the random model ends a turn, so that few are cut: a turn that is cut calls no tool."""

_FLAGS = {
    "num_train_epochs": MANY_EPOCHS,
    "num_generations": 4,
    "groups_per_step": 2,
    "agent_name": _AGENT,
    "tools": "chaos.notes:note",
    "tool_call_parser": "chaos.notes:EveryText",
    "max_turns": 4,
    "max_prompt_tokens": 640,
    "prompt_reserve_tokens": 32,
    "max_new_tokens": 32,
    "preferred_sampling_params": json.dumps({"temperature": 1.0, "top_p": 1.0, "stop_token_ids": _STOPS}),
    "max_concurrent_samples_per_process": 4,
    "max_staleness": 2,
    "lease_seconds": LEASE_SECONDS,
    "retry_backoff_seconds": 0.5,
    "heartbeat_seconds": 1.0,
    "learning_rate": 1.0e-5,
    "save_steps": 3,
    "published_versions_kept": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """The files of one run under ``folder``, and the commands of its processes."""

    folder: Path
    seed: int
    tasks: int
    """Number of tasks in the split whose epochs are opened and never sampled."""
    seconds: float
    """Duration of the faults; the openings are spread over it."""

    @property
    def output(self) -> Path:
        """The folder of checkpoints and published weights."""
        return self.folder / "output"

    @property
    def logs(self) -> Path:
        """The folder of logs: ``NAME.out`` for each process, and the logs that the processes write."""
        return self.folder / "logs"

    @property
    def notes(self) -> Path:
        """The log of the tool that must never run twice."""
        return self.folder / "notes.log"

    def prepare(self) -> None:
        """Write the model, the tasks and the configuration. Raises AgentRLError if the model fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "agentrl.base.installation",
            "demo/tiny.py",
            str(self._model),
            str(self.seed),
        ]
        try:
            subprocess.run(command, check=True, timeout=_BUILD_SECONDS, env=environment())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise AgentRLError(f"the tiny model could not be made: {error}") from error
        rng = random.Random(self.seed)
        tasks = (
            {"id": f"chaos-{number:03d}", "query": f"What is {rng.randint(50, 99)} + {rng.randint(50, 99)}?",
             "answer": "0", "scorer": _SCORER, "agent_name": _AGENT}
            for number in range(_TASKS)
        )  # fmt: skip
        _write(self.folder / "tasks.jsonl", tasks)
        _write(self._openings, ({"id": f"{number:06d}", "query": "?"} for number in range(self.tasks)))
        flags = {
            **_FLAGS, "run_name": RUN, "verbose": True, "seed": self.seed, "output_dir": str(self.output),
            "log_dir": str(self.logs), "model_name_or_path": str(self._model),
            "train_file": str(self.folder / "tasks.jsonl"),
        }  # fmt: skip
        self._config.write_text(yaml.safe_dump(flags), encoding="utf-8")

    async def make_actors(self, members: Members, database: Database) -> dict[str, Actor]:
        """Return {name: actor} for every process of the run; none is started."""
        openings = (
            "--openings_file", str(self._openings), "--openings", str(OPENINGS),
            "--openings_pause", str(self.seconds / (2 * OPENINGS)),
        )  # fmt: skip
        commands = {
            **dict.fromkeys(members.openers, ("chaos.opener", *openings)),
            **dict.fromkeys(members.engines, ("agentrl", "serve", "--engine", "local")),
            **dict.fromkeys(members.samplers, ("chaos.sampler", "sample")),
            TRAINER: ("agentrl", "train"),
        }
        return {
            name: Actor(
                name=name,
                command=[
                    sys.executable, "-m", *words, "--config", str(self._config),
                    "--db_connection_string", await database.uri_for(name),
                ],
                log=self.logs / f"{name}.out",
                env={**environment(), NOTES_LOG: str(self.notes)},
            )
            for name, words in commands.items()
        }  # fmt: skip

    def check_command(self, uri: str, *, is_final: bool) -> list[str]:
        """Return the command that checks the database; with ``is_final`` every slot must be terminal."""
        return [
            sys.executable, "-m", "agentrl", "db", "check", "--run_name", RUN,
            "--db_connection_string", uri, "--output_dir", str(self.output),
            "--lease_seconds", str(LEASE_SECONDS), *(["--final"] if is_final else []),
        ]  # fmt: skip

    @property
    def _model(self) -> Path:
        return self.folder / "model"

    @property
    def _config(self) -> Path:
        return self.folder / "run.yml"

    @property
    def _openings(self) -> Path:
        return self.folder / "openings.jsonl"


def _write(path: Path, tasks: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(task)}\n" for task in tasks)
