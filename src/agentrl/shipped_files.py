"""Find the files that AgentRL ships: run configurations, tasks, chat templates, tool servers, examples.

    python -m agentrl.shipped_files                        # print their folder
    python -m agentrl.shipped_files demo/units.py …        # run a program among them

They are in a clone of the repository, and in ``agentrl/assets/`` of a wheel: ``setup.py`` copies them.
"""

from __future__ import annotations

import runpy
import sys
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


def clone() -> Path | None:
    """Return the clone of the repository that this installation is; None for a wheel."""
    root = _PACKAGE.parents[1]
    return root if (root / "scripts" / "setup.sh").is_file() else None


def deploy_files() -> Path:
    """Return the folder with what starts SGLang and vLLM on CPUs."""
    root = clone()
    return root / "deploy" if root is not None else shipped_files() / "deploy"


def _main(words: list[str]) -> None:
    folder = shipped_files()
    if not words:
        print(folder)
        return
    sys.argv = words
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / words[0]), run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
