"""Views for people: trajectories, turns, steps and what goes wrong with them, as one reads them in Compass.

Packed arrays are left out. A filter on a field that a view passes on as it is (``_id``, ``record``,
``status``, ``step``, ``created_at``) reaches the collection's index before anything is looked up.
"""

from __future__ import annotations

from agentrl.store.connection import Json
from agentrl.store.names import CALL, DATA, RECORD, SERVICE, STEP, TASK
from agentrl.store.views.engines import ENGINES
from agentrl.store.views.groups import GROUPS, TASKS
from agentrl.store.views.steps import STEPS, TRAINING, WAITING
from agentrl.store.views.tools import TOOL_CALLS, TOOLS
from agentrl.store.views.trajectories import CONVERSATIONS, FAILURES, TRAJECTORIES, TURNS

VIEWS: dict[str, tuple[str, list[Json]]] = {
    "audit_trajectories": (RECORD, TRAJECTORIES),
    "audit_turns": (CALL, TURNS),
    "audit_conversations": (RECORD, CONVERSATIONS),
    "audit_failures": (RECORD, FAILURES),
    "audit_tool_calls": (RECORD, TOOL_CALLS),
    "audit_tools": (CALL, TOOLS),
    "audit_groups": (TASK, GROUPS),
    "audit_tasks": (TASK, TASKS),
    "audit_steps": (STEP, STEPS),
    "audit_training": (STEP, TRAINING),
    "audit_waiting": (DATA, WAITING),
    "audit_engines": (SERVICE, ENGINES),
}
"""View → (collection, pipeline)."""
