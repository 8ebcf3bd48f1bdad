"""Find the GPUs of this machine, and divide them among the processes of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.cli.placement import Gpus, Need, Placement, place
from agentrl.config.load import Configs
from agentrl.config.run import without_uri
from agentrl.config.schema import EngineConfig, ModelConfig, PlacementConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engines.process import SHARED_MEMORY, has_gpu

_PROBE_SECONDS = 120.0
_GIB = 2**30
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.version.hip is not None, [[gpu.name, gpu.total_memory] for gpu in found]]))
"""


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
        memory_gib=tuple(size / _GIB for _, size in seen),
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


def place_processes(
    configs: Configs, report: Callable[[str], None], *, trains: bool, serves: bool, machines: int = 1
) -> Placement | None:
    """Divide this machine's GPUs among the engines and the trainer that run here; None if none gets one.

    ``report`` receives a line about the result. ``machines``: those of the trainer. Raises ConfigError if the
    flags name GPUs that do not exist, or if they are too few.
    """
    if not trains and not serves:
        return None
    flags = configs[PlacementConfig]
    try:
        gpus, missing = find_gpus(os.environ), "there is no GPU here"
    except UnseenGpuError as error:
        gpus, missing = None, error.message
        report(f"no GPU is assigned to a process: {error.message}; {error.hint}")
    if gpus is None:
        named = [name for name in ("train_gpus", "engine_gpus") if getattr(flags, name) is not None]
        if named:
            raise ConfigError(f"--{named[0]} is given, and {missing}", hint=f"leave out --{named[0]}")
        return None
    has_images = _has_images(configs[ModelConfig].model_name_or_path)
    need = Need.of(
        configs, gpus, trains=trains, serves=serves, machines=machines, has_images=has_images
    )  # fmt: skip
    placement = place(gpus, flags, need)
    share = configs[EngineConfig].inf_mem_ratio or SHARED_MEMORY
    note = f"; the engine takes {share:g} of its memory (--inf_mem_ratio)" if placement.is_shared else ""
    report(f"{placement}{note}")
    return placement


def _has_images(folder: str | None) -> bool:
    try:
        return "vision_config" in json.loads(Path(folder or "", "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
