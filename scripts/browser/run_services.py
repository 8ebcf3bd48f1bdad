"""Make the metrics of steps, the engines, settings and evaluations of a large run."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any

from agentrl.config.schema import RunConfig
from agentrl.documents.document import Root, now
from agentrl.documents.record import Record
from agentrl.documents.run import (
    Evaluation,
    InferenceService,
    Outage,
    RunSettings,
    SamplerProcess,
    TrainerLease,
    flags_key,
)
from agentrl.documents.status import EvaluationStatus, ServiceStatus
from agentrl.scoring.evaluation import EvaluatedTask, summarize

ENGINES = 4
_MODEL = "Qwen/Qwen3-4B"


def ability_at(progress: float) -> float:
    """Return the ability of the policy, in logits, after this share of the run."""
    return 2.8 * math.sqrt(progress) - 1.2


def step_metrics(rng: random.Random, step: int, progress: float, records: Sequence[Record]) -> dict[str, Any]:
    """Return the metrics of a step of a run that learns, with noise."""

    def around(value: float, spread: float = 0.08) -> float:
        return value * math.exp(rng.gauss(0, spread))

    reward = 1 / (1 + math.exp(0.25 - 0.9 * ability_at(progress))) + rng.gauss(0, 0.02)
    ages = Counter(max(0, step - 1 - (record.min_version or 0)) for record in records)
    tokens = sum(record.generated_tokens for record in records)
    versions = Counter(record.min_version or 0 for record in records)
    return {
        "loss": rng.gauss(0, 0.01), "reward": reward, "pass_rate": min(1.0, reward + rng.gauss(0, 0.01)),
        "kl_k3": around(0.0011 + 0.0012 * progress, 0.25), "entropy": around(0.46 - 0.21 * progress, 0.04),
        "ratio_mean": 1 + rng.gauss(0, 0.0015), "ratio_max": 1 + around(0.9, 0.5),
        "staleness_mean": fmean(ages.elements()), "staleness_max": max(ages),
        "clipped_fraction": around(0.006, 0.3), "masked_fraction": around(0.0008, 0.6),
        "abandoned_groups": min(1.0, around(0.12 + 0.18 * progress, 0.12)),
        "abandoned_fraction": min(1.0, around(0.13 + 0.18 * progress, 0.12)), "grad_norm": around(0.31, 0.2),
        "effective_sample_size": min(1.0, around(0.97, 0.01)), "length_bias": around(1.0, 0.02),
        "seconds_data": around(14, 0.5), "seconds_pack": around(0.9), "seconds_forward": around(17),
        "seconds_backward": around(38), "seconds_optimizer": around(2.1), "seconds_publish": around(5),
        "tokens_per_second": around(11800), "total_tokens_per_second": around(17400), "tokens": tokens,
        "groups_open": rng.randrange(10, 15), "groups_ready": rng.randrange(2, 9), "lr": 1e-6,
        "prefix_cache_hit_rate": math.nan if step % 5 else min(1.0, around(0.82, 0.02)),  # in gaps
        "staleness_histogram": {str(age): count * 400 for age, count in ages.items()},
        "version_fractions": {str(key): count / len(records) for key, count in versions.items()},
    }  # fmt: skip


def services_of(steps: int, began: datetime) -> Iterator[Root]:
    """Yield live engines and samplers, the trainer's lease, an outage, the settings and the evaluations."""
    at = now()
    for number in range(1, ENGINES + 1):
        yield InferenceService(
            id=f"engine-{number}", url=f"http://10.0.0.{10 + number}:30000", engine="sglang", model=_MODEL,
            status=ServiceStatus.READY, policy_version=steps, running_requests=20 + number,
            running_tokens=31_000 + 700 * number, context_length=32_768, host=f"gpu{number}",
            pid=900 + number, started_at=began,
        )  # fmt: skip
    for number in range(1, 5):
        yield SamplerProcess(
            id=f"node{number}-{4199 + number}", host=f"node{number}", pid=4199 + number, started_at=began,
            heartbeat=at,
        )  # fmt: skip
    yield TrainerLease(
        attempt=1, owner="node0-4100", host="node0", pid=4100, lease_expires_at=at + timedelta(hours=6)
    )
    yield Outage(
        id="sandbox-1", dependency="tool server sandbox", by="node2-4201", held=31,
        why="connection refused: http://10.0.0.21:8000/mcp", began_at=at - timedelta(hours=3),
        seen_at=at - timedelta(hours=3), ended_at=at - timedelta(hours=3) + timedelta(minutes=4),
    )  # fmt: skip
    yield from _settings(began)
    for step in range(0, steps + 1, max(1, steps // 8)):
        yield from _evaluations(step, steps, began)


def _settings(at: datetime) -> Iterator[RunSettings]:
    flags: dict[str, dict[str, Any]] = {
        "train": {"model_name_or_path": _MODEL, "learning_rate": 1e-6, "loss": "GRPO", "max_staleness": 4,
                  "batch_size": 128, "max_steps": 1000},
        "sample": {"agent_name": "react", "num_generations": 8, "max_turns": 8, "temperature": 1.0},
        "serve": {"engine": "sglang", "context_length": 32_768},
    }  # fmt: skip
    packages = {"agentrl": "0.1.0", "torch": "2.9.1", "transformers": "4.57.1", "pymongo": "4.15.4"}
    for role, values in flags.items():
        yield RunSettings(
            id=flags_key(role), values={**values, "heartbeat_seconds": 2.0, "seed": 0},
            by=f"agentrl {role} on node0", at=at, given=tuple(list(values)[:3]), packages=packages,
        )  # fmt: skip


def _evaluations(step: int, steps: int, began: datetime) -> Iterator[Evaluation]:
    rng = random.Random(step)
    for file, gain in (("heldout.jsonl", 0.42), ("hard.jsonl", 0.25)):
        chance = 0.3 + gain * (1 - math.exp(-2.6 * step / max(steps, 1)))
        tasks = []
        for number in range(100):
            scores = tuple(float(rng.random() < chance) for _ in range(4))
            tasks.append(
                EvaluatedTask(
                    task_id=str(number), digest="", scorer="math", agent="react", scores=scores,
                    turns=(2,) * 4, seconds=(14.0,) * 4,
                )
            )  # fmt: skip
        yield Evaluation(
            id=f"eval-{file.split('.')[0]}-{step}", status=EvaluationStatus.FINISHED, version=step, step=step,
            model=None, file=file, tasks_digest="a1", settings_digest="b2", samples=4, right_threshold=0.5,
            results={"total": summarize(tasks).to_json()}, by="node3-4300", finished_at=now(), began_at=began,
        )  # fmt: skip


def run_config(uri: str, run_name: str) -> RunConfig:
    """Return the configuration of the run's database."""
    return RunConfig(run_name=run_name, db_connection_string=uri, db_timeout_seconds=120.0)
