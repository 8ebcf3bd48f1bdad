"""Sample and train the quickstart's tiny model in one process, for the benchmark of task selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import demo_path  # noqa: F401
import torch
from demo.arithmetic import ArithmeticTextError, evaluate
from demo.tasks import CALCULATOR_TOOLS, QUESTION
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from agentrl.calls.prompts import Conversation
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.parsers.parser import get_parser
from agentrl.config.schema import ModelConfig
from agentrl.scoring.answers import extract_answer

TURNS, NEW_TOKENS = 2, 40
LEARNING_RATE, GRAD_NORM = 2e-4, 1.0
MICRO_BATCH = 64


@dataclass
class Trajectory:
    """One conversation as token ids. ``generated`` marks the tokens that the policy sampled."""

    ids: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    score: float = 0.0
    advantage: float = 0.0


class Policy:
    """The model: it samples and is trained."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.chat_format = open_chat_format(folder, ModelConfig())
        self.parser = get_parser("hermes")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.stops = sorted(self.chat_format.stop_ids)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def sample(self, questions: Sequence[str]) -> list[Trajectory]:
        """Sample one trajectory per question in one batch, with its score."""
        conversations = [
            Conversation(
                self.chat_format, [{"role": "user", "content": QUESTION.format(q)}], CALCULATOR_TOOLS
            )
            for q in questions
        ]
        trajectories = [Trajectory() for _ in questions]
        going = list(range(len(questions)))
        for _ in range(TURNS):
            outputs = self._generate([conversations[i].prompt.ids for i in going]) if going else []
            still = []
            for i, output in zip(going, outputs, strict=True):
                one, context = trajectories[i], conversations[i].prompt.context_ids
                one.ids += [*context, *output]
                one.generated += [False] * len(context) + [True] * len(output)
                text = self.chat_format.decode(output)
                answer = extract_answer(text, "answer")
                one.score = float(answer == evaluate(questions[i]))
                if answer is None:
                    conversations[i].append_generation(output, {"role": "assistant", "content": text})
                    conversations[i].append_messages(self._results(text))
                    still.append(i)
            going = still
        return trajectories

    def train(self, batch: Sequence[Trajectory]) -> None:
        """Take one policy-gradient step, with the token mean over the whole step."""
        tokens = sum(sum(one.generated[1:]) for one in batch)
        for start in range(0, len(batch), MICRO_BATCH):
            part = batch[start : start + MICRO_BATCH]
            ids = pad_sequence([torch.tensor(one.ids) for one in part], batch_first=True)
            weight = pad_sequence(
                [torch.tensor(one.generated, dtype=torch.float32) * one.advantage for one in part],
                batch_first=True,
            )
            logits = self.model(ids).logits[:, :-1]
            minus_logprobs = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            (minus_logprobs * weight[:, 1:] / tokens).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def score(self, questions: Sequence[str]) -> float:
        """Return the mean reward, without changing the random state of training."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return fmean(one.score for one in self.sample(questions))

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=NEW_TOKENS, eos_token_id=self.stops, pad_token_id=0,
        )  # fmt: skip
        return [self._cut(row[longest:].tolist()) for row in out]

    def _cut(self, ids: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(ids) if token in self.chat_format.stop_ids]
        return ids[: ends[0] + 1] if ends else ids

    def _results(self, text: str) -> list[dict[str, Any]]:
        parsed = self.parser.parse(text, ())
        if not parsed.tool_calls:
            return [{"role": "user", "content": "?"}]
        results = []
        for call in parsed.tool_calls:
            try:
                content = evaluate(str(call.arguments.get("expression", "")))
            except ArithmeticTextError as error:
                content = str(error)
            results.append({"role": "tool", "content": content})
        return results
