"""Find the files that AgentRL ships: run configurations, tasks, chat templates, tool servers, examples.

    python -m agentrl.shipped_files      # print their folder

They are in ``assets/`` of a clone, and in ``agentrl/assets/`` of a wheel: ``setup.py`` copies them.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent


def shipped_files() -> Path:
    """Return the folder of the shipped files. Raises ConfigError if the installation has none."""
    for folder in (_PACKAGE / "assets", _PACKAGE.parents[1] / "assets"):
        if (folder / "configs").is_dir():
            return folder
    raise ConfigError(
        f"the files that AgentRL ships are not beside {_PACKAGE}",
        hint="install AgentRL from a wheel, or with `pip install -e .` in a clone of the repository",
    )


if __name__ == "__main__":
    print(shipped_files())
