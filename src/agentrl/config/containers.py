"""Flags of the containers that tasks bring with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from agentrl.config.flags import Flags, flag, names_in, require


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(Flags):
    """The containers of tasks that have an image of their own."""

    section = "containers"
    is_per_process = True

    containers: str = flag(
        "auto",
        "what runs the containers of tasks: docker, kubernetes, sandbox (root file systems of --rootfs), or"
        " your own (auto: sandbox for the images that --rootfs names, docker for the others)",
    )
    rootfs: str = flag(
        "",
        "root file systems for the sandbox, comma-separated: PATH of a folder or tar for every image, or"
        " NAME=PATH for the image NAME, or for the built image of the task NAME",
    )
    task_variables: str = flag(
        "", "variables of this process, comma-separated, that a task's environment may read as ${NAME}"
    )

    task_network: str | None = flag(
        None,
        "network of tasks that ask for one (network_mode public, as without it): none, host, which reaches"
        " the services of this machine too, or one that the back end knows; by default Docker's bridge, and"
        " the sandbox, which has no other than the host's, refuses these tasks",
    )

    @cached_property
    def roots(self) -> Mapping[str, str]:
        """``--rootfs`` as {name: path}; the name of one for every image is empty."""
        named = [part.rpartition("=") for part in names_in(self.rootfs)]
        return {name: os.path.abspath(os.path.expanduser(path)) for name, _, path in named}

    @property
    def variables(self) -> Mapping[str, str]:
        """The values of ``--task_variables`` that are set."""
        return {name: os.environ[name] for name in names_in(self.task_variables) if name in os.environ}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in self.roots.items():
            require(
                os.path.exists(path),
                f"--rootfs {name + '=' if name else ''}{path} does not exist",
                "give a folder, or a tar as `docker export CONTAINER > FILE.tar` writes it",
            )
