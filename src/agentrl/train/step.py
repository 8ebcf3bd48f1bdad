"""One training step: data → updates → micro-batches → loss → gradients → clipping → AdamW."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config.training import VERSION_LOGPROBS, MemoryConfig
from agentrl.data.forest import TokenForest
from agentrl.data.planner import PrefixMerging
from agentrl.distributed.build_policy import pack_forests
from agentrl.distributed.fsdp import clean_step
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.images import Image
from agentrl.documents.training import JUDGED, DBRecordData, TrainableSpan
from agentrl.errors import ForestError, TrainingError, first_line
from agentrl.losses.compute import (
    DIVERGENCE,
    Denominators,
    TokenMetrics,
    divergence,
    measure,
    old_logprobs,
    reduce_losses,
    token_losses,
)
from agentrl.losses.loss import ComparedTrajectories, TokenBatch, TrajectoryMeans, largest_within
from agentrl.losses.settings import LossSettings
from agentrl.model.flops import Backward, DevicePeak, ModelShape, Stopwatch, attention_pairs
from agentrl.model.load import Policy
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.lora import Adapter
from agentrl.model.routing import RouterReplay
from agentrl.train.critic import Critic, ValueLoss


@dataclass(slots=True)
class StepLoss:
    """The loss of one update, one forest at a time.

    The values of each forest stay on the device until ``report``: a host that read them after each forest
    would wait for the device, which then waits for the host's next forward.
    """

    settings: LossSettings
    whole: Denominators
    """Of the whole update, over all ranks."""
    tokens: int
    """Tokens of the whole update, over all ranks."""
    sums: TrajectorySums | None = None
    """Given if the loss compares trajectories, or reads whole ones and a forest holds parts of one."""
    recorder: TokenRecorder | None = None
    """Gets the values of single tokens."""
    compared: ComparedTrajectories | None = None
    """Those of the update, if the loss compares them; without ``number``, which each forest has."""
    mean_limit: float | None = None
    """The update's ``TokenBatch.mean_limit``, if the loss bounds a mean and has several forests."""
    _added: list[tuple[TokenForest, Tensor]] = field(default_factory=list)
    """Each forest with its part of the loss and its ``measure``."""

    @classmethod
    def start(
        cls,
        model: ParallelModel,
        forests: Sequence[TokenForest],
        settings: LossSettings,
        options: ForwardOptions,
        recorder: TokenRecorder | None = None,
        data: Sequence[DBRecordData] = (),
        left_out: Sequence[DBRecordData] = (),
    ) -> StepLoss:
        """Count an update's tokens and trajectories over all ranks, and sum what it needs of trajectories.

        ``forests`` are this rank's; ``data`` are the update's, of all ranks, and ``left_out`` those that are
        in no forest but in the denominators. Raises ForestError if no token is trainable.
        """
        own, own_tokens = count_step(forests), sum(forest.tokens for forest in forests)
        # Count in float64: float32 has no odd numbers above 2**24, and a step may have more tokens.
        counts = torch.tensor([own.tokens, own.trajectories, own_tokens], dtype=torch.float64)
        trainable_tokens, trajectories, tokens = model.mesh.sum(counts.to(model.model.device)).tolist()
        whole = Denominators(round(trainable_tokens), trajectories) + Denominators(
            sum(item.trainable_tokens for item in left_out), len(left_out)
        )
        if whole.tokens == 0:
            raise ForestError(
                "a step without a trainable token", hint="leave out data without trainable spans"
            )
        sums = sum_trajectories(model, forests, settings, options)
        compared = None
        if settings.loss.compares:
            assert sums is not None
            compared = sums.compared(data)
        limit = None
        if (values_of := settings.loss.bounds_mean_of) is not None:
            limit = limit_mean(model, forests, settings, options, values_of)
        return cls(settings, whole, round(tokens), sums, recorder, compared, limit)

    def add(
        self, forest: TokenForest, logprobs: Tensor, entropy: Tensor, divergence: Tensor | None = None
    ) -> Tensor:
        """Return the part of the loss that ``forest`` has, with gradient to its ``logprobs`` (float32[T]).

        With an entropy bonus, it has a gradient to its ``entropy`` (float32[T]) too, and with a teacher's
        likeliest ids to the ``divergence`` (float32[T]) from them.
        """
        if self.recorder is not None:
            self.recorder.add(forest, logprobs, entropy)
        means = None if self.sums is None else self.sums.means(forest)
        batch = token_batch(forest, logprobs, self.settings, means)
        columns = batch.columns if divergence is None else {**batch.columns, DIVERGENCE: divergence}
        compared = self.compared
        if compared is not None:
            compared = replace(compared, number=torch.from_numpy(forest.trajectory).to(logprobs.device))
        batch = replace(
            batch, entropy=entropy, columns=columns, compared=compared, mean_limit=self.mean_limit
        )
        result = token_losses(batch, self.settings)
        part = reduce_losses(
            result.losses, batch.mask, batch.row, batch.trajectories, self.whole, self.settings, batch.lengths
        )
        measured = measure(
            batch, result, entropy.detach(), by_version=self.settings.old_logprobs == "version"
        )
        self._added.append((forest, torch.cat([part.detach().double()[None], measured])))
        return part

    def report(self) -> TokenMetrics:
        """Return the metrics of the forests that were added; waits for the device."""
        total = TokenMetrics()
        values = torch.stack([values for _, values in self._added]).tolist() if self._added else []
        for (forest, _), (loss, *sums) in zip(self._added, values, strict=True):
            total += TokenMetrics.of(loss, sums, forest.age, forest.version)
        return total


def token_batch(
    forest: TokenForest,
    logprobs: Tensor,
    settings: LossSettings,
    means: TrajectoryMeans | None = None,
) -> TokenBatch:
    """Return a forest's trainable tokens as losses take them.

    Supervised data have no behavior policy: their behavior logprobs are the policy's own. ``means`` are
    needed if the forest holds parts of trajectories and the loss reads whole ones.
    """
    row, version, age, advantages, behavior, lengths = (
        torch.from_numpy(array).to(logprobs.device)
        for array in (
            forest.row, forest.version, forest.age, forest.advantage, forest.behavior_logprob,
            forest.row_tokens,
        )
    )  # fmt: skip
    start, reference = (
        None if array is None else torch.from_numpy(array).to(logprobs.device)
        for array in (forest.start_logprob, forest.reference_logprob)
    )
    if not settings.loss.from_policy and not settings.loss.compares:
        behavior = logprobs.detach()
    columns = {
        name: torch.from_numpy(values).to(logprobs.device)
        for name, values in ({} if forest.columns is None else forest.columns.values).items()
    }
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs(
            settings.old_logprobs, logprobs if start is None else start, behavior, age,
            columns.get(VERSION_LOGPROBS),
        ),
        reference_logprobs=reference,
        behavior_logprobs=behavior,
        advantages=advantages,
        row=row,
        version=version,
        age=age,
        mask=torch.ones_like(row, dtype=torch.bool),
        trajectories=forest.trajectories,
        lengths=lengths,
        means=means,
        columns=columns,
    )  # fmt: skip


def count_step(forests: Sequence[TokenForest]) -> Denominators:
    """Count the trainable tokens and the trajectories of ``forests``; a trajectory's parts add up to 1."""
    total = Denominators(0, 0)
    for forest in forests:
        whole = forest.row_tokens[forest.row]
        total = total + Denominators(forest.trainable_tokens, float((1.0 / whole).sum()))
    return total


@dataclass(frozen=True, slots=True)
class TrajectorySums:
    """Sums over the trainable tokens of each trajectory of a step; float64[trajectories] or longer."""

    log_ratio: Tensor
    """Σ log πθ/π_old."""
    log_weight: Tensor
    """Σ log π_old/μ."""
    divergence: Tensor
    """Σ of ``losses.compute.divergence``."""
    log_reference: Tensor
    """Σ log πθ/π_ref; 0 without a reference model."""

    @staticmethod
    def of_tokens(batch: TokenBatch, settings: LossSettings) -> Tensor:
        """Return the summands, float64[4, T], a row per field."""
        reference = batch.logprobs if batch.reference_logprobs is None else batch.reference_logprobs
        rows = [
            batch.log_ratio, batch.log_weight, divergence(batch, settings), batch.logprobs - reference,
        ]  # fmt: skip
        return torch.stack(rows).detach().double()

    def means(self, forest: TokenForest) -> TrajectoryMeans:
        """Return the means over the trajectory of each of ``forest``'s rows."""
        device = self.log_ratio.device
        number = torch.from_numpy(forest.trajectory).to(device)
        count = torch.from_numpy(np.maximum(forest.row_tokens, 1)).to(device)
        return TrajectoryMeans(
            *((sums[number] / count).float() for sums in (self.log_ratio, self.log_weight, self.divergence))
        )

    def compared(self, data: Sequence[DBRecordData]) -> ComparedTrajectories:
        """Return ``data``, the trajectories of an update in the order in which its forests number them."""
        device = self.log_reference.device
        groups = {task: number for number, task in enumerate(dict.fromkeys(item.task for item in data))}
        return ComparedTrajectories(
            number=torch.empty(0, dtype=torch.int64, device=device),
            score=torch.tensor([item.score for item in data], device=device),
            group=torch.tensor([groups[item.task] for item in data], device=device),
            log_ratio=self.log_reference[: len(data)].float(),
        )


@torch.no_grad()
def sum_trajectories(
    model: ParallelModel, forests: Sequence[TokenForest], settings: LossSettings, options: ForwardOptions
) -> TrajectorySums | None:
    """Sum what a loss reads of whole trajectories, by one more forward over each forest; None if not needed.

    It is needed if the loss compares trajectories (DPO, KTO), and if the loss of a token depends on its
    whole trajectory (GSPO, corrections named ``seq_…``) and a forest of any rank holds a part of one.
    """
    if not settings.reads_trajectory and not settings.loss.compares:
        return None
    device = model.model.device
    numbers = 1 + max((int(forest.trajectory.max(initial=-1)) for forest in forests), default=-1)
    is_needed = settings.loss.compares or any(forest.holds_parts for forest in forests)
    # Decide together: a forward that only some ranks made would wait for the shards of the others.
    found = torch.tensor([is_needed, numbers], device=device)
    found = model.mesh.sum(found)
    if not found[0]:
        return None
    # Take the sum of the ranks' lengths: all need one length, and it only has to be long enough.
    sums = torch.zeros(4, int(found[1]), dtype=torch.float64, device=device)
    for forest, (logprobs, _) in zip(forests, model.logprobs(forests, options), strict=True):
        batch = token_batch(forest, logprobs, settings)
        number = torch.from_numpy(forest.trajectory[forest.row]).to(device)
        sums.index_add_(1, number, TrajectorySums.of_tokens(batch, settings))
    return TrajectorySums(*model.mesh.sum(sums))


@torch.no_grad()
def limit_mean(
    model: ParallelModel, forests: Sequence[TokenForest], settings: LossSettings, options: ForwardOptions,
    values_of: Callable[[TokenBatch, LossSettings], Tensor],
) -> float | None:  # fmt: skip
    """Return the ``mean_limit`` of an update, by one more forward over each forest.

    ``values_of`` are those whose mean the loss bounds (M2PO). None if one forest has all tokens.
    """
    counted = model.mesh.sum(torch.tensor([len(forests)], device=model.model.device))
    if counted[0] <= 1:
        return None
    values = [torch.zeros(0, device=model.model.device)]
    for forest, (logprobs, _) in zip(forests, model.logprobs(forests, options), strict=True):
        values.append(values_of(token_batch(forest, logprobs, settings), settings))
    return largest_within(values, model.mesh.sum)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What a step computed of the tokens that it trained of one trajectory, float32[T] in order of spans."""

    record: str
    spans: tuple[TrainableSpan, ...]
    log_ratio: NDArray[np.float32]
    """log πθ − log μ, in nats."""
    entropy: NDArray[np.float32]
    """Of the policy's distribution, in nats."""


class TokenRecorder:
    """Collects the values of one update's chosen trajectories on this rank."""

    def __init__(self, data: Sequence[DBRecordData], chosen: Collection[str], device: torch.device) -> None:
        """``data`` are those of the update, in the order in which its forests number them."""
        sizes = np.array([item.trainable_tokens if item.id in chosen else 0 for item in data], np.int64)
        self._data = [item for item in data if item.id in chosen]
        self._first = np.where(sizes > 0, np.cumsum(sizes) - sizes, -1)
        self._values = torch.zeros(2, int(sizes.sum()), device=device)

    def add(self, forest: TokenForest, logprobs: Tensor, entropy: Tensor) -> None:
        """Copy the values of the chosen trajectories from a micro-batch; both tensors are float32[T]."""
        first = self._first[forest.trajectory[forest.row]]
        chosen = np.flatnonzero(first >= 0)
        if not chosen.size:
            return
        here, indices, behavior = (
            torch.from_numpy(array).to(self._values.device)
            for array in (chosen, first[chosen] + forest.label[chosen], forest.behavior_logprob[chosen])
        )
        log_ratio = logprobs.detach().float()[here] - behavior
        self._values[:, indices] = torch.stack([log_ratio, entropy.detach().float()[here]])

    def collect(self, mesh: Mesh) -> list[TokenValues]:
        """Return the values of all ranks by trajectory; every rank calls it."""
        log_ratio, entropy = mesh.sum(self._values, stages=True).cpu().numpy()
        ends = np.cumsum([item.trainable_tokens for item in self._data], dtype=np.int64)
        # Leave out what follows the last: it is empty, and also there if no trajectory is chosen.
        parts = zip(self._data, *(np.split(each, ends)[:-1] for each in (log_ratio, entropy)), strict=True)
        return [TokenValues(item.id, item.spans, ratios, entropies) for item, ratios, entropies in parts]


def recorders(
    updates: Sequence[Sequence[DBRecordData]], limit: int, device: torch.device
) -> list[TokenRecorder]:
    """Return a recorder for each update's data, for at most ``limit`` tokens of the step; none for 0."""
    if limit <= 0:
        return []
    chosen = choose_trajectories([item for data in updates for item in data], limit)
    return [TokenRecorder(data, chosen, device) for data in updates]


def choose_trajectories(data: Sequence[DBRecordData], limit: int) -> frozenset[str]:
    """Return the ids of the first trajectories whose trainable tokens fit into ``limit`` together."""
    chosen, left = [], limit
    for item in data:
        if item.trainable_tokens <= left:
            chosen.append(item.id)
            left -= item.trainable_tokens
    return frozenset(chosen)


_COUNTED = ("tokens", "trainable_tokens", "trajectories", "extreme_tokens")
_OF_ALL = ("loss", "grad_norm", "lr", "computed_fraction")


def speed_metrics(
    forests: Sequence[TokenForest],
    seconds: Mapping[str, float],
    shape: ModelShape,
    peak: DevicePeak,
    *,
    backward: Backward,
    step_tokens: int,
    ranks: int,
) -> dict[str, float]:
    """Return the speed of one update on a rank that ran ``forests``; ``mfu`` only if ``peak`` is known.

    ``backward`` has what the backward pass computes. ``seconds`` has the wall-clock times of ``forward``,
    ``backward`` and ``optimizer``. ``step_tokens`` is the number of tokens of all ranks. ``ranks`` computed
    the same forests together.
    """
    flops = shape.step_flops(
        sum(forest.tokens for forest in forests),
        sum(forest.trainable_tokens for forest in forests),
        sum(attention_pairs(forest) for forest in forests),
        backward,
    )
    flops /= ranks
    forward_backward = seconds["forward"] + seconds.get("backward", 0.0)
    elapsed = max(forward_backward + seconds["optimizer"], 1e-9)
    mfu = peak.share(flops / elapsed)
    return {
        "tokens_per_second": step_tokens / elapsed,
        "padding_efficiency": 1.0,  # forests are packed; what executors and ranks pad is not counted
        "micro_batches": len(forests),
        **({} if mfu is None else {"mfu": mfu}),
        "tflops_per_second": flops / elapsed / 1e12,
        "seconds_forward": seconds["forward"],
        "seconds_backward": seconds.get("backward", 0.0),
        "seconds_forward_backward": forward_backward,
        "seconds_optimizer": seconds["optimizer"],
    }


def routing_metrics(forests: Sequence[TokenForest], differing: float) -> dict[str, float]:
    """Return how much routing a rank replayed in ``forests``; ``differing`` is the routers' own report."""
    found = [forest.routing for forest in forests if forest.routing is not None]
    merged = sum(routing.merged for routing in found)
    return {
        "router_replayed": sum(routing.tokens for routing in found)
        / max(sum(forest.tokens for forest in forests), 1),
        "router_differs": differing,
        "router_merge_differs": sum(routing.differing for routing in found) / max(merged, 1),
    }


def merging_metrics(metrics: Mapping[str, Any], total_tokens: int) -> dict[str, float]:
    """Return what merging prefixes saved in a step that reports ``metrics``.

    ``total_tokens`` is what ``call_tokens`` counts; the step computed ``metrics["tokens"]`` of them.
    """
    ratio = total_tokens / max(metrics["tokens"], 1)
    return {
        "unique_tokens": metrics["tokens"],
        "total_tokens": total_tokens,
        "sharing_ratio": ratio,
        "total_tokens_per_second": metrics["tokens_per_second"] * ratio,
    }


def call_tokens(data: Sequence[DBRecordData]) -> int:
    """Count the tokens that training would compute if each model call were a row: prompt and output."""
    total = 0
    for item in data:
        before: list[int] = []
        for node in item.nodes:
            above = item.nodes[node.parent] if node.parent >= 0 else None
            before.append(0 if above is None else before[node.parent] + above.end - above.start)
        ends: dict[int, int] = {}
        for span in item.spans:
            index = next(i for i, node in enumerate(item.nodes) if node.start <= span.start < node.end)
            length = before[index] + span.end - item.nodes[index].start
            ends[span.call] = max(ends.get(span.call, 0), length)
        total += sum(ends.values())
    return total


def join_metrics(updates: Sequence[Mapping[str, Any]], first_pass: int) -> dict[str, Any]:
    """Join the metrics of a step's updates; the first ``first_pass`` make one pass over its data.

    Tokens, trajectories and histograms are those of the first pass. Seconds add up, and a maximum is that of
    all updates. Every other number is the mean over updates, weighted by the trainable tokens that it is of:
    those that were computed, and all of them for ``_OF_ALL``.
    """
    joined: dict[str, Any] = {}
    # Not the names of the first update alone: it has no ``kl_teacher`` if none of its tokens is taught.
    for name in dict.fromkeys(name for update in updates for name in update):
        value = next(update[name] for update in updates if name in update)
        share = "taught_fraction" if name == "kl_teacher" else ""
        part = "" if name in _OF_ALL else "computed_fraction"
        # Count at least one token: an update of which nothing is computed runs one.
        weights = [max(update["trainable_tokens"] * update.get(part, 1.0), 1.0) * update.get(share, 1.0)
                   for update in updates]  # fmt: skip
        if name == "version_gap":  # it is of tokens of age 0 alone
            weights = [update.get("staleness_histogram", {}).get("0", 0.0) for update in updates]
        pairs = list(zip(updates, weights, strict=True))
        found = [(update[name], weight) for update, weight in pairs if name in update]
        # Count updates, not values: one of which nothing is computed has none.
        first = [(update[name], weight) for update, weight in pairs[:first_pass] if name in update]
        if isinstance(value, Mapping):
            joined[name] = _join_by_key(first, is_mean=name.endswith("_fractions"))
        elif name in _COUNTED:
            joined[name] = sum(number for number, _ in first)
        elif name.startswith("seconds_"):
            joined[name] = sum(number for number, _ in found)
        elif name.endswith("_max"):
            joined[name] = max(number for number, _ in found)
        elif isinstance(value, int | float):
            total = sum(weight for _, weight in found)
            joined[name] = sum(number * weight for number, weight in found) / total
        else:
            joined[name] = value
    return joined


def _join_by_key(found: Sequence[tuple[Mapping[str, float], float]], *, is_mean: bool) -> dict[str, float]:
    """Return the sum for each key, or the mean over updates by their weights."""
    keys = sorted({key for values, _ in found for key in values}, key=int)
    if not is_mean:
        return {key: sum(values.get(key, 0.0) for values, _ in found) for key in keys}
    total = sum(weight for _, weight in found)
    return {key: sum(values.get(key, 0.0) * weight for values, weight in found) / total for key in keys}


logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory", "out of memory")


@dataclass(frozen=True)
class StepResult:
    """What a step or an update reports."""

    metrics: dict[str, Any]
    is_finite: bool
    """Loss and gradient norm are finite, and the optimizer has stepped."""
    tokens: Sequence[TokenValues] = ()
    """Values of single tokens, by trajectory."""


@dataclass(frozen=True)
class FrozenLogprobs:
    """Which logprobs are attached to a step's forests: of the policy, of a reference, both or none."""

    start: bool = False
    """Attach those of the policy at the start of the step."""
    reference: Reference | None = None

    @torch.no_grad()
    def attach(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[TokenForest]:
        """Return the forests with the logprobs attached, float32[T] in the CPU's memory."""
        attached = list(forests)
        if self.start:
            computed = policy.logprobs(attached, options)
            attached = [
                replace(forest, start_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        if self.reference is not None:
            # The reference is another model: its own routers choose, as they would if it sampled.
            free = [replace(forest, routing=None) for forest in attached]
            computed = self.reference.logprobs(policy, free, options)
            attached = [
                replace(forest, reference_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        return attached


def _to_numpy(logprobs: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logprobs.detach().float().cpu().numpy()
    return found


@dataclass(frozen=True)
class Reference:
    """The model that a loss compares the policy with: its own, or the policy without its adapter."""

    model: ParallelModel | None = None
    """Split and sharded over the ranks like the policy."""
    adapter: Adapter | None = None
    """The policy's, if the reference is the policy without it."""

    def logprobs(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy of each trainable token of each forest."""
        if self.model is not None:
            return self.model.logprobs(forests, options)
        assert self.adapter is not None
        with self.adapter.disabled():
            return policy.logprobs(forests, options)


@dataclass(frozen=True, kw_only=True)
class PolicyTrainer:
    """Computes training steps on one rank. It knows neither the database nor the other ranks' data."""

    policy: Policy
    model: ParallelModel
    """Runs ``policy.model``."""
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    settings: LossSettings
    options: ForwardOptions
    max_tokens: int
    """Tokens of a micro-batch."""
    prefix_merging: PrefixMerging
    max_grad_norm: float
    frozen: FrozenLogprobs = field(default_factory=FrozenLogprobs)
    """Logprobs that stay as they are while the updates of a step change the policy."""
    epochs: int = 1
    """Passes over a step's data."""
    mini_batches: int = 1
    """Optimizer updates per pass."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    peak: DevicePeak = field(default_factory=lambda: DevicePeak(None))
    """What ``mfu`` compares a step's speed with."""
    recorded_tokens: int = 0
    """Tokens of a step whose log-ratio and entropy are reported, at most."""
    replay: RouterReplay | None = None
    """Of a mixture's routers, which take the experts that the engine chose."""
    critic: Critic | None = None
    """Gives the advantages, and is trained beside the policy."""

    def train(
        self,
        data: Sequence[DBRecordData],
        ages: Mapping[int, int] | None = None,
        images: Mapping[str, Image] = MappingProxyType({}),
    ) -> StepResult:
        """Make a step's optimizer updates on ``data``. It blocks: call it in a worker thread.

        ``ages`` maps each policy version to the age of its tokens in optimizer steps; without it all are 0.
        ``images`` has those of the data, by hash.
        Each update trains whole groups. Old and reference logprobs are those from before the first update.
        An update that is not finite ends the step before it; if it is the first, weights do not change. A
        step of which the loss chooses no data changes neither weights nor schedule. Trajectories that have
        no gradient (``has_gradient``) are not computed; they count in the loss's denominators, and an update
        of these alone decays moments and weights. With a critic all are computed: it learns from each.
        """
        data = self.settings.loss.choose(data)
        if not data:
            logger.warning("no data of the step are trained: %s chooses none", self.settings.loss_calculater)
            return StepResult({"loss": 0.0, "grad_norm": 0.0, "trajectories": 0, "trainable_tokens": 0}, True)
        with clean_step(self.model):
            watch = Stopwatch(self.policy.model.device)
            wholes = split_updates(data, self.mini_batches)
            parts = [[item for item in whole if self._is_computed(item)] for whole in wholes]
            idle = [[item for item in whole if not self._is_computed(item)] for whole in wholes]
            updates = [
                self.frozen.attach(self.model, self.pack(part, ages, images), self.options) for part in parts
            ]
            values: dict[str, float] = {}
            if self.critic is not None:
                with explain_out_of_memory(self.memory, self.max_tokens, ranks=self.model.mesh.layout.world):
                    updates, values = self.critic.attach(self.model, updates, parts)
            watch.lap("pack")
            made: list[dict[str, Any]] = []
            recorded = recorders(parts, self.recorded_tokens, self.policy.model.device)
            for number, forests in enumerate(updates * self.epochs):
                recorder = recorded[number] if number < len(recorded) else None
                part = number % len(parts)
                result = self._update(forests, recorder, parts[part], idle[part])
                if not result.is_finite and not made:
                    return result
                if not result.is_finite:
                    logger.error("update %d of a step is not finite: the step ends before it", len(made) + 1)
                    break
                made.append(result.metrics)
            # Leave it where it is while the critic warms up: the policy's schedule begins after that.
            if not self._is_frozen:
                self.scheduler.step()
            if self.critic is not None:
                self.critic.scheduler.step()
            tokens = [
                values for recorder in recorded[: len(made)] for values in recorder.collect(self.model.mesh)
            ]
        metrics = made[0]
        if len(parts) * self.epochs > 1:
            metrics = join_metrics(made, len(parts)) | {"updates": len(made)}
        metrics |= {"seconds_pack": watch.seconds["pack"], **values}
        if metrics["computed_fraction"] == 1:  # a step that computes all of its data says nothing of it
            del metrics["computed_fraction"]
        computed = call_tokens([item for part in parts for item in part])
        return StepResult(metrics | merging_metrics(metrics, computed), True, tokens)

    def pack(
        self,
        data: Sequence[DBRecordData],
        ages: Mapping[int, int] | None = None,
        images: Mapping[str, Image] = MappingProxyType({}),
    ) -> list[TokenForest]:
        """Plan the micro-batches of ``data`` over all ranks, and return this rank's.

        Raises ForestError for an image that is not in ``images``.
        """
        return pack_forests(
            self.policy, self.model, self.replay, data,
            max_tokens=self.max_tokens, merging=self.prefix_merging, ages=ages, images=images,
        )  # fmt: skip

    @property
    def _is_frozen(self) -> bool:
        """Whether the critic alone is trained."""
        return self.critic is not None and self.critic.is_warming_up

    def _is_computed(self, item: DBRecordData) -> bool:
        return self.critic is not None or has_gradient(item, self.settings)

    def add_gradients(
        self,
        forests: Sequence[TokenForest],
        data: Sequence[DBRecordData],
        watch: Stopwatch,
        **others: Any,
    ) -> dict[str, Any]:
        """Run ``forward_backward`` with the run's loss; ``others`` are more of its arguments."""
        return forward_backward(
            self.model, forests, self.settings, options=self.options, data=data, watch=watch,
            critic=self.critic, **others,
        )  # fmt: skip

    def _update(
        self,
        forests: Sequence[TokenForest],
        recorder: TokenRecorder | None,
        data: Sequence[DBRecordData] = (),
        left_out: Sequence[DBRecordData] = (),
    ) -> StepResult:
        """Make one optimizer update on this rank's ``forests`` of ``data``; the schedule does not move."""
        watch = Stopwatch(self.policy.model.device)
        # Set it for recomputation: transformers recomputes layers in training mode alone. Dropout is 0.
        self.model.train()
        with explain_out_of_memory(self.memory, self.max_tokens, ranks=self.model.mesh.layout.world):
            metrics = self.add_gradients(forests, data, watch, recorder=recorder, left_out=left_out)
        watch.lap("forward")
        if any(item.images for item in left_out):  # their tower's gradient is 0 too, and its moments decay
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        is_frozen, critic = self._is_frozen, self.critic
        grad_norm = 0.0 if is_frozen else self.model.clip_gradients(self.max_grad_norm)
        learning_rate = 0.0 if is_frozen else float(self.optimizer.param_groups[0]["lr"])
        if critic is not None:
            metrics["critic_grad_norm"] = critic.clip_gradients(self.model.mesh)
        # Judge by numbers that are equal on every rank: all of them step, or none does.
        judged = {**metrics, "grad_norm": grad_norm}
        is_finite = all(math.isfinite(judged[name]) for name in JUDGED if name in judged)
        for optimizer, is_idle in (
            (self.optimizer, is_frozen), *(() if critic is None else ((critic.optimizer, False),)),
        ):  # fmt: skip
            if is_finite and not is_idle:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer")
        model = self.policy.model
        speed = speed_metrics(
            forests, watch.seconds, ModelShape.of(model.config), self.peak, backward=Backward.of(model),
            step_tokens=metrics["tokens"], ranks=self.model.mesh.layout.ranks_per_data,
        )  # fmt: skip
        if self.replay is not None:
            speed |= routing_metrics(forests, self.replay.take_differing())
        return StepResult(metrics | {"grad_norm": grad_norm, "lr": learning_rate} | speed, is_finite)


@contextmanager
def explain_out_of_memory(config: MemoryConfig, max_tokens: int, *, ranks: int = 1) -> Iterator[None]:
    """Raise a TrainingError that names the flags that would help, if the block runs out of memory."""
    try:
        yield
    # Catch RuntimeError: of a CPU's memory torch raises no OutOfMemoryError.
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        raise TrainingError(
            f"out of memory with micro-batches of --max_tokens {max_tokens}: {first_line(error)}",
            hint="; or ".join(_remedies(config, max_tokens, ranks)),
        ) from error


def _remedies(config: MemoryConfig, max_tokens: int, ranks: int) -> Sequence[str]:
    remedies, mode = [], config.activation_checkpointing
    if mode == "none":
        remedies.append("set --activation_checkpointing selective, or full, which keeps less")
    elif mode == "selective":
        remedies.append("set --activation_checkpointing full")
    elif not config.activation_offload:
        remedies.append("set --activation_offload true")
    if config.gradient_reduction != "every" and ranks > 1:
        remedies.append("set --gradient_reduction every")
    remedies.append(f"lower --max_tokens (to {max_tokens // 2}, but not below the longest trajectory)")
    if not config.optimizer_offload:
        remedies.append("set --optimizer_offload true")
    remedies.append("shard the model over more devices")
    return remedies


def has_gradient(item: DBRecordData, settings: LossSettings) -> bool:
    """Return whether ``item`` can change the weights: a loss may need an advantage that is not 0."""
    return not settings.needs_advantage or any(span.advantage for span in item.spans)


def split_updates(data: Sequence[DBRecordData], parts: int) -> list[list[DBRecordData]]:
    """Split ``data`` into at most ``parts`` mini-batches of whole groups with balanced trainable tokens.

    A group stays together, so that prefixes that its trajectories share are computed once. No mini-batch is
    empty. The same data give the same mini-batches.
    """
    groups: dict[str, list[DBRecordData]] = {}
    for item in data:
        groups.setdefault(item.task, []).append(item)
    sizes = {task: sum(item.trainable_tokens for item in items) for task, items in groups.items()}
    order = {task: number for number, task in enumerate(groups)}
    chosen: list[list[str]] = [[] for _ in range(min(parts, len(groups)))]
    for task in sorted(groups, key=lambda task: (-sizes[task], order[task])):
        min(chosen, key=lambda tasks: sum(sizes[name] for name in tasks)).append(task)
    return [[item for task in sorted(tasks, key=order.__getitem__) for item in groups[task]]
            for tasks in chosen]  # fmt: skip


def forward_backward(
    model: ParallelModel,
    forests: Sequence[TokenForest],
    settings: LossSettings,
    *,
    options: ForwardOptions | None = None,
    watch: Stopwatch | None = None,
    recorder: TokenRecorder | None = None,
    data: Sequence[DBRecordData] = (),
    left_out: Sequence[DBRecordData] = (),
    critic: Critic | None = None,
) -> dict[str, Any]:
    """Add the gradients of one update's loss to ``model``, one micro-batch at a time, and report the update.

    ``forests`` are this rank's micro-batches. Loss and gradients are those of all ranks' forests in one
    batch, however trajectories are merged, split and distributed. ``watch`` gets the seconds of ``forward``
    and ``backward``, ``recorder`` the values of single tokens. ``data`` are the update's, of all ranks: a
    loss that compares trajectories reads them. ``left_out`` are in no forest but in the denominators. The
    ``critic``, if there is one, gets gradients too, alone while it warms up.

    Returns ``loss``, ``tokens``, ``trainable_tokens`` and ``trajectories`` of all ranks, the share of the
    trainable tokens that are in a forest as ``computed_fraction``, and everything in
    ``TokenMetrics.report`` and ``ValueLoss.report``. Raises ForestError if no token is trainable, ConfigError
    for a loss or correction that does not exist, ModelError for a model that is not exact on the forests.
    """
    options = replace(
        options or ForwardOptions(), entropy_gradient=settings.entropy_coef > 0,
        divergence=bool(settings.distill_coef),
    )  # fmt: skip
    watch = watch or Stopwatch(model.model.device)
    loss = StepLoss.start(model, forests, settings, options, recorder, data, left_out)
    value_loss, is_frozen = None, False
    if critic is not None:
        value_loss = ValueLoss.start(forests, model.mesh, model.model.device, critic.config.value_clip)
        options, is_frozen = critic.options(options), critic.is_warming_up
    with torch.set_grad_enabled(not is_frozen):
        # A pipeline's stages before the last have no logprobs: they take the gradient of the one after them.
        for forest, outputs in model.micro_batches(forests, options, watch):
            parts = []
            if value_loss is not None and options.value_head is not None:
                with torch.enable_grad():
                    parts.append(value_loss.add(forest, outputs[-1]))
                outputs = outputs[:-1]
            part = loss.add(forest, *outputs)
            watch.lap("forward")
            if parts or not is_frozen:
                torch.autograd.backward(parts if is_frozen else [part, *parts])
            watch.lap("backward")
    if is_frozen:
        model.release_gathered()
    if critic is not None and value_loss is not None:
        critic.train_own_model(forests, value_loss, watch)
    report = model.mesh.sum_reports(loss.report())
    return {
        "loss": report.loss,
        "tokens": loss.tokens,
        "trainable_tokens": loss.whole.tokens,
        "trajectories": round(loss.whole.trajectories),
        "computed_fraction": report.tokens / loss.whole.tokens,
        **report.report(),
        **({} if value_loss is None else value_loss.report(model.mesh)),
    }
