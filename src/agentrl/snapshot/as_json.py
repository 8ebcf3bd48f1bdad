"""Return a snapshot as the JSON values of ``agentrl status RUN --json`` and ``agentrl audit run --json``."""

from __future__ import annotations

from typing import Any

from agentrl.documents.status import ServiceStatus
from agentrl.observe.json_output import to_json
from agentrl.snapshot.findings import findings, state
from agentrl.snapshot.run_tables import LAST_EVALUATIONS
from agentrl.snapshot.snapshot import Details, RunSnapshot
from agentrl.snapshot.status_screen import LAST_STEPS


def status_json(run: RunSnapshot, *, output_free: int | None) -> dict[str, Any]:
    """Return the value of ``agentrl status``; docs/commands.md lists its keys."""
    lease, engines = run.lease, [item for item in run.engines if item.status is not ServiceStatus.STOPPED]
    trainer = {"owner": lease.owner, "host": lease.host, "pid": lease.pid, "alive": run.trainer_alive}
    return {
        **_common(run),
        "activity": run.activity,
        "steps": to_json(run.steps[-LAST_STEPS:]),
        "rates": to_json(run.rates),
        "queues": run.queues,
        "trainer": None if lease.owner is None else trainer,
        "ended": to_json(lease.ended),
        "last_claim": to_json(run.liveness.last_claim),
        "engines": [{**to_json(engine), "alive": run.is_alive(engine)} for engine in engines],
        "disk": to_json(run.disk),
        "output_free": output_free,
    }


def tables_json(run: RunSnapshot, details: Details) -> dict[str, Any]:
    """Return the value of ``agentrl audit run``: the rows of its tables."""
    return {
        **_common(run),
        **to_json(details),
        "tasks": {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()},
        "records": to_json(run.records),
        "past_outages": to_json(run.past_outages),
        "waiting_for_score": run.liveness.waiting_for_score,
        "engines": to_json(run.engines),
        "settings": to_json(run.settings),
        "configurations": to_json(run.configurations),
        "evaluations": to_json(run.evaluations[: -LAST_EVALUATIONS - 1 : -1]),
    }


def _common(run: RunSnapshot) -> dict[str, Any]:
    return {
        "run_name": run.run_name,
        "at": to_json(run.at),
        "state": state(run)[0],
        "findings": to_json(findings(run)),
        "samplers": to_json(run.liveness.claims),
        "outages": to_json(run.liveness.outages),
        "failures": to_json(run.failures),
    }
