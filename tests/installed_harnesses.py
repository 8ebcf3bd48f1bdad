"""Drive installed agent harnesses against a gateway whose engine spells its answers letter by letter."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_models import KEEPS_ALL
from gateway_run import answerer_of, gateway_task
from rollout_fakes import FakeTools, ScriptedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.calls.prompts import chain_of
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.renderer import ChatTemplate, ControlTokens, TemplateRenderer
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, SamplingConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.images import Image
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    VersionSpan,
    branches_of,
    main_branch,
    unpack_ids,
)
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.documents.training import DBRecordData
from agentrl.gateway.app import GatewayHost
from agentrl.inference.engine import EncodedIds, Generation, Progress
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store
from agentrl.worlds.sandbox.local import namespace_problem

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / ".harnesses" / "bin"
LIMITS = {"max_prompt_tokens": 300_000, "prompt_reserve_tokens": 1000, "max_turns": 50}


def require_harness(name: str, command: str) -> None:
    """Skip unless a harness is installed, or fail where AGENTRL_REQUIRE_HARNESSES names it."""
    if (COMMANDS / command).exists():
        _require_reachable(name)
        return
    reason = f"{name} is not installed; run: bash scripts/setup_harnesses.sh {name}"
    if name in os.environ.get("AGENTRL_REQUIRE_HARNESSES", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


def _require_reachable(name: str) -> None:
    """Skip a harness of Python whose interpreter is hidden from the user of a sandbox without namespaces."""
    if name not in ("mini-swe-agent", "openai-agents") or namespace_problem() is None:
        return
    python = (ROOT / ".venv-harnesses" / "bin" / "python").resolve()
    hidden = [folder for folder in python.parents if not folder.stat().st_mode & 1]
    if hidden:
        pytest.skip(f"no namespaces, and other users cannot enter {hidden[0]}; set PYTHON for the set-up")


@functools.cache
def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE trained on our pages; the control tokens of ChatML come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train([str(page) for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def bpe_format() -> ChatFormat:
    """ChatML with tools on ``bpe_tokenizer``."""
    tokenizer = bpe_tokenizer()
    tokens = ControlTokens(tokenizer, KEEPS_ALL)
    end = tokenizer.token_to_id("<|im_end|>")
    return ChatFormat(TemplateRenderer(ChatTemplate(KEEPS_ALL, {}), tokens, {end}, "hermes"))


class SpellingEngine(ScriptedEngine):
    """Answers one token a letter: encoding the text again would give other ids."""

    def __init__(self, script: Callable[[str], str], hangs_at: int | None = None) -> None:
        super().__init__(bpe_format(), script)
        self.hangs_at = hangs_at
        self.hangs = asyncio.Event()

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """Answer the script's text for a prompt, and stop."""
        if self.hangs_at is not None and len(self.prompts) >= self.hangs_at:
            self.hangs.set()
            await asyncio.Event().wait()
        answer = self.script[0]
        assert callable(answer)
        tokenizer = bpe_tokenizer()
        text = answer(tokenizer.decode(list(input_ids), skip_special_tokens=False))
        letters = [tokenizer.encode(letter).ids for letter in text]
        ids = [*itertools.chain.from_iterable(letters), tokenizer.token_to_id("<|im_end|>")]
        self.prompts.append(list(input_ids))
        self.outputs.append(ids)
        for start in range(0, len(ids) if progress is not None else 0, 16):
            progress(start, ids[start : start + 16])  # type: ignore[misc]
            await asyncio.sleep(0)
        return Generation(
            output_ids=tuple(ids), logprobs=tuple(-0.5 for _ in ids),
            versions=(VersionSpan(version=self.version, start=0, end=len(ids)),), finish_reason="stop",
            prompt_tokens=len(input_ids), cached_tokens=0, seconds=0.01, engine_url="http://engine",
        )  # fmt: skip


def call(tool: str, /, **arguments: object) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


class InstalledRun:
    """One trajectory of an installed harness, as ``agentrl sample`` runs it."""

    def __init__(
        self, store: Store, config: Path, script: Callable[[str], str], *, hangs_at: int | None = None,
        **agent: int,
    ) -> None:  # fmt: skip
        """The engine never ends its call number ``hangs_at``, counted from 0, and those after it."""
        limits: dict[str, Any] = {**LIMITS, **agent}
        self.store = store
        self.engine = SpellingEngine(script, hangs_at)
        self.claim: Claim
        self.host = GatewayHost(answerer_of(store, self.engine, **limits), GatewayConfig())
        self.worker = Worker(
            store=store, router=self.engine, tools=FakeTools(), chat_format=self.engine.chat_format,
            params=SamplingParams(), seed=7,
            agent=AgentConfig(agent_name="command", agent_cfg_path=str(config), **limits),
            sampling=SamplingConfig(), claims=ClaimConfig(max_attempts=1), gateway=self.host,
        )  # fmt: skip
        self.calls: list[DispatchedSamplingTask] = []
        self.main: tuple[DispatchedSamplingTask, ...] = ()

    async def run(self, query: str, answer: str) -> Record:
        """Run a trajectory to its score; return its Record."""
        await self.store.tasks.load([replace(gateway_task(slots=1), query=query, answer=answer)])
        owner = f"owner {id(self)}"
        claim = await self.store.claims.claim(split="train", owner=owner, lease_seconds=600)
        assert claim is not None
        self.claim = claim
        try:
            await self.worker.run(claim)
        finally:
            await self.host.close()
        record = await self.store.records.get(claim.record_id)
        assert record is not None
        self.calls = list(await self.store.model_calls.by_record(record.id))
        main = main_branch(branches_of(self.calls))
        self.main = () if main is None else main.calls
        return record

    def check_exact(self, record: Record) -> DBRecordData:
        """Check that each call has the engine's ids; return the training data, which is one chain."""
        by_id = {call.id: call for call in self.calls}
        served = {
            (tuple(prompt), tuple(output))
            for prompt, output in zip(self.engine.prompts, self.engine.outputs, strict=True)
        }
        chains = [chain_of(by_id, call.id) for call in self.calls]
        assert {(tuple(chain.prompt_ids), tuple(chain.output_ids)) for chain in chains} == served
        assert len(self.calls) == len(self.engine.prompts)
        parents = [call.parent for call in self.main]
        assert parents == [None, *(call.id for call in self.main[:-1])]
        others = sorted({call.index for call in self.calls} - {call.index for call in self.main})
        assert list(record.untrained_calls) == others
        task = replace(gateway_task(slots=1))
        data = to_training_data(task, record, self.calls, 0.5, GroupConfig())
        assert data is not None
        last = chain_of(by_id, self.main[-1].id)
        assert unpack_ids(data.input_ids).tolist() == [*last.prompt_ids, *last.output_ids]
        assert len(data.nodes) == 1
        assert data.trainable_tokens == sum(call.generated_tokens for call in self.main)
        return data
