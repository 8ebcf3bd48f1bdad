"""A run of real groups for a tiny policy: sampled by hand, finalized and trained by its own trainer."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path

from forked import run_forked
from small_run import add_task
from small_run import claim as claim_slot

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.documents.task import task_key
from agentrl.documents.training import TrainStep
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.scoring.scorers import ScorerContext
from agentrl.store.client import Store, open_store
from agentrl.weights.publish import publish_base

GENERATIONS = 4
_TOKENS = 12
_LOGPROB = -5.5
"""About that of each token under a random policy of 259 tokens."""


@dataclass(frozen=True)
class StoredRun:
    """One run: its database, its folder, and the commands that train it."""

    name: str
    uri: str
    base: Path
    folder: Path

    @property
    def config(self) -> RunConfig:
        return RunConfig(run_name=self.name, db_connection_string=self.uri)

    @property
    def output(self) -> Path:
        return self.folder / self.name

    def flags(self, *more: str) -> list[str]:
        """The flags of the run's trainer."""
        return [
            "--run_name", self.name, *self.here(), "--output_dir", str(self.output),
            "--model_name_or_path", str(self.base), "--groups_per_step", "2", "--max_staleness", "99",
            "--num_generations", str(GENERATIONS), "--learning_rate", "1e-2", "--save_steps", "2",
            "--max_prompt_tokens", "1536", "--max_new_tokens", "512", *more,
        ]  # fmt: skip

    def here(self) -> list[str]:
        """The flags of the process."""
        return ["--db_connection_string", self.uri, "--log_dir", str(self.folder / "logs")]

    def command(self, *words: str, code: int = 0) -> str:
        """Run ``agentrl WORDS`` in a forked process, require its exit code and return its output."""
        program = "import sys; from agentrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
        found, output = run_forked(("-c", program), words, self.folder / "forked.log", 110)
        assert found == code, output
        return output

    def train(self, *more: str) -> str:
        """Train the run to the end."""
        return self.command("train", *self.flags(*more))

    def whatif(self, child: str, *more: str, code: int = 0) -> str:
        """Train the run's steps again as ``child``."""
        output = ("--output_dir", str(self.folder / child))
        return self.command("whatif", self.name, child, *self.here(), *output, *more, code=code)

    async def open(self, name: str | None = None) -> Store:
        """The store of the run or of a child."""
        return await open_store(RunConfig(run_name=name or self.name, db_connection_string=self.uri))

    async def steps(self, name: str | None = None) -> list[TrainStep]:
        """The committed steps of the run or of a child."""
        async with await self.open(name) as store:
            return await store.steps.find()

    async def fill(self, groups: int, seed: int = 0) -> None:
        """Sample and finalize ``groups`` groups whose scores differ."""
        async with await self.open() as store:
            await publish_base(store, self.base)
            await store.settings.begin("groups", asdict(GroupConfig()), "sample")
            dice = random.Random(seed)
            for order in range(groups):
                await add_task(store, task_key("train", 0, f"t{order:02}"), order, GENERATIONS)
                for member in range(GENERATIONS):
                    await _sample(store, dice, float(member < 1 + order % (GENERATIONS - 1)))
            finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
            assert await finalizer.run_waiting() == groups

    async def drop(self, *children: str) -> None:
        """Delete the databases of the run and its children."""
        async with await self.open() as store:
            for name in (self.name, *children):
                await store.database.client.drop_database(name)


def opposite(context: ScorerContext) -> float:
    """A scorer that calls right what was wrong."""
    return 1.0 - float(context.final_answer or 0)


async def _sample(store: Store, dice: random.Random, score: float) -> None:
    """Claim a slot, store one model call of random tokens, and score it."""
    claimed = await claim_slot(store)
    call = DispatchedSamplingTask(
        id=f"{claimed.record_id}/0", record=claimed.record_id, index=0, parent=None,
        status=CallStatus.COMPLETED, messages=({"role": "user", "content": "?"},),
        response={"content": "!", "tool_calls": []}, finish_reason="stop",
        versions=(VersionSpan(version=0, start=0, end=_TOKENS),), prompt_tokens=3,
        generated_tokens=_TOKENS, engine="e", generate_seconds=0.1,
        context_ids=pack_ids([dice.randrange(256) for _ in range(3)]),
        output_ids=pack_ids([dice.randrange(256) for _ in range(_TOKENS)]),
        logprobs=pack_floats([_LOGPROB + dice.uniform(-0.3, 0.3) for _ in range(_TOKENS)]),
    )  # fmt: skip
    await store.model_calls.add(claimed, call)
    await store.records.advance(
        claimed, RecordStatus.COMPLETED, final_answer=str(score), stop_reason=StopReason.ANSWERED
    )
    await store.records.advance(claimed, RecordStatus.SCORING)
    await store.attempts.score(claimed, score, {"scorer": "exact"})
