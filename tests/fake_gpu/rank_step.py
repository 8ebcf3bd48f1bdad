"""Run one training step of one rank on fake tensors, with the trainer's own code, and measure its memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.config.schema import LossConfig, OptimConfig
from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed import parallel_model
from agentrl.distributed.mesh import Layout
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.errors import ModelError
from agentrl.local.plan import memory
from agentrl.local.plan.memory import ModelNumbers
from agentrl.losses.compute import Denominators, reduce_losses, token_losses
from agentrl.losses.settings import LossSettings
from agentrl.model.check_model import list_kinds
from agentrl.model.flops import ModelShape
from agentrl.model.load import allocate, disable_dropout
from agentrl.model.lora import add_adapter
from agentrl.model.norms import fuse_norms
from agentrl.train.build import enable_checkpointing
from agentrl.train.optimizer import build_optimizer, freeze
from agentrl.train.step import token_batch
from fake_gpu.fake_rank import balance_experts, fake_mesh, rank_of
from fake_gpu.layer_kinds import Depth, Peaks, extrapolate, keep_layers, stage_layers
from fake_gpu.memory_tracker import MemoryTracker, Storages, watch_phases


@dataclass(frozen=True, kw_only=True)
class StepSpec(memory.StepSpec):
    """A step that is planned, and what it takes to run it."""

    chain_tokens: int
    """Tokens of each trajectory in a micro-batch; the last one is shorter."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    on_gpu: bool = True
    """Plan AdamW's kernel for a GPU; otherwise for a CPU."""

    def forest(self) -> TokenForest:
        """Return a full micro-batch: chains whose last tokens are trainable."""
        lengths = [
            min(self.chain_tokens, self.max_tokens - start)
            for start in range(0, self.max_tokens, self.chain_tokens)
        ]
        share = min(1.0, self.trained_tokens / self.max_tokens)
        masks = [np.arange(length) >= length - min(length - 1, round(length * share)) for length in lengths]
        return forest_from_sequences([np.zeros(length, np.int64) for length in lengths], masks)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the peak of a step."""

    peak: int
    parts: Mapping[str, int]
    """By part; they add up to ``peak``."""
    phase: str
    """What runs at the peak."""
    stage: int = 0
    """The pipeline stage of the rank."""


def measure_step(spec: StepSpec, layout: Layout, *, all_layers: bool = False) -> RankMemory:
    """Return the memory of the rank that needs most; of the pipeline's stages, the first and last are run.

    Runs ``parallelize``, forward, backward, clipping and AdamW on fake tensors, with few layers of each kind;
    the others are extrapolated, unless ``all_layers``. Raises what they raise: ConfigError and ModelError for
    a layout or a model that the trainer refuses.
    """
    try:
        used = [
            _measure_rank(spec, layout, stage, all_layers=all_layers) for stage in sorted({0, layout.pp - 1})
        ]
    except RuntimeError as error:  # a fake tensor has no values, and some operations need them
        raise ModelError(
            f"a step of this model cannot be simulated: {str(error).strip().splitlines()[0]}",
            hint="measure one: agentrl train --max_steps 1",
        ) from error
    return max(used, key=lambda rank: rank.peak)


def _measure_rank(spec: StepSpec, layout: Layout, stage: int, *, all_layers: bool) -> RankMemory:
    with _quiet():
        kinds = [] if all_layers else _stage_kinds(spec, layout, stage)
        simulated: dict[Depth, _Simulated] = {}

        def simulate(depth: Depth | None) -> Peaks:
            found = _simulate(spec, layout, stage, depth)
            simulated[depth or ()] = found
            return found.peaks

        peaks = extrapolate(kinds, simulate)
    peak = max(peaks.values(), key=lambda item: item.total)
    used = RankMemory(peak.total, peak.parts, peak.phase, stage)
    if spec.memory.optimizer_offload:
        used = _without_moments(used, max(item.largest for item in simulated.values()))
    return _with_gathered_context(used, spec, layout)


def _stage_kinds(spec: StepSpec, layout: Layout, stage: int) -> list[int]:
    """Return the kind of each layer of ``stage``; empty for a decoder without a list of layers."""
    with torch.device("meta"):
        model = build_model(spec)
    kinds = list_kinds(model)
    return [kinds[place] for place in stage_layers(model, layout)[stage]] if kinds else []


@dataclass(frozen=True)
class _Simulated:
    peaks: Peaks
    largest: int
    """Bytes of the largest trained parameter."""


def _simulate(spec: StepSpec, layout: Layout, stage: int, depth: Depth | None) -> _Simulated:
    """Run a step of a model that keeps ``depth`` layers of each kind in this stage, or all if None."""
    with torch.device("meta"):
        model = build_model(spec)
    stages = None if depth is None else keep_layers(model, layout, stage, depth)
    chosen = (
        mock.patch.object(parallel_model, "assign_model_layers", return_value=stages)
        if stages
        else contextlib.nullcontext()
    )
    with fake_mesh(layout, rank_of(layout, stage)) as mesh, chosen:
        parallel = parallelize(
            model,
            mesh,
            max_tokens=spec.max_tokens,
            reduction=spec.memory.gradient_reduction,
            precision=spec.precision,
        )
        balance_experts(model)
        with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as tracker:
            allocate(model, torch.device("cpu"))
            return _run_step(tracker, spec, parallel)


def _run_step(tracker: MemoryTracker, spec: StepSpec, parallel: ParallelModel) -> _Simulated:
    model = parallel.model
    optimizer = build_optimizer(model, spec.optim, spec.memory)
    if spec.on_gpu:
        _use_gpu_kernels(optimizer)
    parameters = list(parallel.parameters())
    tracker.owned, tracker.resized = owned_tensors(parallel, optimizer)
    _make_moments(tracker, optimizer, parameters)
    if parallel.mesh.layout.tp > 1:
        # DTensor infers the shapes of results with tensors as large as the whole, and then knows them.
        add_gradients(parallel, spec, [spec.forest()])
        optimizer.zero_grad(set_to_none=True)
    watch_phases(tracker, model)
    tracker.restart()
    tracker.phase = "activations"
    add_gradients(parallel, spec, [spec.forest()] * spec.micro_batches)
    tracker.phase = "backward"
    tracker.begin("clip")
    parallel.clip_gradients(spec.optim.max_grad_norm)
    tracker.phase = "optimizer step"
    tracker.begin("optimizer step")
    optimizer.step()
    trained = [local_tensor(parameter).nbytes for parameter in parameters if parameter.requires_grad]
    return _Simulated(dict(tracker.peaks), max(trained))


def _without_moments(used: RankMemory, largest: int) -> RankMemory:
    """Take the moments off the device, except those of the largest parameter: they move one at a time."""
    moments = min(2 * largest, used.parts["optimizer states"])
    saved = used.parts["optimizer states"] - moments
    return replace(used, peak=used.peak - saved, parts={**used.parts, "optimizer states": moments})


def _with_gathered_context(used: RankMemory, spec: StepSpec, layout: Layout) -> RankMemory:
    """Add the keys and values that FlexAttention keeps under context parallelism on a GPU.

    The simulation runs the attention of a CPU, which gathers them again in the backward.
    """
    if layout.cp == 1 or not spec.on_gpu or spec.checkpointing != "none" or used.phase == "optimizer step":
        return used
    shape, width = ModelShape.of(spec.config), spec.precision.products.itemsize
    layers = -(-shape.layers // layout.pp) * min(layout.pp - used.stage, spec.micro_batches)
    kept = layers * 2 * spec.max_tokens * shape.kv_heads * shape.head_dim * width // layout.tp
    activations = used.parts.get("activations", 0) + kept
    return replace(used, peak=used.peak + kept, parts={**used.parts, "activations": activations})


def build_model(spec: StepSpec) -> Any:
    """Return the model of ``spec``, with the trainer's settings."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    config = copy.deepcopy(spec.config)  # the model shares it, and layers may be removed
    dtype = spec.precision.products if spec.adapter.lora_rank else spec.precision.weights
    model = model_class.from_config(config, dtype=dtype, attn_implementation="sdpa")
    disable_dropout(model)
    fuse_norms(model)
    if spec.adapter.lora_rank:
        add_adapter(model, spec.adapter, Path(), None)
    enable_checkpointing(model, spec.checkpointing, offload=spec.memory.activation_offload)
    freeze(model, spec.optim.freeze)
    return model.train()


def _use_gpu_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW work on all tensors at once where it is not fused, as it does on a GPU."""
    for group in optimizer.param_groups:
        group["foreach"] = not group["fused"]


def _make_moments(tracker: MemoryTracker, optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    """Make one step with gradients of zeros: the moments exist from the second step on."""
    tracker.phase, tracker.scalar = "optimizer states", 1
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def planned_memory(spec: StepSpec, layout: Layout) -> memory.RankMemory:
    """Return what ``agentrl plan`` computes of a step."""
    with torch.device("meta"):
        model = build_model(replace(spec, checkpointing="none"))
    return memory.measure_step(ModelNumbers.of(model), spec, layout)


def add_gradients(parallel: ParallelModel, spec: StepSpec, forests: Sequence[TokenForest]) -> None:
    """Add those of the run's loss, without its metrics: they read values, which fake tensors have not."""
    settings = LossSettings.of(spec.loss)
    for forest, values in parallel.micro_batches(forests, spec.options):
        torch.autograd.backward(_loss(forest, *values, settings=settings, spec=spec))


def _loss(
    forest: TokenForest, logprobs: Tensor, entropy: Tensor, *, settings: LossSettings, spec: StepSpec
) -> Tensor:
    if settings.kl_coef:
        forest = replace(forest, reference_logprob=np.zeros_like(forest.behavior_logprob))
    batch = replace(token_batch(forest, logprobs, settings), entropy=entropy)
    losses = token_losses(batch, settings).losses
    whole = Denominators(forest.trainable_tokens * spec.micro_batches, float(forest.trajectories))
    return reduce_losses(losses, batch.mask, batch.row, batch.trajectories, whole, settings, batch.lengths)


def owned_tensors(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], Storages], Callable[[], Iterator[Iterator[Tensor]]]]:
    """Return what a tracker needs of a model: ``MemoryTracker.owned`` and ``MemoryTracker.resized``."""
    parameters = list(parallel.parameters())
    groups = list(_fsdp_groups(parallel))

    def resized() -> Iterator[Iterator[Tensor]]:
        return ((tensor for shard in group for tensor in shard.all_gather_outputs) for group in groups)

    def owned() -> dict[str, list[Tensor]]:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for shard in (shard for group in groups for shard in group):
            whole = getattr(shard, "_unsharded_param", None)
            found = (shard.unsharded_accumulated_grad, None if whole is None else whole.grad)
            gradients += [tensor for tensor in found if tensor is not None]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return {
            "gathered parameters": [local_tensor(tensor) for group in resized() for tensor in group],
            "gradients": [local_tensor(tensor) for tensor in gradients],
            "optimizer states": [local_tensor(value) for value in moments if isinstance(value, Tensor)],
            "parameters": [local_tensor(parameter) for parameter in parameters],
        }

    return owned, resized


def _fsdp_groups(parallel: nn.Module) -> Iterator[list[Any]]:
    """Yield FSDP2's state of the parameters that it gathers together (torch has no public view of it)."""
    for module in parallel.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield group.fsdp_params


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's part on this rank, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop warnings below errors: they are about the run that is planned, or about fake tensors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
