"""A group is decided again from its Records and model calls, and a new score of a part is a new score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_documents import made_call, made_record, made_task, trained_group

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.lab.check.attempts import group_problems
from agentrl.lab.regroup import NewScore, _with_score
from agentrl.store.groups import StoredGroup

TASK = made_task()


def test_step_advantages_are_computed_again_from_the_states_of_the_calls() -> None:
    paths = (["start", "door", "hall"], 1.0), (["start", "wall", "hall"], 0.0)
    details = {"scorer": "own"}
    records = [
        made_record(TASK, place, score, score_details=details, turns=3)
        for place, (_, score) in enumerate(paths)
    ]
    calls: dict[str, list[DispatchedSamplingTask]] = {
        record.id: [
            made_call(record.id, index, parent=index - 1 if index else None, anchor=state)
            for index, state in enumerate(states)
        ]
        for record, (states, _) in zip(records, paths, strict=True)
    }
    group = StoredGroup(task=TASK, records=records, calls=calls)
    config = GroupConfig(step_advantage="gigpo", advantage="dr_grpo", turn_discount=0.5)
    outcome = GroupRules(config=config, seed=7).decide(group)
    task = trained_group(TASK, records, calls, outcome).task.to_document()
    settled: list[dict[str, Any]] = [
        {
            **replace(record, status=item.status, advantage=item.advantage).to_document(),
            "turn_advantages": list(item.turn_advantages),
        }
        for record, item in zip(records, outcome.records, strict=True)
    ]

    def problems(made: dict[str, list[DispatchedSamplingTask]], **pruned: Any) -> list[str]:
        documents = {key: [call.to_document() for call in each] for key, each in made.items()}
        known = [{**record, **pruned} for record in settled]
        return [problem.what for problem in group_problems(task, known, 2, documents)]

    assert problems(calls) == []
    moved = {**calls, records[0].id: [replace(call, anchor="hall") for call in calls[records[0].id]]}
    assert problems(moved) == ["the turn advantages that its group gives it"] * 2
    assert problems({}, pruned_at=TASK.created_at) == []


def test_a_new_score_of_a_part_is_new_although_the_sum_is_not() -> None:
    def parts(right: float, short: float) -> dict[str, Any]:
        each = {"right": right, "short": short}
        return {
            "scorer": "s",
            "parts": {name: {"weight": 0.5, "score": score} for name, score in each.items()},
        }

    record = made_record(TASK, 0, 0.5, score_details=parts(1.0, 0.0))
    assert _with_score(record, NewScore(score=0.5, details=parts(1.0, 0.0))) is record
    changed = _with_score(record, NewScore(score=0.5, details=parts(0.0, 1.0)))
    assert changed.score_parts["short"] == (0.5, 1.0)
