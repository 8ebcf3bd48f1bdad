"""Turn a finished group into training data: which tokens of which calls are trained, with which advantage.

The trainer verifies stored data by deciding their group again. Samplers may write Tasks, Records and training
data, so it compares each with the others. Data pass if a sampler could have sampled and scored them; all
other data are refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from agentrl.base.concurrency import DECISION_THREADS, time_limit
from agentrl.config.training import RIGHT_THRESHOLD, GroupConfig
from agentrl.documents.document import shortened
from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    SamplingMask,
    TreeRouting,
    VersionSpan,
    append_span,
    branches_of,
    pack_floats,
    pack_ids,
    same_agent,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.record import Column, Record, TokenColumns
from agentrl.documents.sampling import COLDEST, distribution_params
from agentrl.documents.status import CallStatus, ColumnStatus, SlotStatus, TaskStatus
from agentrl.documents.task import CONVERSATIONS, Task
from agentrl.documents.training import DBRecordData, Node, TrainableSpan, earned_advantage
from agentrl.errors import AgentRLError, GroupError, StoreError, StoreUnavailableError
from agentrl.scoring.groups import (
    BUILT_IN,
    Decision,
    Steps,
    abandon,
    alone,
    decide_group,
    dropped_by_filter,
    filtered_of,
    recorded_decisions,
    rules_of,
    shared_steps,
    steps_of,
    summarize,
)
from agentrl.store.groups import GroupOutcome, StoredGroup, slot_problem

if TYPE_CHECKING:
    from agentrl.store.client import Store


logger = logging.getLogger(__name__)

FAULTY: Final = frozenset({CallStatus.FORMAT_ERROR, CallStatus.REPEAT_ERROR})
"""Model calls whose tokens never have a positive advantage."""

_SHOWN: Final = 60
"""Characters of a parameter's value in a reason."""
TRAIN_SPLIT: Final = "train"

DECIDE_SECONDS: Final = 120.0
"""Time limit of the decision on one group: a user's filter may hang."""

_LISTED: Final = 8
"""Largest number of parameters listed in a summary or a reason."""
Decide = Callable[[StoredGroup], GroupOutcome]
"""A pure function, which may run twice."""
Verify = Callable[[Sequence[DBRecordData]], Awaitable[dict[str, str]]]
"""Training data → the groups that fail verification: {task: problem}."""
_TOLERANCE = 1e-9
"""Largest relative and absolute difference of two advantages that counts as rounding."""
_ORIGIN = ("record", "task", "split", "score", "advantage", "turn_advantages", "turns")
_COMPARED = (
    "input_ids", "nodes", "spans", "faulty_calls", "images", "behavior_logprobs",
    "sampling_mask", "routing", "columns", "tokens", "trainable_tokens", "min_version", "max_version",
)  # fmt: skip
_PACKED = ("input_ids", "behavior_logprobs", "sampling_mask", "routing", "columns")


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Runs of tokens in depth-first order. The output of a call starts at ``output_starts[call_id]``."""

    nodes: tuple[Node, ...]
    input_ids: NDArray[np.int32]
    output_starts: Mapping[str, int]
    images: tuple[ImageSpan, ...] = ()
    """Tokens that stand for images, by their place in ``input_ids``."""
    routing: bytes = b""
    """The experts of each token, if a call has a routing."""


def build_tree(calls: Sequence[DispatchedSamplingTask], kept: Collection[str]) -> TokenTree:
    """Return the tree of the model calls ``kept`` and all their ancestors.

    A call appends its ``context_ids`` and ``output_ids`` to its parent's output. A call without a parent
    starts a root; a parent with several children ends a node, and each child starts one. Leaves out calls
    without a kept descendant. Raises StoreError if a parent is missing or comes later.
    """
    children = _children(calls, kept)
    nodes: list[Node] = []
    pieces = [np.empty(0, np.int32)]
    images: list[ImageSpan] = []
    output_starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    routing, length = TreeRouting(), 0
    # Keep a stack and do not recurse: chains may be long. It is reversed, so that children keep their order.
    pending = [(root, -1) for root in reversed(children[None])]
    while pending:
        first, above = pending.pop()
        start, following = length, [first]
        while len(following) == 1:
            (call,) = following
            context, output = unpack_ids(call.context_ids), unpack_ids(call.output_ids)
            count = len(context) + len(output)
            images += [image.moved(length) for image in call.images]
            output_starts[call.id] = length + len(context)
            pieces += [context, output]
            routing.add(
                call.routing, length, count, call.prompt_tokens > len(context),
                call.parent is not None and ends[call.parent] == length,
            )  # fmt: skip
            length += count
            ends[call.id] = length
            following = children.get(call.id, [])
        nodes.append(Node(start=start, end=length, parent=above))
        pending += [(child, len(nodes) - 1) for child in reversed(following)]
    return TokenTree(
        tuple(nodes), np.concatenate(pieces), output_starts, tuple(images), routing.finish(length)
    )


def _children(
    calls: Sequence[DispatchedSamplingTask], kept: Collection[str]
) -> dict[str | None, list[DispatchedSamplingTask]]:
    known: dict[str, DispatchedSamplingTask] = {}
    for call in calls:
        if call.parent is not None and call.parent not in known:
            raise StoreError(
                f"model call {call.id} continues {call.parent}, which is not among the calls before it",
                hint="the trajectory is damaged: look at it with `agentrl audit record`; reopen its task",
            )
        known[call.id] = call
    needed: set[str] = set()
    for call_id in kept:
        # End at a call that is needed already: so are its ancestors, and a long chain is walked once.
        while call_id not in needed:
            needed.add(call_id)
            parent = known[call_id].parent
            if parent is None:
                break
            call_id = parent
    children: dict[str | None, list[DispatchedSamplingTask]] = {None: []}
    for call in calls:
        if call.id in needed:
            children.setdefault(call.parent, []).append(call)
    return children


@dataclass(frozen=True, slots=True)
class _TrainableCall:
    call: DispatchedSamplingTask
    advantage: float
    temperature: float


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of one call that one policy version sampled, and what is trained of each."""

    span: TrainableSpan
    logprobs: NDArray[np.float32]
    mask: SamplingMask
    places: NDArray[np.int64]
    """Indices among the generated tokens of all calls of the Record."""


def to_training_data(
    task: Task,
    record: Record,
    calls: Sequence[DispatchedSamplingTask],
    advantage: float,
    config: GroupConfig,
    *,
    turn_advantages: Sequence[float] = (),
    columns: Sequence[Column] = (),
    supervised: bool = False,
) -> DBRecordData | None:
    """Return the training data of one scored trajectory; None if no model call of it is trained.

    ``calls`` are the Record's model calls, ordered by index; ``turn_advantages`` are added to the advantage
    of the call with that index. All generated tokens of a trainable call are trained: one span per call and
    policy version, at the call's sampling temperature. Calls that the Record leaves out (``untrained_calls``)
    and calls whose distribution another parameter changed (``mask_reason``) are context. ``columns`` are the
    Record's; the data get those that ``config`` names. With ``supervised`` every call is trainable, at
    temperature 1, because no loss reads its logprobs. Raises StoreError if the calls contradict one another
    or the columns, or if the Record has no score.
    """
    if record.score is None:
        raise StoreError(f"record {record.id} has no score and cannot become training data")
    chosen = [call for call in calls if call.index not in record.untrained_calls]
    trainable = _trainable_calls(chosen, advantage, turn_advantages, config, supervised)
    tree = build_tree(calls, [item.call.id for item in trainable])
    # Count all calls, trained or not: a column has a value for each generated token of the Record.
    counts = [len(call.output_ids) // 4 for call in calls]
    first_of = dict(zip((call.id for call in calls), np.cumsum([0, *counts]).tolist(), strict=False))
    trained = [
        run
        for item in sorted(trainable, key=lambda item: tree.output_starts[item.call.id])
        for run in _runs(item, tree.output_starts[item.call.id], first_of[item.call.id], supervised)
    ]
    if not trained:
        return None
    named = [column for column in columns if column.name in config.column_names]
    generated = TokenColumns.of_record(named, sum(counts))
    return DBRecordData(
        id=record.id,
        record=record.id,
        task=task.id,
        split=task.split,
        score=record.score,
        advantage=advantage,
        turn_advantages=tuple(turn_advantages),
        min_version=min(run.span.version for run in trained),
        max_version=max(run.span.version for run in trained),
        tokens=len(tree.input_ids),
        trainable_tokens=sum(len(run.logprobs) for run in trained),
        turns=record.turns,
        untrained_calls=record.untrained_calls,
        faulty_calls=tuple(sorted(item.call.index for item in trainable if item.call.status in FAULTY)),
        nodes=tree.nodes,
        spans=tuple(run.span for run in trained),
        images=tree.images,
        input_ids=pack_ids(tree.input_ids),
        behavior_logprobs=pack_floats(np.concatenate([run.logprobs for run in trained])),
        sampling_mask=SamplingMask.join([run.mask for run in trained]).pack(),
        routing=tree.routing,
        columns=generated.select(np.concatenate([run.places for run in trained])).pack(),
    )


def call_advantage(status: CallStatus, advantage: float) -> float | None:
    """Return the advantage of one model call's tokens; None if the call is not trained.

    ``advantage`` is the call's, its turn advantage included. Malformed tool calls and repeated texts get 0,
    or ``advantage`` if that is lower.
    """
    if status is CallStatus.FAILED:
        return None
    return min(advantage, 0.0) if status in FAULTY else advantage


def call_temperature(call: DispatchedSamplingTask) -> float | None:
    """Return the temperature to train ``call`` with; None if it is too low or not a number.

    It is 1 if the document names none.
    """
    value = call.sampling_params.get("temperature")
    if value is None:
        return 1.0
    # Refuse a bool, which Python counts as an int: true would be trained as temperature 1.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and COLDEST <= value < math.inf else None


def mask_reason(call: DispatchedSamplingTask) -> str | None:
    """Return the sampling parameter and value that mask ``call``; None if its tokens can be trained.

    The trainer computes softmax(logits / temperature). A call that was sampled from another distribution
    (top-p, a penalty, a grammar) has correct importance ratios only if its logprobs are of that distribution
    (``logprobs_of``). If it stores the ids that truncation kept, the trainer's softmax is over these ids.
    """
    if call_temperature(call) is None:
        return f"temperature {shortened(str(call.sampling_params['temperature']), _SHOWN)}"
    if call.logprobs_of in ("sampled", "truncated"):
        return None
    for name in distribution_params(call.sampling_params):
        return f"{name} {shortened(str(call.sampling_params[name]), _SHOWN)}"
    return "logprobs of several distributions" if call.logprobs_of == "other" else None


def masked_calls(
    calls: Sequence[DispatchedSamplingTask],
    advantage: float,
    config: GroupConfig,
    turn_advantages: Sequence[float] = (),
) -> list[str]:
    """Return the reason for each call that only a sampling parameter masks, such as ``top_p 0.9``."""
    earned = ((call, earned_advantage(advantage, turn_advantages, call.index)) for call in calls)
    return [
        reason
        for call, own in earned
        if _own_advantage(call, own, config) is not None and (reason := mask_reason(call)) is not None
    ]


def _trainable_calls(
    calls: Sequence[DispatchedSamplingTask], advantage: float, turn_advantages: Sequence[float],
    config: GroupConfig, supervised: bool,
) -> list[_TrainableCall]:  # fmt: skip
    chosen = []
    for call in calls:
        own = _own_advantage(call, earned_advantage(advantage, turn_advantages, call.index), config)
        if own is None or not _is_consistent(call):
            continue
        temperature = 1.0 if supervised else call_temperature(call)
        if temperature is not None and (supervised or mask_reason(call) is None):
            chosen.append(_TrainableCall(call, own, temperature))
    return chosen


def _own_advantage(call: DispatchedSamplingTask, earned: float, config: GroupConfig) -> float | None:
    """Return the advantage of a call with tokens to train, else None; ``earned`` as if it were not faulty."""
    own = call_advantage(call.status, earned)
    if own is None or not call.output_ids or call.fixed is not None:
        return None
    # By what a correct call would get: a faulty call with advantage 0 stays in the loss's denominators, so
    # that it does not change the weight of the other calls.
    if (earned == 0.0 and config.drop_zero_advantage) or abs(earned) < config.minimal_advantage:
        return None
    return own


def _is_consistent(call: DispatchedSamplingTask) -> bool:
    """Return whether every logprob is finite, as importance ratios need; log a warning if not."""
    logprobs = unpack_floats(call.logprobs)
    if len(logprobs) * 4 != len(call.output_ids):
        raise StoreError(
            f"model call {call.id} has {len(call.output_ids) // 4} generated tokens"
            f" and {len(logprobs)} logprobs"
        )
    if np.isfinite(logprobs).all():
        return True
    logger.warning("model call %s has logprobs that are not finite: it is not trained", call.id)
    return False


def _versions(call: DispatchedSamplingTask, first: int) -> list[VersionSpan]:
    """Return the call's version spans from token ``first`` on, with adjacent spans of one version merged."""
    merged: list[VersionSpan] = []
    reached = 0
    for span in call.versions:
        if span.start != reached or span.end < span.start:
            break
        reached = span.end
        append_span(merged, span.version, span.start, span.end)
    if reached * 4 != len(call.output_ids):
        raise StoreError(
            f"the policy versions of model call {call.id} do not cover its {len(call.output_ids) // 4} tokens"
        )
    kept = (VersionSpan(version=s.version, start=max(s.start, first), end=s.end) for s in merged)
    return [span for span in kept if span.start < span.end]


def _runs(item: _TrainableCall, start: int, first: int, supervised: bool) -> Iterator[_Run]:
    """Yield what is trained of a call: its output begins at token ``start`` of the tree.

    ``first`` is its first token's index among the generated tokens of the Record. A token without one before
    it cannot be trained.
    """
    call = item.call
    packed = b"" if supervised else call.sampling_mask
    mask, logprobs = SamplingMask.unpack(packed, len(call.output_ids) // 4), unpack_floats(call.logprobs)
    for version in _versions(call, first=0 if start else 1):
        here = slice(version.start, version.end)
        span = TrainableSpan(
            start=start + version.start,
            end=start + version.end,
            call=call.index,
            version=version.version,
            advantage=item.advantage,
            temperature=item.temperature,
        )
        yield _Run(span, logprobs[here], mask.select(here), np.arange(first + here.start, first + here.stop))


def why_untrained(call: DispatchedSamplingTask, rule: str | None, left_out: Collection[int]) -> str | None:
    """Return why no token of ``call`` can be trained; None if they can. ``rule`` leaves out ``left_out``."""
    if call.fixed is not None:
        return f"answered by {call.fixed.model}, not by the policy"
    if call.index in left_out:
        return f"left out by train rule {rule}"
    parameter = mask_reason(call)
    return None if parameter is None else f"sampled with {parameter}"


def describe_share(
    calls: Sequence[DispatchedSamplingTask], rule: str | None, left_out: Collection[int]
) -> str:
    """Return ``57% of 1,200 sampled tokens can be trained; not: …``, and the rule that would train more."""
    sampled = sum(call.generated_tokens for call in calls if call.fixed is None)
    lost: Counter[str] = Counter()
    for call in calls:
        why = why_untrained(call, rule, left_out)
        if why is not None and call.fixed is None:
            lost[why] += call.generated_tokens
    trained = sampled - lost.total()
    text = f"{_percent(trained, sampled)} of {sampled:,} sampled tokens can be trained"
    if lost:
        text += "; not: " + ", ".join(f"{tokens:,} {why}" for why, tokens in lost.most_common())
    if rule == "main":
        agent = {
            index
            for role in {call.role for call in calls}
            for branch in same_agent(branches_of([call for call in calls if call.role == role]))
            for index in branch.indexes
        }
        other = {call.index for call in calls} - agent
        more = sum(call.generated_tokens for call in calls if why_untrained(call, "agent", other) is None)
        if more > trained:
            text += f" (train: agent would train {_percent(more, sampled)})"
    return text


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The flags and the seed that decide a group; stored with it as ``Task.group.rules``."""

    config: GroupConfig
    seed: int
    filtered: Mapping[str, str] | None = None
    """Recorded drops of ``--group_filter``, {id: reason}. None: call the filter."""
    baseline_mean: float | None = None
    """The mean score of ``--baseline window`` when the group was decided."""
    recorded: bool = False
    """True: take the advantages that Records hold, unless a built-in ``--advantage`` computes them again."""

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> GroupRules:
        """Return the rules of ``Task.group`` for deciding it again without importing a user's code."""
        rules = cls.stored(group["rules"])
        return replace(rules, filtered=filtered_of(group) or {}, recorded=True)

    @classmethod
    def stored(cls, rules: Mapping[str, Any]) -> GroupRules:
        """Return the rules of a finalized group; missing flags have their defaults."""
        return cls(
            config=rules_of(rules), seed=int(rules.get("seed", 0)), baseline_mean=rules.get("baseline_mean")
        )

    def to_store(self) -> dict[str, Any]:
        """Return the rules as stored in ``Task.group.rules``."""
        baseline = {} if self.baseline_mean is None else {"baseline_mean": self.baseline_mean}
        return {**asdict(self.config), "seed": self.seed, **baseline}

    def decide(self, group: StoredGroup) -> GroupOutcome:
        """Decide a group. Deterministic: every process computes the same outcome.

        A group filter may not be deterministic, so its drops are stored (``Task.group.filtered``). Groups of
        ``TRAIN_SPLIT`` become training data; groups of other splits are only summarized.
        """
        task, scored = group.task, [record for record in group.records if record.score is not None]
        failed = sum(slot.status is SlotStatus.FAILED for slot in task.slots)
        rules = self.to_store()
        if task.split != TRAIN_SPLIT:
            ready = tuple(Decision(record_id=record.id) for record in scored)
            summed = {**summarize(scored, failed, 0, rules), "right_threshold": self.config.right_threshold}
            return GroupOutcome(records=ready, summary=summed)
        filtered = self._filtered(task, scored)
        by_id = {record.id: record for record in scored}
        compares_calls = self.config.step_advantage != "off"
        steps = {key: steps_of(calls) for key, calls in group.calls.items()} if compares_calls else {}
        converted = [
            self._convert(group, by_id[decision.record_id], decision)
            for decision in self._decisions(task, scored, filtered, steps)
        ]
        data = tuple(data for _, _, data in converted if data is not None)
        masked = Counter(what for _, reasons, _ in converted for what in reasons)
        summary = {
            **summarize(scored, failed, len(data), rules),
            "masked_calls": [
                {"because": what, "calls": count} for what, count in masked.most_common(_LISTED)
            ],
            "filtered": [{"record": key, "because": because} for key, because in filtered.items()],
            "rules": rules,
        }
        if compares_calls:
            summary["shared_steps"] = shared_steps(scored, steps)
        return GroupOutcome(data=data, records=tuple(each for each, _, _ in converted), summary=summary)

    def _filtered(self, task: Task, scored: Sequence[Record]) -> Mapping[str, str]:
        """Return the Records that ``--group_filter`` drops, and why."""
        if self.filtered is None and self.config.group_filter is not None and scored:
            return dropped_by_filter(self.config.group_filter, task, scored)
        return self.filtered or {}

    def _decisions(
        self, task: Task, scored: Sequence[Record], filtered: Mapping[str, str], steps: Steps
    ) -> Sequence[Decision]:
        if self.recorded and self.config.advantage not in BUILT_IN:
            return recorded_decisions(scored)
        # Seed by the task: the trainer decides the group again, and must draw the same.
        rng = random.Random(f"{self.seed}/{task.id}")
        return decide_group(scored, self.config, rng, filtered, steps, self.baseline_mean)

    def _convert(
        self, group: StoredGroup, record: Record, decision: Decision
    ) -> tuple[Decision, Sequence[str], DBRecordData | None]:
        """Return what becomes of a Record, why calls of it are masked, and its training data, if any."""
        advantage, turn_advantages = decision.advantage, decision.turn_advantages
        if advantage is None:
            return abandon(record, decision.abandoned_because or "abandoned"), (), None
        calls, columns = group.calls.get(record.id, ()), group.columns.get(record.id, ())
        chosen = [call for call in calls if call.index not in record.untrained_calls]
        masked = masked_calls(chosen, advantage, self.config, turn_advantages)
        if (missing := _missing_column(columns, self.config.column_names)) is not None:
            return abandon(record, missing), masked, None
        try:
            data = to_training_data(
                group.task, record, calls, advantage, self.config, turn_advantages=turn_advantages,
                columns=columns,
            )  # fmt: skip
        except StoreError as error:
            logger.error("a trajectory cannot be trained", extra={"record": record.id, "why": error.message})
            return abandon(record, error.message), masked, None
        if data is not None:
            # Drop an earlier reason: a Record that was abandoned once may hold one beside its advantage.
            return replace(decision, abandoned_because=None), masked, data
        why = "no model call has an advantage to train with"
        if advantage == 0 and self.config.drop_zero_advantage:
            why = "its advantage is 0, and drop_zero_advantage leaves it out"
        elif masked:
            why = f"no model call to train: {_listed(masked)}, which the engine's logprobs leave out"
        return abandon(record, why), masked, None


async def finalize_group(
    store: Store, task_id: str, rules: GroupRules, columns: Sequence[str] = ()
) -> GroupOutcome | None:
    """Read a group, decide it by ``rules`` in a thread and store the outcome, which is returned.

    None if it is not waiting, if it waits for one of ``columns``, or if another process finalized it first.
    Nothing is written if the decision raises. Raises GroupError after ``DECIDE_SECONDS``; the thread goes on.
    """
    group = await store.groups.to_decide(task_id, columns)
    if group is None:
        return None
    if group.task.epoch == CONVERSATIONS:
        rules = replace(rules, config=alone(rules.config))
    if rules.config.baseline == "window" and group.task.split == TRAIN_SPLIT:
        rules = replace(rules, baseline_mean=await _window_mean(store, group, rules.config))
    outcome: GroupOutcome
    try:
        # Decide in a thread: it converts a whole group, and calls users' filters and estimators.
        async with time_limit(DECIDE_SECONDS):
            outcome = await DECISION_THREADS.run(rules.decide, group)
    except TimeoutError as error:
        raise GroupError(
            f"the decision on group {task_id} took longer than {DECIDE_SECONDS:g} s",
            hint="make sure that the --group_filter returns; it must not wait for anything",
        ) from error
    return outcome if await store.groups.finalize(group, outcome) else None


async def _window_mean(store: Store, group: StoredGroup, config: GroupConfig) -> float | None:
    """Return the mean score of the trajectories of the window that ends with the group; None without a score.

    Every trajectory counts whose tokens are all of the last ``baseline_versions`` policy versions.
    """
    scored = [record for record in group.records if record.score is not None]
    newest = max((record.max_version for record in scored if record.max_version is not None), default=0)
    oldest = max(0, newest + 1 - config.baseline_versions)
    found = await store.groups.mean_score(group.task.split, oldest)
    own = [record.score for record in scored if record.score is not None]
    return found if found is not None or not own else math.fsum(own) / len(own)


def decide_stored(task: Task) -> Decide | None:
    """Return the function that decides a finalized group by the rules that it stores; None without any."""
    group = task.group or {}
    if group.get("rules") is not None:
        return GroupRules.stored(group["rules"]).decide
    if task.split != TRAIN_SPLIT:
        right = float(group.get("right_threshold", RIGHT_THRESHOLD))
        return GroupRules(config=GroupConfig(right_threshold=right), seed=0).decide
    return None


def _missing_column(columns: Sequence[Column], names: Sequence[str]) -> str | None:
    """Return why a Record lacks a column that its group's rules name; None if it has all."""
    stored = {column.name: column for column in columns}
    for name in names:
        column = stored.get(name)
        if column is None or column.status is not ColumnStatus.FILLED:
            why = "it was never opened" if column is None else column.problem or f"it is {column.status}"
            return f"its column {name} was given up: {why}"
    return None


def _listed(reasons: Sequence[str]) -> str:
    counts = Counter(reasons)
    listed = [f"{count} sampled with {what}" for what, count in counts.most_common(_LISTED)]
    rest = counts.total() - sum(count for _, count in counts.most_common(_LISTED))
    return ", ".join([*listed, f"{rest} with others"] if rest else listed)


def verifier(store: Store, *, refuses_roles: bool = False) -> Verify:
    """Return a check of training data against the other documents of ``store``.

    ``refuses_roles``: groups with rewards of roles fail too; each role would need a critic of its own.
    """

    async def verify(data: Sequence[DBRecordData]) -> dict[str, str]:
        by_task: dict[str, list[DBRecordData]] = {}
        for item in data:
            by_task.setdefault(item.task, []).append(item)
        problems: dict[str, str] = {}
        for task_id, items in by_task.items():
            try:
                group = await store.groups.stored(task_id)
                # Decide in a thread: it converts a whole group, and the loop renews the lease meanwhile.
                problem = await asyncio.to_thread(group_problem, group, items)
                if refuses_roles and group is not None and any(each.role_rewards for each in group.records):
                    problem = problem or "its scorer rewards roles, and one critic cannot tell them apart"
            except StoreUnavailableError:
                # Raise an outage: a group that cannot be read now is not wrong, and a quarantine is final.
                raise
            except (AgentRLError, ValueError, TypeError, KeyError) as error:
                problem = f"it cannot be checked: {error}"
            if problem is not None:
                problems[task_id] = problem
        return problems

    return verify


def group_problem(group: StoredGroup | None, data: Sequence[DBRecordData]) -> str | None:
    """Return why ``data`` do not follow from their group; None if they do."""
    if group is None:
        return "it has no Task"
    if group.task.status is not TaskStatus.COMPLETED:
        return f"its Task is {group.task.status}, not {TaskStatus.COMPLETED}"
    problem = slot_problem(group.task, group.records)
    if problem is not None:
        return problem
    summary = group.task.group or {}
    if summary.get("kept_as_trained"):
        return "trajectories of it were withdrawn after a step trained it (agentrl retract --rebuild)"
    if not isinstance(summary.get("rules"), Mapping):
        return "its Task does not hold the rules by which it was decided"
    expected = {item.id: item for item in GroupRules.of_group(summary).decide(group).data}
    counts = {record.id: record.trained_count for record in group.records}
    for item in data:
        if item.id not in expected:
            return f"its Records and model calls give no training data {item.id}"
        # Compare the counts: lowered in the data, they would let a step train them more than allowed.
        if item.trained_count != counts[item.id]:
            return f"{item.id}: trained_count: {item.trained_count}, of its Record {counts[item.id]}"
        if (problem := differences(item, _rounded_as(item, expected[item.id]), also=_ORIGIN)) is not None:
            return f"{item.id}: {problem}"
    return None


def _rounded_as(data: DBRecordData, expected: DBRecordData) -> DBRecordData:
    """Return ``expected`` with the advantages of ``data`` if they differ only by rounding."""
    found, wanted = _all_advantages(data), _all_advantages(expected)
    if len(data.spans) != len(expected.spans) or len(found) != len(wanted):
        return expected
    pairs = zip(found, wanted, strict=True)
    if not all(math.isclose(*pair, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) for pair in pairs):
        return expected
    spans = (
        replace(span, advantage=own.advantage) for span, own in zip(expected.spans, data.spans, strict=True)
    )
    return replace(
        expected, advantage=data.advantage, turn_advantages=data.turn_advantages, spans=tuple(spans)
    )


def _all_advantages(data: DBRecordData) -> list[float]:
    return [data.advantage, *data.turn_advantages, *(span.advantage for span in data.spans)]


def explain_difference(
    data: DBRecordData, calls: Sequence[DispatchedSamplingTask], config: GroupConfig | None,
    columns: Sequence[Column] = (),
) -> str | None:  # fmt: skip
    """Compare ``data`` with a fresh conversion of its model calls; return the differences, or None.

    ``calls`` are ordered by index. ``config`` holds the rules for which calls are trained; with None, the
    calls that ``data`` names are. Raises StoreError if the calls contradict one another.
    """
    if config is None:
        named = {span.call for span in data.spans}
        # Call failed what the data do not name: a conversion keeps failed calls as context.
        calls = [call if call.index in named else replace(call, status=CallStatus.FAILED) for call in calls]
        stored = TokenColumns.unpack(data.columns, data.trainable_tokens)
        names = ",".join(() if stored is None else stored.values)
        config = GroupConfig(drop_zero_advantage=False, minimal_advantage=0.0, columns=names)
    task = Task(id=data.task, task_id="", split=data.split, epoch=0, order=0, query="")
    record = Record(
        id=data.record, task=data.task, traj_id=0, attempt=1, split=data.split, epoch=0, query="",
        score=data.score, turns=data.turns, untrained_calls=data.untrained_calls,
    )  # fmt: skip
    expected = to_training_data(
        task, record, calls, data.advantage, config, turn_advantages=data.turn_advantages, columns=columns
    )
    if expected is None:
        return "its model calls have no token to train"
    return differences(data, expected)


def differences(data: DBRecordData, expected: DBRecordData, *, also: Sequence[str] = ()) -> str | None:
    """Return the fields of ``data`` that differ from ``expected``, or None. ``also``: more fields."""
    found = [_difference(name, data, expected) for name in (*also, *_COMPARED)]
    return "; ".join(text for text in found if text) or None


def _difference(name: str, data: DBRecordData, expected: DBRecordData) -> str | None:
    wanted, found = getattr(expected, name), getattr(data, name)
    if wanted == found:
        return None
    if name in _PACKED:
        return f"{name}: {len(found)} bytes that differ from the {len(wanted)} of its model calls"
    return f"{name}: {found}, from its model calls {wanted}"
