"""Choose the groups of a step; drop, mask or decay their old tokens; whiten advantages. Ages count steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from agentrl.config.load import Configs
from agentrl.config.schema import LossConfig, SamplingConfig, TrainConfig
from agentrl.documents.model_call import SamplingMask, pack_floats, unpack_floats
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData, TrainableSpan
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.steps import ReadyMember

StalenessPolicy = Literal["drop", "decay", "mask"]
SortKey = tuple[int, ...]
"""Sort key of a Task: the order in which groups begin (number, epoch, order)."""
EPSILON = 1e-8
"""Added to the standard deviation."""
_NOISE = 1e-9
"""A standard deviation below this share of the largest advantage is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """``--staleness_policy``: how tokens are treated that are more than ``max_staleness`` steps old.

    The age of a token is the number of optimizer steps between the weights that sampled it and those that
    train it. ``drop``: a group with an older token is stale as a whole. ``mask``: older tokens are not
    trained; data with no other tokens are stale. ``decay``: nothing is stale; the advantage of an older token
    is multiplied by exp(−``decay``) for every step beyond ``max_staleness``. ``--out_of_date_decay`` narrows
    a token's bounds by the same factor for every step of its age.
    """

    max_staleness: int
    policy: StalenessPolicy = "drop"
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.policy == "decay" and self.decay is None:
            raise ConfigError(
                "--staleness_policy decay needs the rate at which old tokens lose weight",
                hint="give it, e.g. --out_of_date_decay 0.5; or choose drop or mask",
            )

    @property
    def stale_spans(self) -> Literal["any", "all"] | None:
        """Return whether data are stale if any span is too old or if all spans are; None: never."""
        stale: dict[StalenessPolicy, Literal["any", "all"]] = {"drop": "any", "mask": "all"}
        return stale.get(self.policy)

    def oldest(self, step: int) -> int:
        """Return the earliest step whose tokens are fresh for weights after ``step`` steps."""
        return max(0, step - self.max_staleness)

    def weigh(self, data: DBRecordData, ages: Mapping[int, int]) -> DBRecordData:
        """Return ``data`` with old tokens masked or decayed; the same object if no token is old."""
        beyond = [max(0, ages[span.version] - self.max_staleness) for span in data.spans]
        if self.policy == "drop" or not any(beyond):
            return data
        if self.policy == "mask":
            return _masked(data, beyond)
        rate = self.decay or 0.0
        spans = (
            replace(span, advantage=span.advantage * math.exp(-rate * steps))
            for span, steps in zip(data.spans, beyond, strict=True)
        )
        return replace(data, spans=tuple(spans))


def freshness_of(configs: Configs) -> Freshness:
    """Return how a trainer with these flags treats old tokens."""
    sampling = configs[SamplingConfig]
    return Freshness(
        max_staleness=0 if sampling.sync_sampling else sampling.max_staleness,
        policy=configs[TrainConfig].staleness_policy,
        decay=configs[LossConfig].out_of_date_decay,
    )


def _masked(data: DBRecordData, beyond: Sequence[int]) -> DBRecordData:
    """Turn spans that are too old into context: no loss and no denominator counts them."""
    ends = np.cumsum([span.end - span.start for span in data.spans])[:-1]
    logprobs = np.split(unpack_floats(data.behavior_logprobs), ends)
    mask = SamplingMask.unpack(data.sampling_mask, data.trainable_tokens)
    is_kept = np.concatenate(
        [np.full(len(part), steps == 0) for part, steps in zip(logprobs, beyond, strict=True)]
    )
    columns = TokenColumns.unpack(data.columns, data.trainable_tokens)
    spans = zip(data.spans, logprobs, beyond, strict=True)
    kept = [(span, part) for span, part, steps in spans if steps == 0]
    return replace(
        data,
        spans=tuple(span for span, _ in kept),
        trainable_tokens=sum(span.end - span.start for span, _ in kept),
        behavior_logprobs=pack_floats(np.concatenate([part for _, part in kept]) if kept else []),
        sampling_mask=mask.select(is_kept).pack(),
        columns=b"" if columns is None else columns.select(is_kept).pack(),
    )


def weigh(
    data: Sequence[DBRecordData], ages: Mapping[int, int], freshness: Freshness, *, whitens: bool
) -> tuple[DBRecordData, ...]:
    """Return a step's data with old tokens masked or decayed, and whitened advantages if it ``whitens``.

    Masking comes before whitening: no mean counts a masked token. Decay comes after it: otherwise whitening
    would turn a decayed advantage into −mean / std.
    """
    if whitens and freshness.policy == "decay":
        data = whiten(data)
    weighed = tuple(freshness.weigh(item, ages) for item in data)
    return whiten(weighed) if whitens and freshness.policy != "decay" else weighed


def choose_groups(
    members: Sequence[ReadyMember],
    count: int,
    order: Mapping[str, SortKey] | None = None,
    avoid: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return at most ``count`` whole groups, {task: [data id, …]}, in the order in which they began.

    A slow group comes before groups that began later, even if they were ready sooner. Trained groups
    (``max_trained_count``) come after untrained ones. Among equals, groups without a key in ``order`` come
    last, in the order of ``members``. Groups with an id in ``avoid`` come after all others. The ids of a
    group are sorted, so the choice is deterministic.
    """
    groups: dict[str, list[str]] = {}
    trained: dict[str, int] = {}
    for member in members:
        groups.setdefault(member.task, []).append(member.id)
        trained[member.task] = max(member.trained_count, trained.get(member.task, 0))
    known = order or {}
    last = (math.inf,)

    def rank(task: str) -> tuple[bool, int, tuple[float, ...]]:
        return any(id in avoid for id in groups[task]), trained[task], known.get(task, last)

    return {task: sorted(groups[task]) for task in sorted(groups, key=rank)[:count]}


class VersionSteps:
    """Map each policy version to the step at which it was published, also if it was withdrawn later.

    Ages count from that step. When a trainer resumes, version numbers jump and steps go back; ages do
    neither. Each version is read once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, int] = {}
        """{version: step}, ascending."""

    async def ages(self, versions: Iterable[int], step: int) -> dict[int, int]:
        """Return {version: age} for weights after ``step`` steps, without versions never published."""
        wanted = set(versions)
        if not wanted <= self._steps.keys():
            await self._read()
        # Stop at 0: after a resume engines may still sample with a version of a later step.
        return {version: max(0, step - self._steps[version]) for version in wanted & self._steps.keys()}

    async def published_before(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return inclusive ranges of the versions published before ``step``, ascending."""
        await self._read()
        ranges: list[tuple[int, int]] = []
        is_open = False
        for version, published in self._steps.items():
            # Close a range at each fresh version: after a resume, higher numbers may be of earlier steps.
            is_old = published < step
            if is_old:
                ranges.append((ranges.pop()[0], version) if is_open else (version, version))
            is_open = is_old
        return tuple(ranges)

    async def _read(self) -> None:
        # Read only what is above the newest: what was read never changes, and a run may have thousands.
        newest = next(reversed(self._steps), -1)
        self._steps |= await self._store.policy_versions.steps_above(newest)


def whitened(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return A' = (A − mean) / (std + 1e-8), in float64; ``advantages[i]`` stands for ``tokens[i]`` tokens.

    Mean and standard deviation are over all n tokens: REINFORCE++ (arXiv 2501.03262). The variance is the
    population's, as in OpenRLHF; verl divides by n − 1 instead of n. The sums are exact and do not depend on
    the order. Equal advantages become 0; without a token they stay as they are.
    """
    total = sum(tokens)
    if total == 0:
        return list(advantages)
    mean = math.fsum(value * count for value, count in zip(advantages, tokens, strict=True)) / total
    centered = [value - mean for value in advantages]
    squares = (value**2 * count for value, count in zip(centered, tokens, strict=True))
    deviation = math.sqrt(math.fsum(squares) / total)
    if deviation <= _NOISE * max(map(abs, advantages)):
        return [0.0] * len(centered)
    return [value / (deviation + EPSILON) for value in centered]


def whiten(data: Sequence[DBRecordData]) -> tuple[DBRecordData, ...]:
    """Return ``data`` with whitened advantages; the weight of a span is its number of tokens.

    Mean and deviation are of the advantages that the calls would have if none were faulty. A faulty call
    then gets its whitened advantage or 0, whichever is lower. The order of ``data`` changes no value.
    """
    spans = [(item, span) for item in data for span in item.spans]
    earned = [item.earned_advantage(span.call) for item, span in spans]
    advantages = iter(whitened(earned, [span.end - span.start for _, span in spans]))

    def of_span(item: DBRecordData, span: TrainableSpan) -> TrainableSpan:
        advantage = next(advantages)
        # Cap after whitening, which made +1.67 of a malformed call's 0.
        return replace(span, advantage=min(advantage, 0.0) if span.call in item.faulty_calls else advantage)

    return tuple(replace(item, spans=tuple(of_span(item, span) for span in item.spans)) for item in data)
