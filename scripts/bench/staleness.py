"""Measure what each --staleness_policy drops when trajectories take log-normal times, and its KL.

    OMP_NUM_THREADS=1 python scripts/bench/staleness.py [--quick] [--groups N] [--seeds N] [--processes N]
    OMP_NUM_THREADS=1 python scripts/bench/staleness.py --compare 3

Admission, claims, finalization, the choice of groups and their freshness are a run's own code over a MongoDB
of its own; the time is virtual. A trajectory takes a log-normal time (median 1) and generates a turn of four
tokens every quarter, with the newest weights at that moment. The members of a group begin together. A step
takes --step_time. All cases draw the same times.

Then the two-layer model of off_policy.py trains the same steps: each turn is sampled from the weights that
sampled it in the virtual run. That measures KL(μ‖πθ), the clipped tokens and the reward; --seeds 0 leaves it
out. The last groups, beside which nothing else is sampled, are trained and not counted. Prints a Markdown
table; exits with 1 if the default drops 5 % of the tokens, or has a length_bias below 0.95.

``--compare N`` trains the steps of keep, drop and decay at --max_staleness 1 with N seeds, and prints the
rewards after the same number of steps and after the same time, for each of ``SCORINGS``.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import multiprocessing
import random
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from commands import database
from harness import bench_parser
from off_policy import (
    ANSWER,
    HELD_OUT,
    build_model,
    build_trainer,
    draw_prompts,
    sample,
    score,
)
from store_fixtures import SPLIT, make_tasks, run_database
from torch import Tensor

from agentrl.config.schema import GroupConfig, SamplingConfig, TrainConfig
from agentrl.data.stream import DataStream, Freshness, StalenessPolicy, StepData, StreamSettings, VersionSteps
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    VersionSpan,
    append_span,
    pack_floats,
    pack_ids,
)
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.documents.task import Claim
from agentrl.documents.training import DBRecordData, Node, TrainableSpan, TrainStep
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.setup import AdmissionLimit
from agentrl.scoring.groups import estimate
from agentrl.store.client import Store
from agentrl.store.steps import StaleVersions

GROUPS_PER_STEP = 4
TURNS_PER_TIME = 4
SLOTS_AT_ONCE = 32
PROMPT = 2
ROW = 768
"""Tokens of a micro-batch: attention is dense on a CPU, so that short rows are fast."""
LEASE_SECONDS = 3600.0
DECAY = 0.5
POLICIES: Sequence[StalenessPolicy] = ("drop", "mask", "decay", "keep")
STALENESS = (1, 4)
MOST_DROPPED, LEAST_BIAS = 0.05, 0.95
"""What the default of ``--staleness_policy`` must keep below, and reach."""
SYNCHRONOUS = Freshness(max_staleness=0, policy="drop")
"""The case to compare with: no token is old."""
EVALUATIONS = 8
"""Evaluations in a reward: after each of the last steps."""
Scoring = Literal["turn", "trajectory", "tokens"]
SCORINGS: Mapping[tuple[Scoring, bool], str] = {
    ("turn", False): "each turn by itself",
    ("trajectory", False): "a trajectory by the mean of its turns, each trajectory weighs the same",
    ("tokens", False): "the same, each token weighs the same",
    ("tokens", True): "the same, every token of age 0",
}
"""What ``--compare`` varies: what is scored, and whether the newest weights have sampled all."""
COMPARED: Sequence[StalenessPolicy] = ("keep", "drop", "decay")


@dataclass(frozen=True)
class Step:
    """What one step trained: {record: policy version of each turn} of whole groups, and the ages."""

    groups: Mapping[str, Mapping[str, Sequence[int]]]
    records: frozenset[str]
    ages: Mapping[int, int]


@dataclass
class Trace:
    """What one virtual run sampled and trained."""

    freshness: Freshness
    groups: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """{task: {record: policy version of each turn}}, in the order in which groups began."""
    steps: list[Step] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    """Trained tokens of each record."""
    weight: dict[str, float] = field(default_factory=dict)
    """The same; each token counts as the factor of its advantage."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained tokens of each age."""
    began: dict[str, float] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)
    """When each step was committed."""

    @property
    def generated(self) -> dict[str, int]:
        """Generated tokens of each record of the groups that count."""
        last = (self.freshness.max_staleness + 1) * GROUPS_PER_STEP
        counted = list(self.groups.values())[:-last]
        return {record: ANSWER * len(turns) for group in counted for record, turns in group.items()}

    @property
    def dropped(self) -> float:
        """The share of generated tokens that no step trained."""
        generated = self.generated
        return 1 - sum(self.kept[record] for record in generated) / sum(generated.values())

    @property
    def weight_lost(self) -> float:
        """The share of generated tokens that no step trained, a decayed token being a part of one."""
        generated = self.generated
        return 1 - sum(self.weight.get(record, 0.0) for record in generated) / sum(generated.values())

    @property
    def length_bias(self) -> float:
        """The metric of that name, with the whole run as its window."""
        generated = self.generated
        trained = [tokens for record, tokens in generated.items() if self.kept[record]]
        return fmean(trained) / fmean(generated.values())

    @property
    def mean_age(self) -> float:
        """The mean age of a trained token."""
        return sum(age * tokens for age, tokens in self.ages.items()) / self.ages.total()

    def age_above(self, share: float) -> int:
        """Return the age that ``share`` of the trained tokens do not exceed."""
        below, limit = 0, share * self.ages.total()
        for age, tokens in sorted(self.ages.items()):
            below += tokens
            if below >= limit:
                return age
        raise ValueError(f"no token is trained, or {share} is above 1")

    @property
    def speed(self) -> float:
        """Steps per unit of time, while groups began."""
        last = max(self.began.values())
        return bisect_right(self.ended, last) / last


class VirtualRun:
    """A run over a real store, whose clock jumps to the next end of a group or of a step."""

    def __init__(self, store: Store, freshness: Freshness, options: Any) -> None:
        self._store, self._options = store, options
        self.trace = Trace(freshness)
        self._finalizer = GroupFinalizer(store, GroupConfig(), split=SPLIT, seed=0)
        self._admission = AdmissionLimit(
            SamplingConfig(max_staleness=freshness.max_staleness),
            TrainConfig(groups_per_step=GROUPS_PER_STEP, staleness_policy=freshness.policy),
        )
        settings = StreamSettings(
            groups_per_step=GROUPS_PER_STEP, num_epochs=1, freshness=freshness, wait_seconds=60.0
        )
        self._stream, self._versions = DataStream(store, settings), VersionSteps(store)
        self._claims: dict[str, list[Claim]] = {}
        self._running: list[tuple[float, str]] = []
        """Heap of groups: when the last member ends, and the task."""
        self._published = [0.0]
        """When each version was published."""
        self._now = 0.0

    async def run(self) -> Trace:
        """Sample and train every group."""
        await self._store.tasks.load(make_tasks(self._options.groups))
        await self._publish(None)
        planned: TrainStep | None = None
        step_ends = 0.0
        while True:
            await self._claim()
            if planned is None:
                batch = await self._take()
                if batch is not None:
                    planned = await self._plan(batch)
                    step_ends = self._now + self._options.step_time
                elif not self._running:
                    return self.trace
            if planned is not None and (not self._running or step_ends <= self._running[0][0]):
                self._now = step_ends
                await self._store.steps.commit(planned.id, {}, planned.data)
                await self._publish(planned.id)
                planned = None
                # Mark now, as a trainer does when it begins to wait: other groups may then begin.
                if (old := await self._too_old()) is not None:
                    await self._store.training.mark_stale(SPLIT, old)
            else:
                self._now, task = heapq.heappop(self._running)
                await asyncio.gather(*(self._finish(claim) for claim in self._claims.pop(task)))
                await self._finalizer.run_completed()

    async def _claim(self) -> None:
        """Begin every group that may begin now."""
        limit = await self._admission.groups_allowed(self._store, ())
        claims = self._store.claims
        found: Sequence[Claim | None] = [None]
        while any(found := await asyncio.gather(*(
            claims.claim(
                split=SPLIT, owner=f"sampler-{slot}", lease_seconds=LEASE_SECONDS, max_groups_open=limit
            )
            for slot in range(SLOTS_AT_ONCE)
        ))):  # fmt: skip
            for claim in found:
                if claim is not None:
                    self._claims.setdefault(claim.task.id, []).append(claim)
        for task, members in self._claims.items():
            if task not in self.trace.began:
                self.trace.began[task] = self._now
                heapq.heappush(self._running, (self._now + max(map(self._duration, members)), task))
                self.trace.groups[task] = {}

    def _duration(self, claim: Claim) -> float:
        dice = random.Random(f"{self._options.seed}/{claim.task.order}/{claim.traj_id}")
        return dice.lognormvariate(0.0, self._options.sigma)

    async def _finish(self, claim: Claim) -> None:
        """Store and score a trajectory; each turn has the version that was the newest when it began."""
        began, took = self.trace.began[claim.task.id], self._duration(claim)
        count = max(1, round(took * TURNS_PER_TIME))
        times = (began + took * turn / count for turn in range(count))
        turns = [bisect_right(self._published, time) - 1 for time in times]
        self.trace.groups[claim.task.id][claim.record_id] = turns
        versions: list[VersionSpan] = []
        for turn, version in enumerate(turns):
            append_span(versions, version, ANSWER * turn, ANSWER * (turn + 1))
        tokens = ANSWER * count
        call = DispatchedSamplingTask(
            id=f"{claim.record_id}/0", record=claim.record_id, index=0, parent=None,
            status=CallStatus.COMPLETED, messages=({"role": "user", "content": "?"},),
            response={"content": "!", "tool_calls": []}, finish_reason="stop", versions=tuple(versions),
            prompt_tokens=1, generated_tokens=tokens, engine="virtual", generate_seconds=took,
            context_ids=pack_ids([0]), output_ids=pack_ids([1] * tokens),
            logprobs=pack_floats([-1.0] * tokens),
        )  # fmt: skip
        store = self._store
        await store.records.create(claim)
        await store.records.advance(claim, RecordStatus.RUNNING)
        await store.model_calls.add(claim, call)
        await store.records.advance(
            claim, RecordStatus.COMPLETED, final_answer="!", stop_reason=StopReason.ANSWERED
        )
        await store.records.advance(claim, RecordStatus.SCORING)
        # Score every group alike, half of it right: then only its age decides whether it is trained.
        await store.attempts.score(claim, float(claim.traj_id % 2), {"scorer": "exact"})

    async def _take(self) -> StepData | None:
        """Return the data of the next step; None if it has to wait, or at the end."""
        step = len(self.trace.steps) + 1
        if self._running:
            ready = await self._store.training.ready_members(SPLIT, step=step, old=await self._too_old())
            if len({member.task for member in ready}) < GROUPS_PER_STEP:
                return None
        return await self._stream.take(step)

    async def _too_old(self) -> StaleVersions | None:
        """Return the versions whose data are stale in the next step, as the stream does."""
        freshness = self.trace.freshness
        if freshness.stale_spans is None:
            return None
        ranges = await self._versions.published_before(freshness.oldest(len(self.trace.steps)))
        return StaleVersions(ranges, freshness.stale_spans)

    async def _plan(self, batch: StepData) -> TrainStep:
        trace, number = self.trace, len(self.trace.steps) + 1
        for item in batch.data:
            trace.kept[item.record] += item.trainable_tokens
            factors = ((span.end - span.start) * span.advantage / item.advantage for span in item.spans)
            trace.weight[item.record] = sum(factors)
            for span in item.spans:
                trace.ages[batch.ages[span.version]] += span.end - span.start
        groups = {task: trace.groups[task] for task in batch.groups}
        trace.steps.append(Step(groups, frozenset(item.record for item in batch.data), batch.ages))
        data = tuple(item.id for item in batch.data)
        step = TrainStep(id=f"{number}/1", step=number, policy_version=number - 1, data=data, owner="bench")
        await self._store.steps.plan(step)
        return step

    async def _publish(self, train_step: str | None) -> None:
        number = len(self.trace.steps) if train_step else 0
        if train_step:
            self._published.append(self._now)
            self.trace.ended.append(self._now)
        await self._store.policy_versions.publish(
            PolicyVersion(id=number, step=number, location=str(number), files=(), train_step=train_step)
        )


@dataclass(frozen=True)
class Learned:
    """What training on a trace measured: means over the steps, and the reward at the end."""

    kl: float
    clipped: float
    effective: float
    rewards: Sequence[float]
    """After each step."""

    def reward(self, steps: int | None = None) -> float:
        """Return the mean reward of the last evaluations, at the end or after ``steps``."""
        return fmean(self.rewards[:steps][-EVALUATIONS:])


def learn(trace: Trace, seed: int, scoring: Scoring = "turn", is_fresh: bool = False) -> Learned:
    """Train the steps of ``trace``; each turn is sampled from the weights that sampled it there.

    If ``is_fresh``, the newest weights sample the turns of the trajectories that were trained there.
    """
    model = build_model(seed)
    trainer, sampler = build_trainer(model, "clip", max_tokens=ROW), copy.deepcopy(model)
    generator, held_out = (torch.Generator().manual_seed(2 * seed + offset) for offset in (0, 1))
    weights = [copy.deepcopy(model.state_dict())]
    found, rewards = [], []
    for number, step in enumerate(trace.steps):
        ages = {number: 0} if is_fresh else dict(step.ages)
        data = sample_step(step, weights, sampler, generator, scoring, is_fresh)
        weighed = (trace.freshness.weigh(item, ages) for item in data if item.record in step.records)
        result = trainer.train([item for item in weighed if item.spans], ages)
        found.append(result.metrics)
        weights.append(copy.deepcopy(model.state_dict()))
        prompts = draw_prompts(HELD_OUT, held_out)
        sampler.load_state_dict(model.state_dict())
        rewards.append(float(score(prompts, sample(sampler, prompts, held_out)[0]).mean()))
    kl, clipped, effective = (
        fmean(metrics[name] for metrics in found)
        for name in ("kl_k3", "clipped_fraction", "effective_sample_size")
    )
    return Learned(kl, clipped, effective, rewards)


def sample_step(
    step: Step,
    weights: Sequence[Mapping[str, Any]],
    sampler: Any,
    generator: torch.Generator,
    scoring: Scoring,
    is_fresh: bool,
) -> list[DBRecordData]:
    """Return the data of every turn in the groups of ``step``, compared with all turns or trajectories."""
    newest = len(weights) - 1
    digits = draw_prompts(len(step.groups), generator)
    turns = [
        (record, newest if is_fresh else version, prompt)
        for prompt, group in zip(digits, step.groups.values(), strict=True)
        for record, versions in group.items()
        for version in versions
    ]
    ids = torch.zeros(len(turns), PROMPT + ANSWER, dtype=torch.long)
    logprobs = torch.zeros(len(turns), ANSWER)
    scores = torch.zeros(len(turns))
    for version in sorted({version for _, version, _ in turns}):
        places = [place for place, turn in enumerate(turns) if turn[1] == version]
        prompts = torch.stack([turns[place][2] for place in places])
        sampler.load_state_dict(weights[version])
        answers, logprobs[places] = sample(sampler, prompts, generator)
        ids[places] = torch.cat([prompts, answers], 1)
        scores[places] = score(prompts, answers)
    data, first = [], 0
    usual = len(turns) / sum(map(len, step.groups.values()))
    for task, group in step.groups.items():
        names = [f"{record}/{turn}" for record, versions in group.items() for turn in range(len(versions))]
        own = range(first, first + len(names))
        lengths = [len(versions) for versions in group.values()]
        earned = scores[own.start : own.stop]
        if scoring == "turn":
            advantages = estimate("leave_one_out", earned.tolist())
        else:
            # The mean over a long trajectory hardly differs from that of another: a weak signal.
            means = [fmean(part.tolist()) for part in earned.split(lengths)]
            advantages = [
                advantage * (usual / length if scoring == "trajectory" else 1.0)
                for advantage, length in zip(estimate("leave_one_out", means), lengths, strict=True)
                for _ in range(length)
            ]
        for name, place, advantage in zip(names, own, advantages, strict=True):
            data.append(_turn_data(task, name, turns[place][1], advantage, ids[place], logprobs[place]))
        first += len(names)
    return data


def _turn_data(
    task: str, id: str, version: int, advantage: float, ids: Tensor, logprobs: Tensor
) -> DBRecordData:
    # Make a datum of each turn, not of each trajectory: long ones would need long rows, which are slow here.
    length = PROMPT + ANSWER
    span = TrainableSpan(
        start=PROMPT, end=length, call=0, version=version, advantage=advantage, temperature=1.0
    )
    return DBRecordData(
        id=id, record=id.rpartition("/")[0], task=task, split=SPLIT, score=0.0, advantage=advantage,
        min_version=version, max_version=version, tokens=length, trainable_tokens=ANSWER, turns=1,
        nodes=(Node(start=0, end=length),), spans=(span,), input_ids=pack_ids(ids.tolist()),
        behavior_logprobs=pack_floats(logprobs.tolist()),
    )  # fmt: skip


def learn_one(arguments: tuple[Any, ...]) -> Learned:
    """Train in a process of its own, on one thread."""
    torch.set_num_threads(1)
    return learn(*arguments)


async def trace_all(uri: str, cases: Sequence[Freshness], options: Any) -> list[Trace]:
    """Return the virtual run of each case, one after another."""
    traces = []
    for freshness in cases:
        async with run_database(uri, "staleness") as store:
            traces.append(await VirtualRun(store, freshness, options).run())
        print(f"sampled and trained: {name_of(freshness)}", file=sys.stderr, flush=True)
    return traces


def name_of(freshness: Freshness) -> str:
    """Return the flags of a case."""
    rate = f" {freshness.decay:g}" if freshness.policy == "decay" else ""
    return f"{freshness.max_staleness}, {freshness.policy}{rate}"


def print_table(traces: Sequence[Trace], learned: Mapping[int, Sequence[Learned]]) -> None:
    """Print a Markdown table with a row for each case, and means over the seeds of what was learned."""
    columns = ["max_staleness, policy", "tokens dropped", "weight lost", "`length_bias`", "mean age",
               "age of 99 %", "steps in the same time"]  # fmt: skip
    columns += ["KL(μ‖πθ)", "clipped", "effective sample size", "reward"] if learned else []
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for place, trace in enumerate(traces):
        usual = next(
            other for other in traces if other.freshness.policy == "drop" and other.freshness.max_staleness
        )
        cells = [
            name_of(trace.freshness), f"{trace.dropped:.1%}", f"{trace.weight_lost:.1%}",
            f"{trace.length_bias:.2f}", f"{trace.mean_age:.2f}", f"{trace.age_above(0.99)}",
            f"{trace.speed / usual.speed:.2f}",
        ]  # fmt: skip
        if learned:
            runs = learned[place]
            cells += [
                f"{fmean(run.kl for run in runs):.4f}", f"{fmean(run.clipped for run in runs):.3f}",
                f"{fmean(run.effective for run in runs):.3f}", f"{fmean(run.reward() for run in runs):.2f}",
            ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def compare(uri: str, options: Any) -> None:
    """Print the rewards after the same number of steps, and after the same time, of each way to score."""
    cases = [
        Freshness(max_staleness=1, policy=policy, decay=DECAY if policy == "decay" else None)
        for policy in COMPARED
    ]
    traces = asyncio.run(trace_all(uri, cases, options))
    jobs = [(t, seed, *how) for how in SCORINGS for t in traces for seed in range(options.compare)]
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        runs = iter(pool.map(learn_one, jobs, chunksize=1))
    steps = min(len(trace.steps) for trace in traces)
    time = min(max(trace.began.values()) for trace in traces)
    columns = ("scored", "policy", f"after {steps} steps", "mean", f"steps by {time:.0f}", "then", "mean")
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for text in SCORINGS.values():
        for trace in traces:
            own = [next(runs) for _ in range(options.compare)]
            by_then = bisect_right(trace.ended, time)
            cells = []
            for rewards in ([run.reward(steps) for run in own], [run.reward(by_then) for run in own]):
                cells += [", ".join(f"{reward:.2f}" for reward in rewards), f"{fmean(rewards):.2f}"]
            cells.insert(2, str(by_then))
            print("| " + " | ".join([text, name_of(trace.freshness), *cells]) + " |")


def main() -> int:
    """Run all cases, train on their steps, and print the table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--groups", type=int, default=240, help="groups of a run (default: 240)")
    parser.add_argument("--sigma", type=float, default=1.5, help="of the log-normal times (default: 1.5)")
    parser.add_argument(
        "--step_time", type=float, default=2.0, help="time of a step, in median trajectories (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the times (default: 0)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each case; 0: none (default: 2)")
    parser.add_argument("--processes", type=int, default=1, help="concurrent trainings (default: 1)")
    parser.add_argument(
        "--compare", type=int, metavar="N", help="compare policies by steps and by time, with N seeds"
    )
    options = parser.parse_args()
    if options.compare:
        with database() as (_, uri):
            compare(uri, options)
        return 0
    cases = [SYNCHRONOUS, *(
        Freshness(max_staleness=staleness, policy=policy, decay=DECAY if policy == "decay" else None)
        for staleness in STALENESS for policy in POLICIES
    )]  # fmt: skip
    if options.quick:
        options.groups, options.seeds, cases = 24, 1, cases[1:3]
    with database() as (_, uri):
        traces = asyncio.run(trace_all(uri, cases, options))
    jobs = [(trace, seed) for trace in traces for seed in range(options.seeds)]
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        runs = pool.map(learn_one, jobs, chunksize=1)
    seeds = options.seeds
    learned = (
        {place: runs[place * seeds : (place + 1) * seeds] for place in range(len(traces))} if seeds else {}
    )
    print_table(traces, learned)
    usual = [trace for trace in traces if trace.freshness.policy == TrainConfig().staleness_policy]
    missed = [trace for trace in usual if trace.dropped >= MOST_DROPPED or trace.length_bias < LEAST_BIAS]
    for trace in missed:
        print(f"{name_of(trace.freshness)}, the default, misses {MOST_DROPPED:.0%} or {LEAST_BIAS}")
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
