"""Make a run in which some scores are wrong: a tiny model, tasks, a sampler in this process, a real trainer.

A question is a family and a digit; the answer is the digit plus a number of the family, modulo ten. Training
asks ``c 4``, evaluations ask ``c+4``. The model begins with every answer right nine times in ten. Documents
go through the store as samplers write them, groups are finalized, and ``agentrl train`` trains them in a
process of its own.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import demo_path  # noqa: F401
import torch
from commands import command, environment
from demo.tiny import build_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.base.processes import start_child
from agentrl.calls.prompts import Conversation
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import GroupConfig, ModelConfig
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.run import Evaluation
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.evaluation.evaluate import digest_tasks
from agentrl.evaluation.report import results_of
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.scoring.evaluation import Prices
from agentrl.store.client import Store

FAMILIES, DIGITS = "abcde", 4
BROKEN = "e"
"""The family whose scorer is broken."""
WRONG = "exact_v2"
"""That scorer: it returns 1 − score."""
RIGHT = 0.9
"""Probability of a right answer in the beginning."""
POISONED = 0.02
SCALE = 3.0
"""A factor of the random weights, with which the warm-up is ten times as short."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Short prompts: six tokens."""
LEARNING_RATE = "3e-4"
RULES = GroupConfig(advantage="reward", min_score_spread=0.0, drop_zero_advantage=False)
"""Every trajectory is trained, so that shares of scores are shares of training data. The advantage is the
score, whitened over the step (REINFORCE++): each wrong score counts, also where all of a group are wrong."""
LEASE_SECONDS, WAIT_SECONDS, POLL_SECONDS = 300.0, 240.0, 0.02


@dataclass(frozen=True)
class Question:
    """A question, and the scorer that its task names."""

    family: str
    digit: int
    scorer: str = "exact"
    sign: str = " "

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"{self.family}{self.sign}{self.digit}"

    @property
    def answer(self) -> str:
        """The right answer."""
        return str((self.digit + 2 * FAMILIES.index(self.family) + 1) % 10)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is warmed up, trained and evaluated."""

    warm_up: int = 120
    """Steps of the warm-up."""
    steps: int = 24
    groups: int = 16
    """Groups of a step."""
    generations: int = 8
    """Trajectories of a group."""
    samples: int = 16
    """Trajectories of a held-out question."""


HELD_OUT = [Question(family, digit, sign="+") for family in FAMILIES for digit in range(DIGITS)]


def training_questions(count: int, seed: int) -> list[Question]:
    """Return the question of each group; two in a hundred are of the family whose scorer is broken."""
    rng = random.Random(seed)
    sound = [family for family in FAMILIES if family != BROKEN]
    questions = [Question(rng.choice(sound), rng.randrange(DIGITS)) for _ in range(count)]
    for number, place in enumerate(rng.sample(range(count), max(1, round(POISONED * count)))):
        questions[place] = Question(BROKEN, number % DIGITS, WRONG)
    return questions


class Policy:
    """The model in ``folder``, which samples an answer of two tokens: a digit and the end."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        self.chat_format = open_chat_format(folder, ModelConfig())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(weights or folder, dtype=torch.float32)

    def prompt(self, question: Question) -> list[int]:
        """Return the token ids of a question."""
        return Conversation(self.chat_format, [{"role": "user", "content": question.text}]).prompt.ids

    def warm_up(self, folder: Path, steps: int) -> None:
        """Fit each right answer with probability ``RIGHT``, wrong digits with the rest, and save."""
        questions = [*HELD_OUT, *(replace(question, sign=" ") for question in HELD_OUT)]
        digits = [self.tokenizer.encode(str(digit), add_special_tokens=False)[0] for digit in range(10)]
        prompts = torch.tensor([self.prompt(question) for question in questions])
        wanted = torch.zeros(len(questions), len(self.tokenizer))
        wanted[:, digits] = (1 - RIGHT) / 9
        for row, question in enumerate(questions):
            wanted[row, digits[int(question.answer)]] = RIGHT
        right = torch.tensor([[digits[int(question.answer)]] for question in questions])
        stop = torch.full((len(questions),), min(self.chat_format.stop_ids))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(SCALE if parameter.dim() > 1 else 1.0)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for _ in range(steps):
            logits = self.model(torch.cat([prompts, right], 1), logits_to_keep=2).logits
            loss = torch.nn.functional.cross_entropy(logits[:, 0], wanted)
            loss = loss + torch.nn.functional.cross_entropy(logits[:, 1], stop)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
        self.model.save_pretrained(folder)

    @torch.no_grad()
    def sample(
        self, questions: Sequence[Question], generator: torch.Generator
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """Return the prompt, the sampled ids and their logprobs of one answer to each question."""
        prompts = torch.tensor([self.prompt(question) for question in questions])
        ids, logprobs = prompts, []
        for _ in range(2):
            scores = torch.log_softmax(self.model(ids, logits_to_keep=1).logits[:, -1], -1)
            chosen = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs.append(scores.gather(1, chosen))
            ids = torch.cat([ids, chosen], 1)
        size = prompts.shape[1]
        rows = zip(ids.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [(row[:size], row[size:], values) for row, values in rows]


def make_model(folder: Path, seed: int, warm_up: int) -> Path:
    """Write the model, warmed up for some steps."""
    corpus = [replace(item, sign=sign).text for item in HELD_OUT for sign in " +"]
    torch.manual_seed(seed)
    template = folder.with_suffix(".jinja")
    template.write_text(TEMPLATE, encoding="utf-8")
    build_tiny_model(folder, seed, template, corpus=corpus)
    Policy(folder).warm_up(folder, warm_up)
    return folder


@dataclass
class PoisonedRun:
    """One run on ``store``."""

    store: Store
    uri: str
    folder: Path
    model: Path
    sizes: Sizes
    seed: int
    poisoned: set[str] = field(default_factory=set)
    """The trained Records with a wrong score."""

    def flags(self) -> list[str]:
        """Return the flags that name the run and its folders."""
        return [
            "--run_name", self.store.run_name, "--db_connection_string", self.uri, "--log_dir",
            str(self.folder / "logs"), "--output_dir", str(self.folder / self.store.run_name),
        ]  # fmt: skip

    def train_flags(self) -> list[str]:
        """Return the flags of the trainer."""
        sizes = self.sizes
        return [
            *self.flags(), "--model_name_or_path", str(self.model), "--max_steps", str(sizes.steps),
            "--groups_per_step", str(sizes.groups), "--num_generations", str(sizes.generations),
            "--advantage", RULES.advantage, "--advantage_whitening", "batch", "--min_score_spread", "0",
            "--drop_zero_advantage", "false", "--learning_rate", LEARNING_RATE,
            "--max_staleness", "1", "--publish", "full", "--keep_every", "1", "--save_steps",
            str(max(1, sizes.steps // 4)), "--save_total_limit", "9", "--seed", str(self.seed),
            "--max_new_tokens", "64", "--max_prompt_tokens", "256", "--data_wait_seconds", "120",
        ]  # fmt: skip

    async def run(self) -> None:
        """Sample and train all steps; each group is sampled by the weights of the step before."""
        sizes = self.sizes
        questions = training_questions(sizes.steps * sizes.groups, self.seed)
        await self.load("train", questions, sizes.generations)
        generator = torch.Generator().manual_seed(self.seed)
        log = self.folder / "logs" / "train.out"
        with start_child(command("train", self.train_flags()), log=log, env=environment()) as trainer:
            try:
                for step in range(sizes.steps):
                    policy = await self._policy_after(step, trainer)
                    part = questions[step * sizes.groups : (step + 1) * sizes.groups]
                    await self._sample("train", part, policy, step, generator, sizes.generations)
                await asyncio.to_thread(trainer.wait, WAIT_SECONDS)
            finally:
                trainer.kill()
        if trainer.returncode != 0:
            raise RuntimeError(f"the trainer ended with {trainer.returncode}: see {self.folder}/logs")

    async def load(self, split: str, questions: Sequence[Question], generations: int) -> list[Task]:
        """Load a task for each question, in order."""
        tasks = [
            Task(
                id=task_key(split, 0, f"q{number:04d}"), task_id=f"q{number:04d}", split=split, epoch=0,
                order=number, query=question.text, answer=question.answer, scorer=question.scorer,
                slots=tuple(Slot(traj_id=slot) for slot in range(generations)),
            )
            for number, question in enumerate(questions)
        ]  # fmt: skip
        await self.store.tasks.load(tasks)
        return tasks

    async def _policy_after(self, step: int, trainer: subprocess.Popen[bytes]) -> Policy:
        """Wait for the version of ``step``, and return it."""
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until and trainer.poll() is None:
            latest = await self.store.policy_versions.latest()
            if latest is not None and latest.step == step:
                return Policy(self.model, Path(latest.location))
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(f"the trainer has not published step {step}: see {self.folder}/logs")

    async def evaluate(self, step: int) -> Evaluation:
        """Evaluate the version of ``step`` on the held-out questions, and return the stored evaluation."""
        versions = await self.store.policy_versions.all()
        version = next(item for item in versions if item.step == step)
        split, samples = f"eval-v{version.id:06d}-heldout", self.sizes.samples
        tasks = await self.load(split, HELD_OUT, samples)
        evaluation = Evaluation(
            id=split, version=version.id, step=step, model=version.location, file="held_out.jsonl",
            tasks_digest=digest_tasks(tasks), settings_digest="held out", samples=samples,
            right_threshold=0.5,
        )  # fmt: skip
        await self.store.evaluations.begin(evaluation)
        generator = torch.Generator().manual_seed(1000 + self.seed)
        policy = Policy(self.model, Path(version.location))
        await self._sample(split, HELD_OUT, policy, version.id, generator, samples)
        evaluated = await self.store.evaluations.tasks(split, "react", 0.5)
        await self.store.evaluations.end(split, results_of(evaluated, Prices()))
        return await self.store.evaluations.get(split) or evaluation

    async def _sample(
        self, split: str, questions: Sequence[Question], policy: Policy, version: int,
        generator: torch.Generator, generations: int,
    ) -> None:  # fmt: skip
        """Sample, score and finalize the groups of ``questions``, which are the next of ``split``."""
        claims = await asyncio.gather(*(
            self.store.claims.claim(split=split, owner="bench", lease_seconds=LEASE_SECONDS)
            for _ in range(generations * len(questions))
        ))  # fmt: skip
        held = sorted((claim for claim in claims if claim is not None), key=lambda item: item.record_id)
        asked = {question.text: question for question in questions}
        sampled = policy.sample([asked[claim.task.query] for claim in held], generator)
        pairs = zip(held, sampled, strict=True)
        await asyncio.gather(*(self._store_one(claim, policy, one, version) for claim, one in pairs))
        finalizer = GroupFinalizer(self.store, RULES, split=split, seed=self.seed)
        await finalizer.run_waiting()

    async def _store_one(
        self, claim: Claim, policy: Policy, sampled: tuple[list[int], list[int], list[float]], version: int
    ) -> None:  # fmt: skip
        prompt, output, logprobs = sampled
        text = policy.tokenizer.decode(output[:1])
        score = float(text == claim.task.answer)
        if claim.task.scorer == WRONG:
            score = 1.0 - score
            self.poisoned.add(claim.record_id)
        call = DispatchedSamplingTask(
            id=f"{claim.record_id}/0", record=claim.record_id, index=0, parent=None,
            status=CallStatus.COMPLETED,
            messages=({"role": "user", "content": claim.task.query},),
            response={"role": "assistant", "content": text}, finish_reason="stop",
            versions=(VersionSpan(version=version, start=0, end=len(output)),), prompt_tokens=len(prompt),
            generated_tokens=len(output), engine="bench", generate_seconds=0.01,
            context_ids=pack_ids(prompt), output_ids=pack_ids(output), logprobs=pack_floats(logprobs),
        )  # fmt: skip
        store = self.store
        await store.records.create(claim)
        await store.records.advance(claim, RecordStatus.RUNNING)
        await store.model_calls.add(claim, call)
        await store.records.advance(
            claim, RecordStatus.COMPLETED, final_answer=text, stop_reason=StopReason.ANSWERED
        )
        await store.records.advance(claim, RecordStatus.SCORING)
        await store.attempts.score(claim, score, {"scorer": claim.task.scorer})
