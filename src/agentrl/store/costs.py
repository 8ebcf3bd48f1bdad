"""Sum up what a run takes: time of GPUs, tools and judges, tokens, and money by ``--prices``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from agentrl.documents.status import RecordStatus, TaskStatus, values
from agentrl.store.mechanics.connection import (
    JUDGE_CHECK,
    RECORD,
    SAMPLER,
    SERVICE,
    STEP,
    TASK,
    Json,
    Repository,
    database_call,
)
from agentrl.store.records import WITHOUT_BRANCHES

if TYPE_CHECKING:
    from agentrl.llm.agent_config import Prices

_HOUR = 3600.0


SUMMED: Final = (
    "input_tokens", "cached_tokens", "generated_tokens", "generate_seconds", "tool_seconds", "api_tokens",
    "api_cost", "judge_tokens", "judge_seconds", "judge_cost",
)  # fmt: skip
"""The fields of a Record that hold what it took."""
SUMS: Final[Json] = {name: {"$sum": f"${name}"} for name in SUMMED}
"""The $group of Records that adds up what they took."""
ENDED: Final = values((RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.FAILED))
"""Statuses of Records that make no more model calls: an index holds what they took, and none is read."""
_GOING_ON: Final = values(status for status in RecordStatus if status.value not in ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostShare:
    """What a run took, divided by how many ``of`` it there are."""

    of: str
    count: int
    gpu_seconds: float
    tool_seconds: float
    judge_seconds: float
    tokens: float
    """Of prompts and answers: the policy's, judges' and those of other models."""
    api_cost: float
    """Of judges and other models."""
    total: float | None

    @property
    def named(self) -> str:
        """Return what it is, and for a share of how many."""
        article = {"trajectory": "a ", "informative group": "an "}.get(self.of)
        return self.of if article is None else f"{article}{self.of} (of {self.count:,})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What a run took so far, in all splits; dropped branches do not count."""

    trajectories: int = 0
    informative_groups: int = 0
    """Groups of which a trajectory was given to training."""
    engine_gpu_seconds: float = 0.0
    """The time since each engine registered, for each of its GPUs; evaluations' own and teachers too."""
    trainer_gpu_seconds: float = 0.0
    """The time of each rank up to the last step; 0 with ``--colocate``, whose device the engine counts."""
    generate_seconds: float = 0.0
    """Of model calls; many share an engine."""
    tool_seconds: float = 0.0
    judge_seconds: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of ``input_tokens`` that engines had in their caches."""
    generated_tokens: int = 0
    judge_tokens: int = 0
    judge_cost: float = 0.0
    api_tokens: int = 0
    api_cost: float = 0.0
    """Of fixed models and browse agents."""
    total: float | None = None
    """Money; None without ``--prices``."""

    def shares(self) -> list[CostShare]:
        """Return what the run, a trajectory and an informative group of it took; [] if it took nothing."""
        if self == RunCosts(total=self.total):
            return []
        counts = {"run": 1, "trajectory": self.trajectories, "informative group": self.informative_groups}
        return [
            CostShare(
                of=of,
                count=count,
                gpu_seconds=(self.engine_gpu_seconds + self.trainer_gpu_seconds) / count,
                tool_seconds=self.tool_seconds / count,
                judge_seconds=self.judge_seconds / count,
                tokens=(self.input_tokens + self.generated_tokens + self.api_tokens + self.judge_tokens)
                / count,
                api_cost=(self.api_cost + self.judge_cost) / count,
                total=None if self.total is None else self.total / count,
            )
            for of, count in counts.items()
            if count
        ]


class Costs(Repository):
    """Reads what a run takes. It never writes; of Records it reads those that go on."""

    @database_call
    async def read(self, prices: Prices | None) -> RunCosts:
        """Return the sums, and with ``prices`` the money."""
        lived: Json = {"$divide": [{"$subtract": ["$heartbeat", "$started_at"]}, 1000]}
        engines = {"$multiply": [{"$max": [lived, 0]}, {"$ifNull": ["$gpus", 1]}]}
        counted_steps = {"inherited": {"$ne": True}, "metrics.gpu_seconds": {"$gt": 0}}
        sums: dict[str, Any] = {
            "engine_gpu_seconds": await self._sum(SERVICE, {}, engines)
            + await self._sum(SAMPLER, {"gpus": {"$gt": 0}}, engines),
            "trainer_gpu_seconds": await self._sum(STEP, counted_steps, "$metrics.gpu_seconds"),
            "informative_groups": await self._collection(TASK).count_documents(
                {"split": "train", "status": TaskStatus.COMPLETED.value, "group.trained": {"$gt": 0}}
            ),
        }
        counted = {"$group": {"_id": None, "trajectories": {"$sum": 1}, **SUMS}}
        # Read the ended ones first: one that ends meanwhile is missed once, and never counted twice.
        for query in ({"status": {"$in": ENDED}}, {"status": {"$in": _GOING_ON}, **WITHOUT_BRANCHES}):
            for group in await self._aggregate(RECORD, {"$match": query}, counted, {"$unset": "_id"}):
                sums |= {name: sums.get(name, 0) + amount for name, amount in group.items()}
        for name, kind in (("tokens", int), ("seconds", float), ("cost", float)):
            gold = await self._sum(JUDGE_CHECK, {}, {"$sum": f"$scores.{name}"})
            sums[f"judge_{name}"] = sums.get(f"judge_{name}", 0) + kind(gold)
        return replace(costs := RunCosts(**sums), total=None if prices is None else _money(prices, costs))

    async def _sum(self, collection: str, query: Json, value: Json | str) -> float:
        group = {"$group": {"_id": None, "sum": {"$sum": value}}}
        found = await self._aggregate(collection, {"$match": query}, group)
        return float(found[0]["sum"]) if found else 0.0


def _money(prices: Prices, costs: RunCosts) -> float:
    gpus = prices.gpu_hour * (costs.engine_gpu_seconds + costs.trainer_gpu_seconds) / _HOUR
    return gpus + prices.tool_second * costs.tool_seconds + costs.api_cost + costs.judge_cost
