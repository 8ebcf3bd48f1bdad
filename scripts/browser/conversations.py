"""Make questions and conversations with tokens for a large run: counting problems, with a Python tool."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus, StopReason
from agentrl.documents.training import DBRecordData, Node, TrainableSpan

SCRIPT: Final = "<script>window.injected = 1</script>"
HOSTILE: Final = (
    f"{SCRIPT}<img src=x onerror='window.injected = 1'>\x1b[31mred\x1b[0m \u202eabc\u202c \x07 \u200b"
)
"""Text that a careless page would run, colour or reverse."""
_SYSTEM = "You solve counting problems. Use run_python to check your reasoning, then give one number."
_TOOL = {
    "type": "function",
    "function": {
        "name": "run_python", "description": "Run a Python program and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}  # fmt: skip
_VOCABULARY = 1200


@dataclass(frozen=True, slots=True)
class Question:
    """One problem, with its exact answer."""

    task_id: str
    query: str
    answer: str
    limit: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """The model calls of a Record, empty for one that is pruned, and the fields of the Record that count."""

    calls: Sequence[DispatchedSamplingTask]
    counts: dict[str, Any]

    def training_data(self, record: Record) -> DBRecordData:
        """Return one chain of all tokens, in which those of the policy are trained."""
        ids: list[np.ndarray[Any, Any]] = []
        spans, place, advantage = [], 0, record.advantage or 0.0
        for call in self.calls:
            context, output = unpack_ids(call.context_ids), unpack_ids(call.output_ids)
            start = place + len(context)
            place = start + len(output)
            ids += [context, output]
            spans.append(
                TrainableSpan(start=start, end=place, call=call.index, version=call.versions[0].version,
                              advantage=advantage, temperature=1.0)
            )  # fmt: skip
        logprobs = np.concatenate([unpack_floats(call.logprobs) for call in self.calls])
        return DBRecordData(
            id=record.id, record=record.id, task=record.task, split=record.split, score=record.score or 0.0,
            advantage=advantage, min_version=record.min_version or 0, max_version=record.max_version or 0,
            tokens=place, trainable_tokens=len(logprobs), turns=len(self.calls),
            nodes=(Node(start=0, end=place),), spans=tuple(spans),
            input_ids=pack_ids(np.concatenate(ids)), behavior_logprobs=pack_floats(logprobs),
        )  # fmt: skip


class Conversations:
    """Makes questions and conversations. Writes a tokenizer of their texts into ``folder``."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self._tokenizer = _train_tokenizer([text for n in range(200) for text in self._sample_texts(n)])
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))

    def question(self, number: int, *, hostile: bool = False) -> Question:
        """Return question ``number``: always the same one."""
        rng = random.Random(number)
        limit, a, b = rng.randrange(100, 2000), rng.randrange(2, 12), rng.randrange(3, 15)
        answer = sum(1 for value in range(1, limit + 1) if value % a == 0 or value % b == 0)
        query = f"How many integers from 1 to {limit} are divisible by {a} or by {b}?"
        name = f"count_{number:05d}"
        if hostile:
            return Question(f"{name} {SCRIPT}", f"{HOSTILE} {query}", str(answer), limit, a, b)
        return Question(name, query, str(answer), limit, a, b)

    def converse(self, record: Record, question: Question, *, complete: bool, hostile: bool) -> Conversation:
        """Return the conversation that ends in the Record's answer; without calls unless ``complete``."""
        version, turns = record.min_version or 0, record.turns
        if not complete:
            tokens = round(self._rng.lognormvariate(5.4 + 0.0006 * version, 0.55)) + 40 * turns
            return Conversation((), _counts(record, turns, turns - 1, tokens, 160 + tokens, ()))
        calls = [
            self._call(record, question, index, last=index == turns - 1, hostile=hostile)
            for index in range(turns)
        ]
        prompts = _prompt_lengths(calls)
        calls = [
            DispatchedSamplingTask(**{**_fields(call), "prompt_tokens": length})
            for call, length in zip(calls, prompts, strict=True)
        ]
        tokens = sum(call.generated_tokens for call in calls)
        return Conversation(
            calls, _counts(record, turns, turns - 1, tokens, prompts[-1], tuple(call.id for call in calls))
        )

    def _call(
        self, record: Record, question: Question, index: int, *, last: bool, hostile: bool
    ) -> DispatchedSamplingTask:
        thoughts, said = self._texts(question, record, index, last=last)
        code = _code(question, index)
        if hostile:
            thoughts, said = f"{HOSTILE} {thoughts}", f"{HOSTILE} {said}"
        executions: tuple[ToolExecution, ...] = ()
        arguments = json.dumps({"code": code})
        function = {"name": "run_python", "arguments": arguments}
        tool_calls = [] if last else [{"type": "function", "function": function}]
        if not last:
            executions = (
                ToolExecution(name=SCRIPT if hostile else "run_python", arguments={"code": code},
                              result=HOSTILE if hostile else f"{question.answer}\n", error=False,
                              seconds=round(0.05 + self._rng.expovariate(2), 3), server="sandbox"),
            )  # fmt: skip
        system = ({"role": "system", "content": _SYSTEM}, {"role": "user", "content": question.query})
        context = f"{_SYSTEM}\n{question.query}\n" if index == 0 else f"{question.answer}\n"
        generated = f"<think>\n{thoughts}\n</think>\n{said}" + ("" if last else f"\n<tool_call>{arguments}")
        output = np.array(self._tokenizer.encode(generated).ids, np.int32)
        numbers = np.random.default_rng(abs(hash((record.id, index))) % 2**32)
        surprise = numbers.random(len(output)) < 0.12
        logprobs = -np.where(
            surprise, numbers.exponential(1.6, len(output)), numbers.exponential(0.08, len(output))
        )
        started = record.created_at + timedelta(seconds=4.0 * index)
        return DispatchedSamplingTask(
            id=f"{record.id}/{index}", record=record.id, index=index,
            parent=f"{record.id}/{index - 1}" if index else None, status=CallStatus.COMPLETED,
            messages=system if index == 0 else ({"role": "tool", "name": "run_python", "execution": 0},),
            response={"role": "assistant", "content": said, "reasoning_content": thoughts,
                      "tool_calls": tool_calls},
            tool_executions=executions, tools=None if index else (_TOOL,),
            finish_reason="stop" if last else "tool_calls",
            versions=(VersionSpan(version=record.min_version or 0, start=0, end=len(output)),),
            prompt_tokens=0, generated_tokens=len(output), engine=f"engine-{index % 4 + 1}",
            sampling_params={"temperature": 1.0, "top_p": 1.0}, created_at=started,
            generate_seconds=round(len(output) / 95, 3),
            tool_seconds=sum(each.seconds for each in executions),
            context_ids=pack_ids(self._tokenizer.encode(context).ids), output_ids=pack_ids(output),
            logprobs=pack_floats(logprobs.astype(np.float32)),
        )  # fmt: skip

    def _texts(self, question: Question, record: Record, index: int, *, last: bool) -> tuple[str, str]:
        """Return the thoughts and the visible text of a turn."""
        a, b, limit = question.a, question.b, question.limit
        if last:
            answer = record.final_answer or question.answer
            stopped = record.stop_reason is not StopReason.ANSWERED
            return (
                f"The program agrees with inclusion and exclusion, so the count up to {limit} is {answer}.",
                "Let me check once more." if stopped else f"The answer is <answer>{answer}</answer>.",
            )
        if index == 0:
            return (
                f"Multiples of {a}: {limit} // {a} = {limit // a}. Multiples of {b}: {limit} // {b} ="
                f" {limit // b}. Numbers divisible by both are multiples of their least common multiple, and"
                " I must subtract them once. I will verify this with a short program before I answer.",
                "I count the multiples of each, subtract the overlap, and check it by running a program.",
            )
        return (
            f"Was the bound inclusive? The question says from 1 to {limit}, so range({limit} + 1) is right.",
            "I check the bound with a second program.",
        )

    def _sample_texts(self, number: int) -> list[str]:
        question = self.question(number)
        return [
            _SYSTEM,
            question.query,
            _code(question, 0),
            _code(question, 1),
            f"The program agrees with inclusion and exclusion: <answer>{question.answer}</answer>.",
            f"<think>\nMultiples of {question.a}: {question.limit} // {question.a}. Numbers divisible by both"
            " are multiples of their least common multiple.\n</think>\nI check it by running a program.",
        ]


def _code(question: Question, index: int) -> str:
    condition = f"n % {question.a} == 0 or n % {question.b} == 0"
    if index == 0:
        return f"print(sum(1 for n in range(1, {question.limit + 1}) if {condition}))"
    return f"found = [n for n in range(1, {question.limit + 1}) if {condition}]\nprint(len(found))"


def _counts(
    record: Record, turns: int, tools: int, tokens: int, prompt: int, calls: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "turns": turns, "tool_calls": tools, "generated_tokens": tokens, "prompt_tokens": prompt,
        "input_tokens": prompt * turns, "cached_tokens": prompt * (turns - 1), "traj": calls,
    }  # fmt: skip


def _prompt_lengths(calls: Sequence[DispatchedSamplingTask]) -> list[int]:
    lengths, place = [], 0
    for call in calls:
        place += len(unpack_ids(call.context_ids))
        lengths.append(place)
        place += call.generated_tokens
    return lengths


def _fields(call: DispatchedSamplingTask) -> dict[str, Any]:
    return {name: getattr(call, name) for name in call.__dataclass_fields__}


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer
