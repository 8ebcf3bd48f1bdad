"""Define the environments of ``learning.py``: their tasks, flags, and the model or its warm-up.

The warm-up teaches a model with random weights the form of an answer only: a pupil who answers any number, a
player who moves at random. The robot also sees what to read: one move in two follows its goal. The pupil of
the sandbox computes four sums in ten by a program, and guesses the others wrongly. What is right or better is
learned by reinforcement.
"""

from __future__ import annotations

import json
import os
import random
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.environments.environment import ENVIRONMENTS, TaskRequest
from agentrl.rollout.load_tasks import Address
from agentrl.worlds.textarena import Game

CONFIGS = Path(os.path.relpath(Path(__file__).parent / "configs"))
"""As seen from here: the stored flags of a run name it."""
SMOLLM = Path(".agentrl/models/SmolLM2-135M-Instruct")
GAME = "FrozenLake-v0"
MOVES = ("up", "down", "left", "right")
ROOT = Path(__file__).parents[2]
ROBOT_PORT = 18731
LONGEST_WALK = 3
FOLLOWED = 0.5
"""Share of the robot's moves in the warm-up that follow its goal; the others are random."""
LARGEST_ANSWER = 10
GUESSED = 0.6
"""Share of the sums in the warm-up that are answered without a program."""

Conversation = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One environment: where its tasks come from, its model or the warm-up of one, how it is trained."""

    name: str
    options: str
    """Its address, without ``n`` and ``seed``."""
    warm_up: Callable[[Case, random.Random], Iterator[Conversation]] | None = None
    warm_up_steps: int = 0
    flags: tuple[str, ...]
    steps: int
    evaluations: int = 6
    """How many versions are evaluated, without the first."""
    exported_steps: int = 100
    """Of how many last steps an export keeps the model calls; of evaluations it keeps all."""
    held_out: int = 96
    model: Path | None = None
    """The pretrained model; None: one of two layers, with random weights before the warm-up."""
    context_tokens: int = 1024
    whole_numbers: bool = False
    """Whether a number may be one token; else each digit is one."""
    training_tasks: int = 1000
    """Few enough that most held-out tasks have another text; those with the same text are left out."""
    server: tuple[str, ...] = ()
    """The command of the server that has the environment; its last word is the port."""

    def address(self, n: int, seed: int) -> str:
        """Return the address of ``n`` tasks."""
        return f"env:{self.options}{'&' if '?' in self.options else '?'}n={n}&seed={seed}"

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Yield the conversations of the warm-up without end."""
        return iter(()) if self.warm_up is None else self.warm_up(self, random.Random(f"{self.name}/{seed}"))


def divisors(case: Case, choice: random.Random) -> Iterator[Conversation]:
    """Yield questions with a random answer from 1 to 10, whatever the numbers are."""
    address = Address.parse(case.address(2000, choice.getrandbits(30)))
    environment = ENVIRONMENTS.get(address.name)
    request = TaskRequest(n=address.n, seed=address.seed, split="warm_up", options=address.options)
    tasks = list(environment.tasks(request))
    system = str(environment.task_defaults["system_prompt"])
    while True:
        answer = _said(f"<answer>{choice.randint(1, LARGEST_ANSWER)}</answer>")
        yield {"messages": [*_question(system, str(choice.choice(tasks)["query"])), answer]}


def walks(_: Case, choice: random.Random) -> Iterator[Conversation]:
    """Yield games of a player who moves at random."""
    while True:
        game = Game(GAME, choice.getrandbits(30))
        messages = [{"role": "user", "content": game.prompt}]
        for _ in range(LONGEST_WALK):
            move = f"[{choice.choice(MOVES)}]"
            said = game.step(move)
            messages.append(_said(move))
            if game.is_over:
                break
            messages.append({"role": "user", "content": said})
        yield {"messages": messages}


def robots(_: Case, choice: random.Random) -> Iterator[Conversation]:
    """Yield one move of a robot that follows its goal in one move of two, else moves at random."""
    while True:
        x, y, far = choice.randint(1, 9), choice.randint(1, 9), choice.randint(1, LONGEST_WALK)
        way = choice.choice(MOVES)
        move = way if choice.random() < FOLLOWED else choice.choice(MOVES)
        seen = f"robot at {x} {y}, goal {far} {way}"
        yield {"messages": [{"role": "user", "content": seen}, _said(move)]}


def programs(_: Case, choice: random.Random) -> Iterator[Conversation]:
    """Yield the conversations of the example of the sandbox: most guess a sum, the others compute it."""
    prepare = runpy.run_path(str(ROOT / "assets/examples/sandbox/prepare.py"))
    while True:
        yield from prepare["conversations"](1000, GUESSED, choice.getrandbits(30))


def corpus(case: Case, seed: int, conversations: int = 400) -> Iterator[str]:
    """Yield the texts on which the tokenizer is trained."""
    for item in islice(case.conversations(seed), conversations):
        yield "\n".join(
            f"{message['role']}\n{message['content']}{json.dumps(message.get('tool_calls', ''))[1:-1]}"
            for message in item["messages"]
        )


def _question(system: str, text: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


_COMMON = (
    "--num_train_epochs", "50", "--num_generations", "8", "--max_staleness", "1", "--loss_calculater", "GRPO",
    "--token_level_loss", "true", "--epsilon", "0.2", "--epsilon_higher", "0.1",
    "--importance_weight_cap_ratio", "4.0", "--advantage", "leave_one_out", "--max_grad_norm", "1.0",
    "--max_running_requests", "128", "--max_total_tokens", "65536", "--max_tokens", "4096",
    "--max_concurrent_samples_per_process", "64", "--prompt_reserve_tokens", "16",
    "--preferred_sampling_params", '{"temperature": 1.0, "top_p": 1.0}',
)  # fmt: skip


_SMOLLM = (
    *_COMMON, "--max_staleness", "0", "--groups_per_step", "4", "--max_running_requests", "32",
    "--max_total_tokens", "12288", "--max_concurrent_samples_per_process", "32", "--max_turns", "1",
    "--lora_rank", "16", "--freeze", r"layers\.([0-9]|1[0-4])\.", "--autocast_bf16", "auto",
    "--learning_rate", "3e-3", "--lr_scheduler_type", "inverse_sqrt",
    "--lr_scheduler_kwargs", '{"timescale": 1}',
)  # fmt: skip
"""As in the quickstart: adapters in the upper half of the layers, on what the newest weights sampled."""


def quick_case(case: Case) -> Case:
    """Return the case with one step of two groups, and few tasks."""
    flags = (*case.flags, "--groups_per_step", "2", "--num_generations", "2", "--min_score_spread", "0",
             "--drop_zero_advantage", "false")  # fmt: skip
    return replace(case, warm_up_steps=0, steps=1, held_out=4, training_tasks=8, flags=flags)


CASES = {
    "gcd": Case(
        name="gcd",
        options=f"reasoning_gym?config={CONFIGS / 'gcd.yml'}",
        warm_up=divisors,
        warm_up_steps=120,
        flags=(*_COMMON, "--groups_per_step", "16", "--max_turns", "1", "--max_prompt_tokens", "160",
               "--max_new_tokens", "12", "--learning_rate", "3e-4"),
        steps=120,
        exported_steps=10,
        held_out=128,
    ),
    "frozen_lake": Case(
        name="frozen_lake",
        options=f"textarena?game={GAME}",
        warm_up=walks,
        warm_up_steps=40,
        flags=(*_COMMON, "--groups_per_step", "6", "--max_prompt_tokens", "1984",
               "--max_new_tokens", "12", "--learning_rate", "1e-3"),
        steps=80,
        evaluations=4,
        exported_steps=10,
        held_out=64,
        training_tasks=150,
        context_tokens=2048,
    ),
    "sandbox": Case(
        name="sandbox",
        options="demo.sums:Sums",
        warm_up=programs,
        warm_up_steps=380,
        flags=(*_COMMON, "--agent_name", "react", "--tool_call_parser", "hermes", "--max_turns", "2",
               "--tool_config_path", "assets/examples/sandbox/tools.yml", "--groups_per_step", "8",
               "--max_prompt_tokens", "256", "--max_new_tokens", "64", "--learning_rate", "2e-4"),
        steps=24,
        evaluations=3,
        held_out=64,
        training_tasks=400,
    ),
    "openenv": Case(
        name="openenv",
        options=f"openenv?url=http://127.0.0.1:{ROBOT_PORT}&max_turns=3",
        warm_up=robots,
        warm_up_steps=300,
        flags=(*_COMMON, "--groups_per_step", "8", "--max_prompt_tokens", "240",
               "--max_new_tokens", "6", "--learning_rate", "1e-3", "--max_grad_norm", "0.3"),
        steps=30,
        evaluations=3,
        held_out=64,
        training_tasks=400,
        server=(str(ROOT / ".venv-openenv/bin/python"), str(ROOT / "assets/examples/openenv/server.py"),
                "--port", str(ROBOT_PORT)),
    ),
    **{
        name: Case(
            name=name,
            options=f"demo.words:{kind}",
            flags=(*_SMOLLM, "--max_prompt_tokens", "320", "--max_new_tokens", "24"),
            steps=16,
            evaluations=2,
            held_out=32,
            model=SMOLLM,
        )
        for name, kind in (("reverse_words", "ReverseWords"), ("sort_words", "SortWords"))
    },
}  # fmt: skip
