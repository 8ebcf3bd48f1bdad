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
    OWNERS,
    STEPS,
    TASKS,
    TOOL_CALLS,
    TOOLS,
    TRAINING,
    TRAJECTORIES,
    TURNS,
    WAITING,
)
from agentrl.store.mechanics.connection import DATA, EVALUATION, MODEL_CALL, RECORD, SERVICE, STEP, TASK
from agentrl.store.schema import VIEWS

VIEWS.add((RECORD, TRAJECTORIES), "audit_trajectories")
VIEWS.add((RECORD, OWNERS), "audit_owners")
VIEWS.add((MODEL_CALL, TURNS), "audit_turns")
VIEWS.add((RECORD, CONVERSATIONS), "audit_conversations")
VIEWS.add((RECORD, FAILURES), "audit_failures")
VIEWS.add((RECORD, TOOL_CALLS), "audit_tool_calls")
VIEWS.add((MODEL_CALL, TOOLS), "audit_tools")
VIEWS.add((TASK, GROUPS), "audit_groups")
VIEWS.add((TASK, TASKS), "audit_tasks")
VIEWS.add((STEP, STEPS), "audit_steps")
VIEWS.add((STEP, TRAINING), "audit_training")
VIEWS.add((DATA, WAITING), "audit_waiting")
VIEWS.add((SERVICE, ENGINES), "audit_engines")
VIEWS.add((EVALUATION, EVALUATIONS), "audit_evaluations")
