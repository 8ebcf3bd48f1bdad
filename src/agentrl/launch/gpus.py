"""Find the GPUs of this machine, and say how a process sees some of them alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from agentrl.config.flags import require
from agentrl.config.run import without_uri
from agentrl.device_lease import has_gpu
from agentrl.errors import AgentRLError

_PROBE_SECONDS = 120.0
GIB = 2**30
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.version.hip is not None, [[gpu.name, gpu.total_memory] for gpu in found]]))
"""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that this process sees, in the order of their numbers."""

    names: tuple[str, ...]
    """As ``variable`` lists them: numbers, UUIDs or MIG instances."""
    kind: str
    memory_gib: tuple[float, ...]
    variable: str = "CUDA_VISIBLE_DEVICES"
    """The environment variable that says which GPUs a process sees."""
    order: dict[str, str] = field(default_factory=dict)
    """Environment variables under which ``names`` mean these GPUs."""

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        least, most = min(self.memory_gib), max(self.memory_gib)
        memory = f"{least:.1f} GiB" if most - least < 1 else f"{least:.1f} to {most:.1f} GiB"
        return f"{len(self)} GPU{'s' if len(self) > 1 else ''} ({self.kind}, {memory})"

    @property
    def are_mig(self) -> bool:
        """Whether these are MIG instances, of which CUDA gives a process a single one."""
        return self.names[0].startswith("MIG-")

    def environment(self, numbers: Sequence[int]) -> dict[str, str]:
        """Return the variables of a process that sees the GPUs ``numbers``, and no others."""
        return {**self.order, self.variable: ",".join(self.names[each] for each in numbers)}

    def split(self, parallel: int) -> list[dict[str, str]]:
        """Return the variables of ``parallel`` processes with equally many GPUs each; the rest stays unused.

        Raises ConfigError if there are more processes than GPUs.
        """
        size = len(self) // parallel
        require(
            size > 0, f"--parallel {parallel}: there are {self}, and each child needs one",
            f"use --parallel {len(self)} or less",
        )  # fmt: skip
        return [self.environment(range(first, first + size)) for first in range(0, size * parallel, size)]


class UnseenGpuError(AgentRLError):
    """The machine has a GPU, and torch does not see it."""


def find_gpus(environment: Mapping[str, str]) -> Gpus | None:
    """Return the GPUs that torch sees under ``environment``; None on a machine without, or if it hides them.

    A child process imports torch, which knows the driver, MIG instances and the variables that hide GPUs.
    Raises UnseenGpuError.
    """
    if not has_gpu():
        return None
    shown = next((name for name in _VISIBLE if name in environment), None)
    if shown is not None and environment[shown].strip() in ("", "-1"):
        return None
    names = [] if shown is None else [name.strip() for name in environment[shown].split(",")]
    order = {} if shown else {"CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    views = [dict(environment) | order]
    if shown and names[0].startswith("MIG-"):  # CUDA shows a process the first MIG instance only
        views = [{**environment, shown: name} for name in names]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(_probe, views))
    seen = [gpu for _, gpus in answers for gpu in gpus]
    if not seen:
        raise UnseenGpuError("torch sees no GPU", hint="agentrl doctor names the cause")
    return Gpus(
        names=tuple(names or map(str, range(len(seen))))[: len(seen)],
        kind=" and ".join(dict.fromkeys(name for name, _ in seen)),
        memory_gib=tuple(size / GIB for _, size in seen),
        variable=shown or ("HIP_VISIBLE_DEVICES" if answers[0][0] else "CUDA_VISIBLE_DEVICES"),
        order=order,
    )


def _probe(environment: Mapping[str, str]) -> tuple[bool, list[tuple[str, int]]]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=without_uri(environment), capture_output=True, text=True,
            timeout=_PROBE_SECONDS, check=True,
        )  # fmt: skip
        is_amd, gpus = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UnseenGpuError(f"torch cannot look for GPUs: {said[-1]}", hint="agentrl doctor") from error
    return is_amd, [(name, size) for name, size in gpus]
