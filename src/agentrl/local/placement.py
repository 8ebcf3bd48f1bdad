"""Divide the GPUs of a machine among its engines and its trainer."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.base.batches import batches
from agentrl.base.device_lease import has_gpu
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.run import without_uri
from agentrl.config.schema import (
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    PlacementConfig,
    TrainConfig,
)
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engines.commands import COLOCATED_MEMORY, SHARED_MEMORY

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


Numbers = tuple[int, ...]
"""GPUs by number: their positions among those that are visible."""

_SIZES = ("dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
_ELSEWHERE = "or start the other processes on another machine: ROLES names those of this one"


@dataclass(frozen=True, kw_only=True)
class Need:
    """The processes of this machine that use GPUs, and how many of them each takes."""

    trains: bool
    serves: bool
    engine_gpus: int
    """GPUs of one engine."""
    trainer_sizes: dict[str, int]
    """Sizes above 1 of the trainer's mesh: the number of its GPUs is a multiple of their product."""
    machines: int = 1
    """Machines of the trainer, each with as many GPUs as this one."""
    takes_turns: bool = True
    """Whether an engine and the trainer may have a GPU together, in turns (``--colocate``)."""
    single: str = ""
    """Why the trainer runs in one process; empty if it may run in several."""

    @property
    def trainer_multiple(self) -> int:
        """The trainer takes a multiple of this number of GPUs on each machine."""
        product = math.prod(self.trainer_sizes.values())
        return product // math.gcd(product, self.machines)

    @classmethod
    def of(
        cls, configs: Configs, gpus: Gpus, *, trains: bool, serves: bool, has_images: bool, machines: int = 1
    ) -> Need:
        """Return what the flags ask for. Raises ConfigError for an engine that these GPUs cannot run.

        ``machines``: those of the trainer. ``has_images``: the model takes images.
        """
        engine, train = configs[EngineConfig], configs[TrainConfig]
        wide = serves and engine.inf_tp_size > 1
        require(
            not (wide and engine.engine == "local"),
            f"--inf_tp_size {engine.inf_tp_size}: the local engine runs on one GPU",
            "use ENGINE=sglang or ENGINE=vllm, or --inf_tp_size 1",
        )
        require(
            not (wide and gpus.are_mig),
            f"--inf_tp_size {engine.inf_tp_size}: CUDA gives a process one MIG instance",
            "set --inf_tp_size 1, or switch MIG off",
        )
        # An evaluation of each version starts an engine of its own, which takes no turns.
        has_own_evaluation = configs[EvaluationConfig].eval_steps is not None
        reasons = {
            "CUDA gives a process one MIG instance": gpus.are_mig,
            "images are trained in one process": has_images,
        }
        return cls(
            trains=trains,
            serves=serves,
            engine_gpus=engine.inf_tp_size,
            trainer_sizes={name: getattr(train, name) for name in _SIZES if getattr(train, name) > 1},
            machines=machines,
            takes_turns=engine.is_colocated or (engine.colocate == "auto" and not has_own_evaluation),
            single=next((reason for reason, holds in reasons.items() if holds), ""),
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which processes of this machine see which GPUs."""

    gpus: Gpus
    trainer: Numbers
    engines: tuple[Numbers, ...]
    takes_turns: bool = False
    """Whether engines and the trainer take turns on the GPUs that they have together."""

    @property
    def shared(self) -> Numbers:
        """The GPUs that both engines and the trainer have."""
        return tuple(each for each in self.trainer if each in set(itertools.chain(*self.engines)))

    @property
    def is_colocated(self) -> bool:
        """Whether the trainer takes turns with an engine."""
        return self.takes_turns and bool(self.shared)

    @property
    def engine_share(self) -> float:
        """The default fraction of memory for an engine on a GPU of the trainer."""
        return COLOCATED_MEMORY if self.is_colocated else SHARED_MEMORY

    @property
    def others(self) -> Numbers:
        """The GPUs that samplers, tool servers and an evaluation see: the one GPU, or the unused ones."""
        if self.shared and len(self.gpus) == 1:
            return self.trainer
        used = {*self.trainer, *itertools.chain(*self.engines)}
        return tuple(number for number in range(len(self.gpus)) if number not in used)

    def __str__(self) -> str:
        """Return one line for the terminal."""
        how = "take turns on" if self.takes_turns else "share"
        if self.shared and len(self.gpus) == 1:
            return f"{self.gpus}: the trainer and the engine {how} it"
        parts = [f"trainer on {ranges(self.trainer)}"] if self.trainer else []
        if self.engines:
            groups = ", ".join(ranges(each) for each in self.engines)
            count = len(self.engines)
            parts.append(f"{count} engines on {groups}" if count > 1 else f"engine on {groups}")
        if self.shared:
            parts.append(f"they {how} {ranges(self.shared)}")
        if self.others:
            parts.append(f"{ranges(self.others)} unused by them")
        return f"{self.gpus}: {'; '.join(parts)}"


def place(gpus: Gpus, flags: PlacementConfig, need: Need) -> Placement:
    """Divide the GPUs as the flags say, or else in halves; one GPU is shared.

    GPUs that both flags name are shared too, in turns.

    The flag of a process that does not run here is ignored. Raises ConfigError for GPUs that do not exist,
    that are named twice, or that are too few.
    """
    trainer = _parse("train_gpus", flags.train_gpus, gpus) if need.trains else ()
    engines = _parse("engine_gpus", flags.engine_gpus, gpus) if need.serves else ()
    everything = tuple(range(len(gpus)))
    if trainer and engines:
        both = [each for each in trainer if each in engines]
        require(
            not both or len(gpus) == 1 or need.takes_turns,
            f"--train_gpus {flags.train_gpus} and --engine_gpus {flags.engine_gpus} both name GPU"
            f" {ranges(both)}: a training step and an engine's KV cache do not fit one GPU together",
            "set --colocate true: they take turns then; or give each GPU to one of them",
        )
    elif trainer and need.serves:
        engines = _whole(_rest(everything, trainer), need.engine_gpus)
    elif engines and need.trains:
        trainer = _trainable(_rest(everything, engines), need)
    elif need.trains and need.serves and len(gpus) == 1:
        trainer = engines = everything
    elif need.trains and need.serves:
        trained = _halve(len(gpus), need)
        trainer, engines = everything[:trained], _whole(everything[trained:], need.engine_gpus)
    elif need.trains:
        trainer = trainer or _trainable(everything, need)
    else:
        engines = engines or _whole(everything, need.engine_gpus)
    _require_trainer(gpus, trainer, need)
    _require_engines(gpus, engines, need)
    groups = tuple(batches(engines, need.engine_gpus))
    return Placement(gpus=gpus, trainer=trainer, engines=groups, takes_turns=need.takes_turns)


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
    need = Need.of(configs, gpus, trains=trains, serves=serves, machines=machines, has_images=has_images)
    placement = place(gpus, flags, need)
    share = configs[EngineConfig].inf_mem_ratio or placement.engine_share
    note = f"; the engine takes {share:g} of its memory (--inf_mem_ratio)" if placement.shared else ""
    report(f"{placement}{note}")
    return placement


def _has_images(folder: str | None) -> bool:
    try:
        return "vision_config" in json.loads(Path(folder or "", "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ``--train_gpus`` takes them: ``0-3,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parse(name: str, text: str | None, gpus: Gpus) -> Numbers:
    """Read ``0-3,6``, or names such as UUIDs; return () for None."""
    if text is None:
        return ()
    found: list[int] = []
    for item in (item.strip() for item in text.split(",")):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if span is not None:
            found += range(int(span[1]), int(span[2] or span[1]) + 1)
        elif item in gpus.names:
            found.append(gpus.names.index(item))
        else:
            raise ConfigError(f"--{name} is {text!r}", hint="write numbers and ranges, such as 0-3 or 0,2")
    require(bool(found), f"--{name} {text} names no GPU", "write the smaller number first, such as 0-3")
    unknown = [number for number in found if number >= len(gpus)]
    is_numbered = gpus.names == tuple(map(str, range(len(gpus))))
    seen = "" if is_numbered else f" in {gpus.variable} {','.join(gpus.names)}"
    require(
        not unknown,
        f"--{name} {text} names GPU {ranges(unknown)}, and there {'are' if len(gpus) > 1 else 'is'}"
        f" {gpus}{seen}",
        f"use numbers up to {len(gpus) - 1}",
    )
    require(len(set(found)) == len(found), f"--{name} {text} names a GPU twice", "name each GPU once")
    return tuple(found)


def _halve(count: int, need: Need) -> int:
    """Return the number of the trainer's GPUs: as many as possible are used, in halves as equal as possible.

    Of two equal divisions, the one with more engines: sampling takes most of a step's time.
    """
    multiple, size = need.trainer_multiple, need.engine_gpus
    most = multiple if need.single else count
    choices = [
        (trained + served, -abs(trained - served), served, trained)
        for trained in range(multiple, min(most, count - size) + 1, multiple)
        for served in [(count - trained) // size * size]
    ]
    require(
        bool(choices),
        f"{count} GPUs are too few for a trainer of {multiple} ({_sizes(need)}) beside an engine of {size}"
        f" (--inf_tp_size)",
        f"lower one of these sizes, {_ELSEWHERE}",
    )
    return max(choices)[3]


def _require_trainer(gpus: Gpus, trainer: Numbers, need: Need) -> None:
    if not need.trains:
        return
    multiple = need.trainer_multiple
    require(
        bool(trainer),
        f"the trainer needs {multiple} of {gpus} ({_sizes(need)}), and the engines leave it fewer",
        f"give the engines fewer by --engine_gpus, {_ELSEWHERE}",
    )
    require(
        len(trainer) % multiple == 0,
        f"GPU {ranges(trainer)} of the trainer: {len(trainer)} is not a multiple of {_sizes(need)}",
        "change --train_gpus or these sizes",
    )
    require(
        len(trainer) == 1 or not need.single,
        f"the trainer has {len(trainer)} GPUs ({ranges(trainer)}), and {need.single}",
        f"give it one, such as --train_gpus {trainer[0]}" if not need.trainer_sizes else "lower its sizes",
    )


def _require_engines(gpus: Gpus, engines: Numbers, need: Need) -> None:
    if not need.serves:
        return
    require(
        bool(engines),
        f"an engine needs {need.engine_gpus} of {gpus} (--inf_tp_size), and the trainer leaves it fewer",
        f"give the trainer fewer by --train_gpus, {_ELSEWHERE}",
    )
    require(
        len(engines) % need.engine_gpus == 0,
        f"GPU {ranges(engines)} of the engines: {len(engines)} is not a multiple of --inf_tp_size"
        f" {need.engine_gpus}",
        "change --engine_gpus or --inf_tp_size",
    )


def _trainable(numbers: Numbers, need: Need) -> Numbers:
    return _whole(numbers, need.trainer_multiple)[: need.trainer_multiple if need.single else None]


def _whole(numbers: Numbers, size: int) -> Numbers:
    """Return the first GPUs, as many as groups of ``size`` take."""
    return numbers[: len(numbers) // size * size]


def _rest(everything: Numbers, taken: Numbers) -> Numbers:
    return tuple(number for number in everything if number not in taken)


def _sizes(need: Need) -> str:
    named = [f"--{name} {size}" for name, size in need.trainer_sizes.items()]
    return " × ".join(named) or "one process a GPU"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, from its data sheet."""

    name: str
    memory_gib: float
    """What a process can allocate, in GiB; a little below the marketed size."""
    tflops: float
    """Dense bfloat16 products, in 10¹² FLOP/s."""
    memory_gb_s: float
    """Bandwidth of its memory, in GB/s."""
    link_gb_s: float
    """Bandwidth to another GPU of the same node, in one direction, in GB/s."""
    fuses_norms: bool = True
    """RMS norms run as one kernel on it (``agentrl.model.norms``)."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="B200", memory_gib=178.0, tflops=2250.0, memory_gb_s=8000.0, link_gb_s=900.0),
        Gpu(name="H200", memory_gib=139.0, tflops=989.0, memory_gb_s=4800.0, link_gb_s=450.0),
        Gpu(name="H100", memory_gib=79.0, tflops=989.0, memory_gb_s=3350.0, link_gb_s=450.0),
        Gpu(name="H800", memory_gib=79.0, tflops=989.0, memory_gb_s=3350.0, link_gb_s=200.0),
        Gpu(name="H20", memory_gib=95.0, tflops=148.0, memory_gb_s=4000.0, link_gb_s=450.0),
        Gpu(name="A100", memory_gib=79.0, tflops=312.0, memory_gb_s=2039.0, link_gb_s=300.0),
        Gpu(name="A100-40GB", memory_gib=39.4, tflops=312.0, memory_gb_s=1555.0, link_gb_s=300.0),
        Gpu(name="L40S", memory_gib=44.4, tflops=362.0, memory_gb_s=864.0, link_gb_s=32.0),
        Gpu(name="L4", memory_gib=22.0, tflops=121.0, memory_gb_s=300.0, link_gb_s=32.0),
        Gpu(name="A10G", memory_gib=22.0, tflops=70.0, memory_gb_s=600.0, link_gb_s=32.0),
        Gpu(name="4090", memory_gib=23.5, tflops=165.2, memory_gb_s=1008.0, link_gb_s=32.0),
        Gpu(
            name="MI300X", memory_gib=191.0, tflops=1307.4, memory_gb_s=5300.0, link_gb_s=448.0,
            fuses_norms=False,
        ),
    )
}  # fmt: skip
"""By the name that ``--gpus`` takes. Figures without sparsity, from the vendors' data sheets."""


@dataclass(frozen=True, kw_only=True)
class GpuCluster:
    """The GPUs that a trainer gets."""

    gpu: Gpu
    count: int
    per_node: int
    """GPUs of one machine, which its fast links join."""
    network_gb_s: float
    """Bandwidth between machines per GPU, in one direction, in GB/s."""

    def link_gb_s(self, span: int) -> float:
        """Return the bandwidth among ranks of which the farthest two are ``span`` ranks apart."""
        return self.gpu.link_gb_s if span <= self.per_node else min(self.gpu.link_gb_s, self.network_gb_s)


def parse_gpus(
    text: str, *, memory_gib: float | None = None, per_node: int = 8, network_gbps: float = 400.0
) -> GpuCluster:
    """Read ``8xH100``, ``H100`` or ``16 x H200``; ``memory_gib`` replaces the memory of the kind.

    Raises ConfigError for a number below 1 and for a kind that is unknown.
    """
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?([A-Za-z0-9-]+)\s*", text)
    if found is None or int(found[1] or 1) < 1:
        raise ConfigError(f"--gpus is {text!r}", hint="write a number and a kind, e.g. 8xH100")
    gpu = _kind(found[2], memory_gib)
    if memory_gib is not None:
        gpu = replace(gpu, memory_gib=memory_gib)
    count = int(found[1] or 1)
    return GpuCluster(gpu=gpu, count=count, per_node=min(per_node, count), network_gb_s=network_gbps / 8)


def _kind(name: str, memory_gib: float | None) -> Gpu:
    plain = re.sub(r"[^A-Z0-9]", "", name.upper().removeprefix("RTX"))
    for key, gpu in GPUS.items():
        if re.sub(r"[^A-Z0-9]", "", key.upper()) in (plain, plain.removesuffix("80GB")):
            return gpu
    hint = f"use one of {', '.join(GPUS)}"
    if memory_gib is None:
        hint += "; for another kind name the most similar one, and its memory in --gpu_memory_gib"
    raise ConfigError(f"--gpus: {name!r} is unknown", hint=hint)
