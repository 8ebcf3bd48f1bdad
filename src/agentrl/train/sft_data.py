"""Convert conversations of a file, or Records of a run, to the training data of supervised fine-tuning."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.chat.chat_format import ChatFormat, TokenizedConversation
from agentrl.chat.conversation_file import read_conversations
from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.convert import to_training_data
from agentrl.documents.images import Image
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ConfigError, TaskFileError

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
_ADVANTAGE = 1.0


Images = Mapping[str, Image]
"""The images of training data, by hash."""


def from_conversations(path: Path, chat_format: ChatFormat) -> tuple[list[DBRecordData], Images]:
    """Return each conversation of a JSONL file as a chain, and the images that they show.

    TaskFileError names a line that is invalid.
    """
    conversations, images = read_conversations(path, chat_format)
    chains = [_one_chain(f"{path.name}:{number}", each) for number, each in enumerate(conversations, 1)]
    return chains, images


async def from_records(
    run: RunConfig, split: str, min_score: float, base: Path
) -> tuple[list[DBRecordData], Images]:
    """Return the trajectories of a run with a score of ``min_score`` or more: sampled ids, and images.

    Every generated token of a well-formed model call is trained. Raises ConfigError if there is no such
    trajectory, or if the run's model had another tokenizer than the one in ``base``.
    """
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        await _check_tokenizer(store, run.run_name, base)
        records = await store.records.scored(split, min_score)
        found = [await _one_record(store, record) for record in records]
        data = [item for item in found if item is not None]
        named = {image.sha256 for item in data for image in item.images}
        images = await store.images.get(named) if named else {}
    if not data:
        raise ConfigError(
            f"run {run.run_name} has {len(records)} Records of split {split} with a score of {min_score:g} or"
            " more, of which none can be trained",
            hint="lower --sft_min_score, or see `agentrl audit records` for the run's scores",
        )
    logger.info("%d of %d Records of run %s are trained", len(data), len(records), run.run_name)
    return data, images


def _one_chain(name: str, conversation: TokenizedConversation) -> DBRecordData:
    length = len(conversation.input_ids)
    edges = np.flatnonzero(np.diff(conversation.is_trainable.astype(np.int8), prepend=0, append=0))
    if length == 0 or len(edges) == 0:
        raise TaskFileError(f"{name} has no text of the assistant", hint="check the chat template")
    spans = tuple(
        TrainableSpan(start=start, end=end, call=index, version=0, advantage=_ADVANTAGE, temperature=1.0)
        for index, (start, end) in enumerate(edges.reshape(-1, 2).tolist())
    )
    trainable = int(conversation.is_trainable.sum())
    return DBRecordData(
        id=name, record=name, task=name, split="sft", score=1.0, advantage=_ADVANTAGE, min_version=0,
        max_version=0, tokens=length, trainable_tokens=trainable, turns=len(spans),
        nodes=(Node(start=0, end=length),), spans=spans, images=conversation.images,
        input_ids=pack_ids(conversation.input_ids.tolist()), behavior_logprobs=pack_floats([0.0] * trainable),
    )  # fmt: skip


async def _one_record(store: Store, record: Record) -> DBRecordData | None:
    calls = await store.model_calls.by_record(record.id)
    task = Task(
        id=record.task,
        task_id=record.task,
        split=record.split,
        epoch=record.epoch,
        order=0,
        query=record.query,
    )
    return to_training_data(task, record, calls, _ADVANTAGE, GroupConfig(), supervised=True)


async def _check_tokenizer(store: Store, run_name: str, base: Path) -> None:
    first = await store.policy_versions.get(0)
    files: Sequence[tuple[str, str]] = [] if first is None else [(f.name, f.sha256) for f in first.files]
    sampled = dict(files).get(_TOKENIZER)
    own = base / _TOKENIZER
    if sampled is None or not own.is_file():
        return
    if hashlib.sha256(own.read_bytes()).hexdigest() != sampled:
        raise ConfigError(
            f"run {run_name} sampled with another {_TOKENIZER} than that of {base}: its ids mean other text",
            hint="give a model with the tokenizer of the run",
        )
