"""The audit views of a run: MongoDB views for Compass and mongosh, and the pipelines that the commands read.

Packed arrays are left out. A filter on a field that a view passes on unchanged (``_id``, ``record``,
``status``, ``step``, ``created_at``) uses the index of the collection below, before any join.
"""

from __future__ import annotations

from agentrl.screens.views.pipelines import (
    CONVERSATIONS,
    ENGINES,
    EVALUATIONS,
    FAILURES,
    GROUPS,
    STEPS,
    TASKS,
    TOOL_CALLS,
    TOOLS,
    TRAINING,
    TRAJECTORIES,
    TURNS,
    WAITING,
)
from agentrl.store.mechanics.connection import DATA, EVALUATION, MODEL_CALL, RECORD, SERVICE, STEP, TASK, Json

VIEWS: dict[str, tuple[str, list[Json]]] = {
    "audit_trajectories": (RECORD, TRAJECTORIES),
    "audit_turns": (MODEL_CALL, TURNS),
    "audit_conversations": (RECORD, CONVERSATIONS),
    "audit_failures": (RECORD, FAILURES),
    "audit_tool_calls": (RECORD, TOOL_CALLS),
    "audit_tools": (MODEL_CALL, TOOLS),
    "audit_groups": (TASK, GROUPS),
    "audit_tasks": (TASK, TASKS),
    "audit_steps": (STEP, STEPS),
    "audit_training": (STEP, TRAINING),
    "audit_waiting": (DATA, WAITING),
    "audit_engines": (SERVICE, ENGINES),
    "audit_evaluations": (EVALUATION, EVALUATIONS),
}
"""View → (collection, pipeline)."""
