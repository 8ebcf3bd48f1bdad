"""Name containers after the process that runs them, and remove those that killed processes left."""

from __future__ import annotations

import logging
import shutil
import subprocess
from functools import cache
from typing import Final

from agentrl.processes import has_ended, owned_name, owner_of

logger = logging.getLogger(__name__)

_PREFIX: Final = "agentrl-"
_CONTROL_SECONDS: Final = 60.0


def container_name(kind: str) -> str:
    """Return a new name for a container; its end says which process made it.

    The first name of a process removes the containers of processes of this machine that have ended; those of
    other machines and pid namespaces stay. That may take a while: call it in a thread.
    """
    _remove_containers_of_ended()
    return owned_name(f"{_PREFIX}{kind}")


@cache
def _remove_containers_of_ended() -> None:
    """Remove what no living process owns. A Docker that does not answer is left to the next command."""
    names = _docker("ps", "--all", "--filter", f"name={_PREFIX}", "--format", "{{.Names}}").split()
    owners = {name: owner_of(name) for name in names if name.startswith(_PREFIX)}
    left = [name for name, owner in owners.items() if owner is not None and has_ended(owner)]
    if left:
        _docker("rm", "--force", "--volumes", *left)
        logger.info("removed %d containers, left by processes that were killed: %s", len(left), left[0])


def _docker(*words: str) -> str:
    """Return the output of a Docker command; empty without Docker or an answer."""
    docker = shutil.which("docker")
    if docker is None:
        return ""
    try:
        done = subprocess.run(
            [docker, *words], capture_output=True, text=True, timeout=_CONTROL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        logger.warning("docker %s took longer than %g s", words[0], _CONTROL_SECONDS)
        return ""
    return done.stdout
