"""Record the walks of the tiny quickstart; print them, as CONTRIBUTING.md lists them, and the house's sizes.

    PYTHONPATH=tests python -m walks             # a quickstart of its own: two minutes
    PYTHONPATH=tests python -m walks FOLDER      # what an acceptance run recorded there

``python -m walks.house`` prints at once what needs no run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from walks.held import read_walks, recording, shown
from walks.house import report
from walks.walk import SOURCE

_STEPS = 5


def record(folder: Path) -> Path:
    """Run the tiny quickstart in ``folder``, and return the folder of what it recorded."""
    (folder / "assets").symlink_to(SOURCE.parents[1] / "assets")
    traces = folder / "walks"
    command = [sys.executable, "-m", "agentrl", "quickstart", "--tiny", "--steps", str(_STEPS)]
    environment = {**os.environ, **recording(traces)}
    subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=True)
    return traces


def main() -> None:
    """Print each walk, and the measurements of the house."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(sys.argv[1]) if sys.argv[1:] else record(Path(folder))
        walks = read_walks(traces)
    for name, found in walks.items():
        print(f"{shown(name, found)}\n")
    print(report(walks.values()))


if __name__ == "__main__":
    main()
