"""Which run a quickstart continues or starts, and the files it needs."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError

STATE_DIR = Path(".agentrl/quickstart")
CONFIG_DIR = Path("assets/configs")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The two quickstarts: how long they train."""

    base_name: str
    steps: int
    minutes: float
    trainer_threads: int


REAL = Kind(base_name="quickstart", steps=14, minutes=10.0, trainer_threads=1)
TINY = Kind(base_name="quickstart-tiny", steps=30, minutes=5.0, trainer_threads=1)


@dataclass(frozen=True, kw_only=True)
class QuickstartRun:
    """One run: unfinished ones resume, finished ones are kept and the next gets the next number."""

    name: str
    tiny: bool
    steps: int
    seed: int
    resumed: bool = False

    @property
    def kind(self) -> Kind:
        """Which quickstart this is."""
        return TINY if self.tiny else REAL

    @property
    def minutes(self) -> float:
        """The default time limit of training."""
        return self.kind.minutes

    @property
    def trainer_threads(self) -> int:
        """OpenMP threads of the trainer."""
        return self.kind.trainer_threads

    @property
    def config(self) -> Path:
        """The YAML file with the run's hyperparameters."""
        return CONFIG_DIR / f"{self.kind.base_name}.yml"

    @property
    def logs(self) -> Path:
        """Where its processes log."""
        return Path("logs") / self.name

    @property
    def output(self) -> Path:
        """Checkpoints, published weights and the plot."""
        return Path("output") / self.name


@dataclass(frozen=True)
class ToolServers:
    """The MCP servers of a run: a file that names them, and the command of the HTTP one."""

    file: Path
    http_command: list[str]


def open_run(name: str | None, *, tiny: bool, steps: int | None, seed: int) -> QuickstartRun:
    """The unfinished run to resume, or a new one. Raises ConfigError outside a checkout."""
    kind = TINY if tiny else REAL
    if not CONFIG_DIR.is_dir():
        raise ConfigError(
            f"there is no {CONFIG_DIR}/ here",
            hint="run it from the repository's root: bash scripts/quickstart.sh",
        )
    candidates = [name] if name else [kind.base_name, *(f"{kind.base_name}-{n}" for n in range(2, 1000))]
    for candidate in candidates:
        state = _read_state(candidate)
        if state is None:
            run = QuickstartRun(name=candidate, tiny=tiny, steps=steps or kind.steps, seed=seed)
            return _write_state(run, finished=False)
        if not state["finished"] and state["tiny"] == tiny and state["seed"] == seed:
            target = steps or int(state["steps"])
            run = QuickstartRun(name=candidate, tiny=tiny, steps=target, seed=seed, resumed=True)
            return _write_state(run, finished=False)
    raise ConfigError(
        f"the run {name} is finished, or was started with other settings",
        hint="choose another --run_name, or leave it out: the next free one is taken",
    )


def close_run(run: QuickstartRun) -> None:
    """Mark a run as finished: the next quickstart starts a new one."""
    _write_state(run, finished=True)


def tool_servers(run: QuickstartRun) -> ToolServers:
    """Write the run's tool-server file: the calculator over stdio, the unit converter over HTTP."""
    port = _free_port()
    python = sys.executable
    content = {
        "servers": {
            "calculator": {"command": python, "args": ["-m", "agentrl.quickstart.servers.calculator"]},
            "units": {"url": f"http://127.0.0.1:{port}/mcp"},
        }
    }
    path = STATE_DIR / run.name / "mcp_servers.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return ToolServers(path, [python, "-m", "agentrl.quickstart.servers.units", "--port", str(port)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _state_file(name: str) -> Path:
    return STATE_DIR / name / "state.json"


def _read_state(name: str) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads(_state_file(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return state


def _write_state(run: QuickstartRun, *, finished: bool) -> QuickstartRun:
    path = _state_file(run.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {**dataclasses.asdict(run), "finished": finished}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state, indent=2), encoding="utf-8")
    partial.replace(path)
    return run
