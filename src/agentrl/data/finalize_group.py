"""Decide a finished group: which Records are trained, with which advantages, and their training data."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from agentrl.config.schema import GroupConfig
from agentrl.data.convert import mask_reason, masked_calls, to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask, branches_of, same_agent
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError
from agentrl.scoring.advantages import BUILT_IN
from agentrl.scoring.groups import (
    Decision,
    decide_group,
    dropped_by_filter,
    filtered_of,
    recorded_decisions,
    summarize,
)
from agentrl.store.groups import GroupOutcome, RecordOutcome

logger = logging.getLogger(__name__)


TRAIN_SPLIT: Final = "train"

_LISTED: Final = 8
"""Largest number of parameters listed in a summary or a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The flags and the seed that decide a group; stored with it as ``Task.group.rules``."""

    config: GroupConfig
    seed: int
    filtered: Mapping[str, str] | None = None
    """Recorded drops of ``--group_filter``, {id: reason}. None: call the filter."""
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
        known = {field.name for field in fields(GroupConfig)}
        config = GroupConfig(**{key: value for key, value in rules.items() if key in known})
        return cls(config=config, seed=int(rules.get("seed", 0)))

    def to_store(self) -> dict[str, Any]:
        """Return the rules as stored in ``Task.group.rules``."""
        return {**asdict(self.config), "seed": self.seed}

    def decide(
        self,
        task: Task,
        records: Sequence[Record],
        calls: Mapping[str, Sequence[DispatchedSamplingTask]],
    ) -> GroupOutcome:
        """Decide a group. Deterministic: every process computes the same outcome.

        A group filter may not be deterministic, so its drops are stored (``Task.group.filtered``). Groups of
        ``TRAIN_SPLIT`` become training data; groups of other splits are only summarized.
        """
        scored = [record for record in records if record.score is not None]
        failed = sum(slot.status is SlotStatus.FAILED for slot in task.slots)
        rules = self.to_store()
        if task.split != TRAIN_SPLIT:
            outcomes = [RecordOutcome(record_id=record.id, status=RecordStatus.READY) for record in scored]
            summed = {**summarize(scored, failed, 0, rules), "right_threshold": self.config.right_threshold}
            return GroupOutcome(records=tuple(outcomes), summary=summed)
        filtered = self.filtered or {}
        if self.filtered is None and self.config.group_filter is not None and scored:
            filtered = dropped_by_filter(self.config.group_filter, task, scored)
        if self.recorded and self.config.advantage not in BUILT_IN:
            decisions = recorded_decisions(scored)
        else:
            rng = random.Random(f"{self.seed}/{task.id}")
            decisions = decide_group(scored, self.config, rng, filtered)
        by_id = {record.id: record for record in scored}
        data: list[DBRecordData] = []
        outcomes = []
        masked: Counter[str] = Counter()
        for decision in decisions:
            reasons = self._masked(by_id[decision.record_id], calls, decision)
            masked.update(reasons)
            converted = self._convert(task, by_id[decision.record_id], calls, decision, reasons)
            if isinstance(converted, DBRecordData):
                data.append(converted)
                outcomes.append(
                    RecordOutcome(
                        record_id=decision.record_id,
                        status=RecordStatus.READY,
                        advantage=decision.advantage,
                        turn_advantages=decision.turn_advantages,
                    )
                )
            else:
                outcomes.append(
                    RecordOutcome(
                        record_id=decision.record_id, status=RecordStatus.ABANDONED, because=converted
                    )
                )
        summary = {
            **summarize(scored, failed, len(data), rules),
            "masked_calls": [
                {"because": what, "calls": count} for what, count in masked.most_common(_LISTED)
            ],
            "filtered": [{"record": key, "because": because} for key, because in filtered.items()],
            "rules": rules,
        }
        return GroupOutcome(data=tuple(data), records=tuple(outcomes), summary=summary)

    def _masked(
        self, record: Record, calls: Mapping[str, Sequence[DispatchedSamplingTask]], decision: Decision
    ) -> list[str]:
        """Return ``masked_calls`` of a Record that is trained, else an empty list."""
        if decision.advantage is None:
            return []
        chosen = [call for call in calls.get(record.id, ()) if call.index not in record.untrained_calls]
        return masked_calls(chosen, decision.advantage, self.config, decision.turn_advantages)

    def _convert(
        self,
        task: Task,
        record: Record,
        calls: Mapping[str, Sequence[DispatchedSamplingTask]],
        decision: Decision,
        reasons: Sequence[str],
    ) -> DBRecordData | str:
        """Return the training data, or why there are none."""
        if decision.advantage is None:
            return decision.abandoned_because or "abandoned"
        try:
            data = to_training_data(
                task,
                record,
                calls.get(record.id, ()),
                decision.advantage,
                self.config,
                turn_advantages=decision.turn_advantages,
            )
        except StoreError as error:
            logger.error("a trajectory cannot be trained", extra={"record": record.id, "why": error.message})
            return error.message
        if data is not None:
            return data
        if decision.advantage == 0 and self.config.drop_zero_advantage:
            return "its advantage is 0, and drop_zero_advantage leaves it out"
        if reasons:
            return f"no model call to train: {_listed(reasons)}, which the engine's logprobs leave out"
        return "no model call has an advantage to train with"


def _listed(reasons: Sequence[str]) -> str:
    counts = Counter(reasons)
    listed = [f"{count} sampled with {what}" for what, count in counts.most_common(_LISTED)]
    rest = counts.total() - sum(count for _, count in counts.most_common(_LISTED))
    return ", ".join([*listed, f"{rest} with others"] if rest else listed)


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
