"""Supervised fine-tuning on conversations, or on the Records of a run, with the step of RL training."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentrl.base.folder_owner import require_unclaimed
from agentrl.chat.chat_format import TRAIN, ChatFormat, Message, TokenizedConversation, split_train
from agentrl.chat.model_folder import context_length
from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import Configs, flag_names
from agentrl.config.schema import (
    AdapterConfig,
    CriticConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import SFTConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.data.forest import chain
from agentrl.data.planner import packing_problem
from agentrl.distributed.accelerate_config import with_launch_settings
from agentrl.distributed.build_policy import step_precision
from agentrl.distributed.mesh import World, launched_world
from agentrl.documents.images import MARKER, Image
from agentrl.documents.task import Task
from agentrl.documents.task_json import MAX_TASK_IMAGES, kind_of, read_images
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError, ImageError, TaskFileError, TrainingError, TrajectoryError
from agentrl.losses.settings import LossSettings, check_idle
from agentrl.model.flops import Precision
from agentrl.train.build import build_trainer
from agentrl.train.controller import Controller, follow, lead
from agentrl.train.optimizer import schedule_length
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import architecture, atomic_model_folder, base_folder

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

CPU_MICRO_BATCH_TOKENS = 2048
"""Tokens per micro-batch on a CPU, few enough for activations to fit its cache."""
_IMAGE_KEYS = ("image", "image_url", "url", "path")
"""Keys under which an image part of other systems names its source."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which files hold a message's reasoning; templates read one of the first two."""
_WEIGHT = "weight"
_TOKENIZER = "tokenizer.json"
_RL_ALONE = {"num_epochs_per_batch", "mini_batches"}
_READ = frozenset(flag_names(OptimConfig, AdapterConfig, MemoryConfig, ParallelConfig)) - _RL_ALONE | {
    "max_steps", "max_tokens", "prefix_merging", "gradient_checkpointing", "loss_seq_chunk_size",
    "autocast_bf16", "token_level_loss", "skip_length_normalization",
}  # fmt: skip
"""Flags of training that are read here. The others may be in the file of a run, whose trainer reads them."""
Images = Mapping[str, Image]
"""The images of training data, by hash."""


def show_images(messages: list[Message], images: Any, folder: Path) -> tuple[list[Message], list[Image]]:
    """Return messages whose image parts name stored images, and those images, in order.

    An image part has its own source (``image``, ``image_url``); one without, and each ``<image>`` in a text
    if the line has ``images``, shows the next of them. Raises ValueError and BadTaskError.
    """
    listed = iter(read_images(_sources(images), folder))
    shown: list[Image] = []

    def part_of(image: Image) -> dict[str, Any]:
        shown.append(image)
        return image.ref.part()

    def next_part() -> dict[str, Any]:
        image = next(listed, None)
        if image is None:
            raise ValueError("it shows more images than its 'images' has")
        return part_of(image)

    def parts_of(item: Any) -> Iterator[dict[str, Any]]:
        if isinstance(item, str) or item.get("type") in ("text", "input_text"):
            text = item if isinstance(item, str) else str(item.get("text", ""))
            for index, piece in enumerate(text.split(MARKER) if images else [text]):
                if index:
                    yield next_part()
                if piece:
                    yield {"type": "text", "text": piece}
        elif item.get("type") in ("image", "image_url", "input_image"):
            source = _source(item)
            yield next_part() if source is None else part_of(read_images([source], folder)[0])
        else:
            raise ValueError(f"a part of a message has the type {item.get('type')!r}")

    prepared = []
    for message in messages:
        content = message.get("content")
        items = content if isinstance(content, list) else [content] if images and content else []
        parts = [part for item in items for part in parts_of(item)]
        has_images = any(part["type"] == "image" for part in parts)
        prepared.append({**message, "content": parts} if has_images else message)
    if next(listed, None) is not None:
        raise ValueError(f"its 'images' has more images than its messages show ({len(shown)})")
    return prepared, shown


def _sources(images: Any) -> list[str]:
    """Return a line's field ``images``. Raises ValueError."""
    if images is None:
        return []
    if not isinstance(images, list) or not all(isinstance(source, str) and source for source in images):
        raise ValueError(f"'images' is {kind_of(images)}; give a list of paths or data: URLs")
    if len(images) > MAX_TASK_IMAGES:
        raise ValueError(f"'images' has {len(images)} images; at most {MAX_TASK_IMAGES} are allowed")
    return images


def _source(part: Mapping[str, Any]) -> str | None:
    named = next((part[key] for key in _IMAGE_KEYS if part.get(key)), None)
    source = named.get("url") if isinstance(named, Mapping) else named
    if source is not None and not isinstance(source, str):
        raise ValueError(f"an image is {type(source).__name__}; give a path or a data: URL")
    return source


def read_conversations(
    path: Path, chat_format: ChatFormat
) -> tuple[list[TokenizedConversation], dict[str, Image]]:
    """Render the ``messages`` (and ``tools``) of every line; return them, and their images by hash.

    An assistant message with ``train: false`` or ``weight: 0`` is context: it is not in the mask. Raises
    TaskFileError with file, line and reason: not JSON, no messages, no assistant message to train, or a
    template that does not render the start of a conversation as a prefix of the whole.
    """
    conversations: list[TokenizedConversation] = []
    images: dict[str, Image] = {}
    for number, line in read_lines(path):
        try:
            item = json.loads(line)
            messages, shown = show_images(_messages(item), item.get("images"), path.parent)
            conversations.append(chat_format.tokenize(messages, item.get("tools")))
        except (ValueError, TrajectoryError, ImageError) as error:
            raise TaskFileError(
                f"{path}:{number}: {error}", hint='a line is {"messages": [{"role": …, "content": …}, …]}'
            ) from error
        images |= {image.id: image for image in shown}
    if not conversations:
        raise TaskFileError(f"{path} holds no conversation", hint="give a JSONL file with one on each line")
    return conversations, images


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}", hint="give a JSONL file in UTF-8") from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _messages(item: Any) -> list[Message]:
    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("it has no list of messages with roles")
    prepared = [_prepared(message) for message in messages]
    if not any(split_train(prepared)[1]):
        raise ValueError("it has no assistant message that is trained: there is nothing to learn")
    return prepared


def _prepared(message: Message) -> Message:
    """Return the message with its reasoning under both keys, and ``train: false`` if it is not trained.

    ``weight: 0`` says that too.
    """
    train = message.get(TRAIN, True)
    weight = message.get(_WEIGHT, 1)
    if not isinstance(train, bool):
        raise ValueError(f"train is {train!r}; it must be true or false")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"weight is {weight!r}; it must be 0 or 1")
    prepared = {key: value for key, value in message.items() if key != _WEIGHT}
    if not (train and weight):
        prepared[TRAIN] = False
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return prepared
    return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def fine_tune(configs: Configs) -> None:
    """Train, and write a Hugging Face folder to ``--output_dir``; every rank calls it.

    ``configs`` has an SFTConfig too. Raises ConfigError for flags that name no data or no usable folder.
    """
    configs = with_launch_settings(configs)
    check_flags(configs, _READ)
    with launched_world(base_folder(configs[ModelConfig])) as world:
        if world.rank > 0:
            follow(world, partial(_build, configs, world))
        else:
            _fine_tune(configs, world)


def check_flags(configs: Configs, read: Collection[str]) -> None:
    """Raise ConfigError for flags that name no data or no usable folder; ``read`` are those of training."""
    check_idle(configs, LossSettings(loss_calculater="CrossEntropy"), read)
    of_training = {*flag_names(TrainConfig, LossConfig, GroupConfig, CriticConfig), *_RL_ALONE}
    if configs[TrainConfig].max_steps > 0:
        of_training.add("num_train_epochs")
    unread = sorted(configs.given & of_training - set(read))
    if unread:
        logger.warning("agentrl sft does not read --%s", ", --".join(unread))
    sources = (configs[TaskConfig].train_file, configs[SFTConfig].sft_from_records)
    if sum(source is not None for source in sources) != 1:
        raise ConfigError(
            "no conversations are given" if sources == (None, None) else "two kinds of data are given",
            hint="give --train_file FILE.jsonl, or --sft_from_records RUN",
        )
    if configs[RunConfig].output_dir is None:
        raise ConfigError("no folder for the trained model is given", hint="give --output_dir FOLDER")
    _check_output(configs)


def _check_output(configs: Configs) -> None:
    """Raise ConfigError if writing the output folder, as a whole, would overwrite an input or other files."""
    output = Path(configs[RunConfig].output).resolve()
    inputs = {"the model": base_folder(configs[ModelConfig])}
    for name, file in (
        ("--train_file", configs[TaskConfig].train_file),
        ("--chat_template", configs[ModelConfig].chat_template),
    ):
        if file is not None:
            inputs[name] = Path(file)
    for name, path in inputs.items():
        source = path.resolve()
        if output == source or output in source.parents or source in output.parents:
            raise ConfigError(
                f"--output_dir {output} would overwrite {name}, {path}", hint="give a folder of its own"
            )
    require_unclaimed(output, "--output_dir")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output_dir {output} is a file", hint="give a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise ConfigError(
            f"--output_dir {output} has other content than a model, which would be deleted",
            hint="give a new or an empty folder",
        )


def _fine_tune(configs: Configs, world: World) -> None:
    data, images = _read(configs)
    data = trainable(data, configs[ModelConfig], configs[TrainConfig].max_tokens)
    controller, steps = start(configs, world, partial(_build, configs, world), len(data), data)
    logger.info("%d trajectories, %d steps of %d", len(data), steps, configs[SFTConfig].batch_size)
    train_steps(configs, controller, [[item] for item in data], steps, images)
    save(configs, controller, steps)
    controller.end()


def start(
    configs: Configs,
    world: World,
    build: Callable[..., PolicyTrainer],
    units: int,
    data: Sequence[DBRecordData],
) -> tuple[Controller, int]:
    """Build the trainer of ``data`` on all ranks; return its controller, and how many steps it will make.

    A batch has ``--batch_size`` of ``units``. ``build`` takes steps, tokens of a micro-batch, and precision.
    """
    train = configs[TrainConfig]
    steps = train.max_steps
    if steps <= 0:
        steps = schedule_length(units, configs[SFTConfig].batch_size, configs[TaskConfig].num_train_epochs)
    max_tokens = train.max_tokens
    if not torch.accelerator.is_available():
        max_tokens = min(max_tokens, max(CPU_MICRO_BATCH_TOKENS, *(item.tokens for item in data)))
    precision = step_precision(configs[ModelConfig], train, world)
    return lead(world, build, steps, max_tokens, precision), steps


def train_steps(
    configs: Configs,
    controller: Controller,
    units: Sequence[Sequence[DBRecordData]],
    steps: int,
    images: Images = MappingProxyType({}),
    shown: Sequence[str] = (),
) -> None:
    """Train ``steps`` batches of whole ``units``, each epoch in a new order; log ``shown`` metrics."""
    settings, started = configs[SFTConfig], time.perf_counter()
    batches = _batches(len(units), settings.batch_size, configs[RunConfig].seed)
    for step, chosen in zip(range(1, steps + 1), batches, strict=False):
        batch = [item for index in chosen for item in units[index]]
        named = {image.sha256 for item in batch for image in item.images}
        result = controller.train(batch, None, {key: images[key] for key in named})
        if not result.is_finite:
            raise TrainingError(f"the loss of step {step} is not finite", hint="lower --learning_rate")
        if step % settings.log_steps == 0 or step in (1, steps):
            metrics = result.metrics
            logger.info(
                "step %d/%d  loss %.4f%s  grad %.3f  lr %.2e  %.0f s",
                step, steps, metrics["loss"], "".join(f"  {name} {metrics[name]:.3f}" for name in shown),
                metrics["grad_norm"], metrics["lr"], time.perf_counter() - started,
            )  # fmt: skip


def save(
    configs: Configs, controller: Controller, steps: int, complete: Callable[[Path], None] | None = None
) -> None:
    """Write the model to ``--output_dir``, as a whole; ``complete`` changes its folder before it is there."""
    output = Path(configs[RunConfig].output)
    with atomic_model_folder(output, controller.writer.model.bytes) as temporary:
        controller.write_version(steps, temporary).result()
        if complete is not None:
            complete(temporary)
    logger.info("saved %s", output)


def trainable(data: Sequence[DBRecordData], model: ModelConfig, max_tokens: int) -> list[DBRecordData]:
    """Return the trajectories that a step can train, and log why the others cannot: before the first step.

    Raises ConfigError if there are none.
    """
    folder = base_folder(model)
    context, vocab_size = context_length(model, folder), int(architecture(folder)["vocab_size"])
    problems = {
        item.id: packing_problem(item, vocab_size=vocab_size, max_tokens=max_tokens, context=context)
        for item in data
    }
    for name, problem in problems.items():
        if problem is not None:
            logger.error("%s is not trained: %s", name, problem)
    kept = [item for item in data if problems[item.id] is None]
    if not kept:
        name, problem = next(iter(problems.items()))
        raise ConfigError(
            f"none of {len(data)} conversations can be trained; {name}: {problem}",
            hint="raise --max_tokens, or give shorter conversations",
        )
    return kept


def _build(
    configs: Configs, world: World, steps: int, max_tokens: int, precision: Precision
) -> PolicyTrainer:
    configs = supervised(configs, max_tokens)
    return build_trainer(configs, weights=None, total_steps=steps, world=world, precision=precision)


def supervised(configs: Configs, max_tokens: int) -> Configs:
    """Return flags with which a trainer makes one update of a batch, and stores nothing beside its model."""
    shared = configs[LossConfig]
    loss = LossConfig(  # with the run's reduction, without bounds or corrections
        loss_calculater="CrossEntropy",
        token_level_loss=shared.token_level_loss,
        skip_length_normalization=shared.skip_length_normalization,
    )
    optim = replace(configs[OptimConfig], num_epochs_per_batch=1, mini_batches=1)
    train = replace(configs[TrainConfig], max_tokens=max_tokens, token_statistics_mib=0.0, publish="full")
    return Configs([*configs, loss, optim, train, CriticConfig()], configs.given)


def _read(configs: Configs) -> tuple[list[DBRecordData], Images]:
    run, settings, model = configs[RunConfig], configs[SFTConfig], configs[ModelConfig]
    base = base_folder(model)
    if settings.sft_from_records is not None:
        source = replace(run, run_name=settings.sft_from_records)
        return asyncio.run(from_records(source, settings.sft_split, settings.sft_min_score, base))
    return from_conversations(Path(str(configs[TaskConfig].train_file)), open_chat_format(base, model))


def _batches(count: int, size: int, seed: int) -> Iterator[Sequence[int]]:
    """Yield batches of indices without end; each epoch is a permutation that depends on ``seed``."""
    generator = np.random.default_rng(seed)
    left = np.empty(0, np.int64)
    while True:
        while len(left) < size:
            left = np.concatenate([left, generator.permutation(count)])
        yield left[:size].tolist()
        left = left[size:]


def from_conversations(path: Path, chat_format: ChatFormat) -> tuple[list[DBRecordData], Images]:
    """Return each conversation of a JSONL file as a chain, and the images that they show.

    TaskFileError names a line that is invalid.
    """
    conversations, images = read_conversations(path, chat_format)
    chains = []
    for number, each in enumerate(conversations, 1):
        name = f"{path.name}:{number}"
        if not each.is_trainable.any():
            raise TaskFileError(f"{name} has no text of the assistant", hint="check the chat template")
        chains.append(chain(name, each.input_ids, each.is_trainable, images=each.images))
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
        data = []
        for record in records:
            task = Task(
                id=record.task, task_id=record.task, split=record.split, epoch=record.epoch, order=0,
                query=record.query,
            )  # fmt: skip
            calls = await store.model_calls.by_record(record.id)
            item = to_training_data(task, record, calls, 1.0, GroupConfig(), supervised=True)
            data += [] if item is None else [item]
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


async def _check_tokenizer(store: Store, run_name: str, base: Path) -> None:
    first = await store.policy_versions.get(0)
    files = () if first is None else first.files
    sampled = next((file.sha256 for file in files if file.name == _TOKENIZER), None)
    own = base / _TOKENIZER
    if sampled is None or not own.is_file():
        return
    if hashlib.sha256(own.read_bytes()).hexdigest() != sampled:
        raise ConfigError(
            f"run {run_name} sampled with another {_TOKENIZER} than that of {base}: its ids mean other text",
            hint="give a model with the tokenizer of the run",
        )
