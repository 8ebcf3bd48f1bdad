"""Train a reward model on pairs of trajectories: ``agentrl sft --objective reward``.

A batch has whole groups: a trajectory is computed once, however many pairs it is in, and the beginning that
the trajectories of a group have in common once for all of them. All pairs of a group make one term of the
loss, as arXiv 2203.02155 advises: pairs that are shuffled into several batches overfit.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.model_folder import model_context_length
from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import Configs, flag_names
from agentrl.config.schema import (
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import SFTConfig
from agentrl.data.forest import TokenForest, chain
from agentrl.distributed.accelerate_config import with_launch_settings
from agentrl.distributed.build_policy import split_policy
from agentrl.distributed.mesh import World, launched_world
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import AgentRLError, ConfigError, ModelError, TaskFileError, TrajectoryError
from agentrl.model.flops import Precision, Stopwatch
from agentrl.model.load import Policy, disable_dropout, load_tokenizer
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.norms import fuse_norms
from agentrl.model.reward_head import (
    check_reward_model,
    draw_head,
    forest_rewards,
    load_reward_model,
    new_tensors,
)
from agentrl.scoring.reward_model import REWARDS, RewardScale, render_trajectory
from agentrl.scoring.scorers import stored_context
from agentrl.train.build import build_trainer
from agentrl.train.controller import Controller, follow
from agentrl.train.sft import check_flags, read_lines, save, start, supervised, train_steps
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import base_folder, stored_dtype

logger = logging.getLogger(__name__)

_READ = frozenset(flag_names(OptimConfig, MemoryConfig)) - {
    "num_epochs_per_batch", "mini_batches", "loss_vocab_chunk_size",
} | {
    "max_steps", "max_tokens", "prefix_merging", "gradient_checkpointing", "autocast_bf16",
    "dp_replicate_size",
}  # fmt: skip
"""Flags of training that are read here."""
_WHOLE = ("tp_size", "pp_size", "cp_size", "ep_size")
_MEASURED = 1024
"""Most trajectories whose rewards give mean and scale."""
_SHOWN = ("accuracy", "margin", "reward")


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Trajectories of one question, each with a score: every two with different scores are a pair."""

    items: tuple[DBRecordData, ...]
    question: str
    """Whatever is equal for the same question: it decides what is held out."""

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        counts = Counter(item.score for item in self.items).values()
        return (len(self.items) ** 2 - sum(count**2 for count in counts)) // 2

    def is_held_out(self, fraction: float) -> bool:
        """Return whether the question is among the ``fraction`` that is not trained, in every run alike."""
        digest = hashlib.sha256(self.question.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2**64


def trajectory_data(name: str, ids: Sequence[int], group: str, score: float) -> DBRecordData:
    """Return a trajectory of ``group`` whose reward is read at its last token. ValueError for one token."""
    if len(ids) < 2:
        raise ValueError(f"it has {len(ids)} tokens; at least two are needed")
    last = np.arange(len(ids)) == len(ids) - 1
    return replace(chain(name, np.asarray(ids, np.int64), last), task=group, score=score)


def read_pairs(path: Path, chat_format: ChatFormat) -> list[PairGroup]:
    """Return the pairs of a JSONL file: lines {"prompt"?, "chosen", "rejected", "margin"?}, as of TRL.

    ``chosen`` and ``rejected`` are lists of messages that follow those of ``prompt``; all three may be texts.
    A pair of equal texts has nothing to learn from, and is left out. Raises TaskFileError with file, line and
    reason.
    """
    groups, equal = [], 0
    for number, line in read_lines(path):
        name = f"{path.name}:{number}"
        try:
            item = json.loads(line)
            prompt, sides, margin = _pair(item)
            chosen, rejected = (render_trajectory(chat_format, [*prompt, *side]) for side in sides)
            if chosen == rejected:
                equal += 1
                continue
            items = (
                trajectory_data(f"{name}+", chosen, name, margin),
                trajectory_data(f"{name}-", rejected, name, 0.0),
            )
        except (ValueError, AgentRLError) as error:
            raise TaskFileError(
                f"{path}:{number}: {error}",
                hint='a line is {"prompt": […], "chosen": […], "rejected": […]}, each a list of messages',
            ) from error
        groups.append(PairGroup(items, json.dumps(prompt or sides[0][:1], sort_keys=True, default=str)))
    if equal:
        logger.warning("%d pairs of %s are left out: both sides are equal", equal, path)
    if not groups:
        raise TaskFileError(f"{path} holds no pair", hint="give a JSONL file with one on each line")
    return groups


def _pair(item: Any) -> tuple[list[Message], tuple[list[Message], list[Message]], float]:
    """Return a line's prompt, its chosen and rejected messages, and its margin. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError("it is no object")
    prompt = _side(item, "prompt", "user") if item.get("prompt") is not None else []
    sides = _side(item, "chosen", "assistant"), _side(item, "rejected", "assistant")
    if not prompt and sides[0][0] != sides[1][0]:
        raise ValueError("chosen and rejected begin with different messages, and there is no prompt")
    margin = item.get("margin", 1.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < float("inf"):
        raise ValueError(f"margin is {margin!r}; it must be a number above 0")
    return prompt, sides, float(margin)


def _side(item: Mapping[str, Any], key: str, role: str) -> list[Message]:
    value = item.get(key)
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(m, dict) and "role" in m for m in value)
    ):
        raise ValueError(f"{key} is no text and no list of messages with roles")
    return value


async def groups_of_records(run: RunConfig, split: str, chat_format: ChatFormat) -> list[PairGroup]:
    """Return the scored trajectories of a run by group, rendered as the scorer ``reward_model`` renders them.

    A trajectory without a conversation, or with one that the template does not render, is left out. Raises
    ConfigError if none is left.
    """
    from agentrl.store.client import open_existing

    found: dict[str, list[DBRecordData]] = defaultdict(list)
    questions: dict[str, str] = {}
    unread: Counter[str] = Counter()
    async with await open_existing(run) as store:
        records = await store.records.scored(split, -float("inf"))
        for record in records:
            task = Task(
                id=record.task, task_id=record.task, split=record.split, epoch=record.epoch, order=0,
                query=record.query,
            )  # fmt: skip
            calls = await store.model_calls.by_record(record.id)
            messages = stored_context(task, record, calls, "").messages
            if not messages or record.score is None:
                continue
            try:
                ids = render_trajectory(chat_format, messages)
            except TrajectoryError as error:
                unread[error.message] += 1
                continue
            found[record.task].append(trajectory_data(record.id, ids, record.task, record.score))
            questions[record.task] = record.query
    kept = sum(map(len, found.values()))
    if not kept:
        raise ConfigError(
            f"run {run.run_name}: none of {len(records)} scored Records of split {split} has a conversation"
            " that can be read",
            hint="see `agentrl audit records` for the run's scores",
        )
    if kept < len(records):
        why = "".join(f"; {count} because {problem}" for problem, count in unread.most_common(3))
        logger.warning(
            "%d of %d Records have no conversation that can be read, and are left out%s",
            len(records) - kept, len(records), why,
        )  # fmt: skip
    return [PairGroup(tuple(items), questions[task]) for task, items in found.items()]


@dataclass(frozen=True, slots=True)
class RewardLoss:
    """Bradley-Terry on pairs of a group, s_i > s_j: −log σ(r_i − r_j − m·(s_i − s_j)) + c·(r_i + r_j)².

    Of a group it is the mean over all its pairs (arXiv 2203.02155), of a batch the mean over its groups. The
    margin is that of arXiv 2307.09288; c centers the rewards (arXiv 2312.09244). TRL has both.
    """

    margin: float = 0.0
    center: float = 0.0

    def __call__(self, rewards: Tensor, data: Sequence[DBRecordData]) -> tuple[Tensor, dict[str, float]]:
        """Return ∂loss/∂r of the rewards (float32[n], those of ``data``), and loss, accuracy, margin, reward.

        Accuracy is the share of pairs with r_i > r_j, and margin the mean of r_i − r_j, weighted as the loss.
        """
        better, worse, weight = (torch.from_numpy(each).to(rewards.device) for each in pairs_of(data))
        with torch.enable_grad():
            leaf = rewards.detach().double().requires_grad_()
            score = torch.tensor([item.score for item in data], dtype=torch.float64, device=rewards.device)
            high, low = leaf[better], leaf[worse]
            wanted = self.margin * (score[better] - score[worse])
            terms = -logsigmoid(high - low - wanted) + self.center * (high + low).square()
            loss = (weight * terms).sum()
            (slopes,) = torch.autograd.grad(loss, leaf)
        values = [loss, (weight * (high > low)).sum(), (weight * (high - low)).sum(), leaf.mean()]
        names = ("loss", *_SHOWN)
        found = torch.stack([value.detach() for value in values]).tolist()
        return slopes.float(), dict(zip(names, found, strict=True)) | {"pairs": len(weight)}


def pairs_of(data: Sequence[DBRecordData]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return all pairs within groups: the place of the better, of the worse, and the weight of each.

    Weights of a group are equal; those of all groups with a pair sum to 1.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(data):
        groups[item.task].append(place)
    made = []
    for places in groups.values():
        scores = np.array([data[place].score for place in places])
        high, low = np.nonzero(scores[:, None] > scores[None, :])
        if len(high):
            made.append((np.array(places)[high], np.array(places)[low]))
    if not made:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    better, worse = (np.concatenate(side) for side in zip(*made, strict=True))
    return better, worse, np.concatenate([np.full(len(high), 1 / len(high) / len(made)) for high, _ in made])


class RewardModel(ParallelModel):
    """A reward model as the ranks of a mesh compute it together."""

    def forward(
        self, forest: TokenForest, options: ForwardOptions, received: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the reward at each trainable token of ``forest``, float32[T]."""
        return (forest_rewards(self.model, self.executor(forest), forest),)


@dataclass(frozen=True, kw_only=True)
class RewardTrainer(PolicyTrainer):
    """Trains a reward model by the steps of a policy."""

    loss: RewardLoss

    def add_gradients(
        self,
        forests: Sequence[TokenForest],
        data: Sequence[DBRecordData],
        watch: Stopwatch,
        **others: Any,
    ) -> dict[str, Any]:
        """Add the gradients of one update's loss, one micro-batch at a time, and report the update.

        The two trajectories of a pair may lie in two micro-batches or on two ranks. So a forward without
        gradient computes all rewards first, unless one micro-batch has all of them.
        """
        is_one = self.model.mesh.layout.world == 1 and len(forests) == 1
        slopes, metrics = (None, {}) if is_one else self.loss(self._compute(forests, len(data)), data)
        for forest, (own,) in self.model.micro_batches(forests, self.options, watch):
            place = torch.from_numpy(forest.trajectory[forest.row]).to(own.device)
            if slopes is None:
                slopes, metrics = self.loss(_in_order(own.detach(), place, len(data)), data)
            part = (own * slopes[place]).sum()
            watch.lap("forward")
            torch.autograd.backward(part)
            watch.lap("backward")
        counts = torch.tensor([forest.tokens for forest in forests], dtype=torch.float64).sum()
        tokens = round(float(self.model.mesh.sum(counts.to(self.policy.model.device))))
        return {
            **metrics, "tokens": tokens, "trainable_tokens": len(data), "trajectories": len(data),
            "computed_fraction": 1.0,
        }  # fmt: skip

    def rewards(self, data: Sequence[DBRecordData]) -> list[float]:
        """Return the reward of each trajectory; every rank calls it."""
        return self._compute(self.pack(data), len(data)).tolist()

    @torch.no_grad()
    def _compute(self, forests: Sequence[TokenForest], count: int) -> Tensor:
        """Return all ranks' rewards, float32[count], in the order in which forests number trajectories."""
        device = self.policy.model.device
        total = torch.zeros(count, device=device)
        for forest in forests:
            (own,) = self.model(forest, self.options)
            place = torch.from_numpy(forest.trajectory[forest.row]).to(device)
            total += _in_order(own, place, count)
        return self.model.mesh.sum(total)


def _in_order(rewards: Tensor, place: Tensor, count: int) -> Tensor:
    return rewards.new_zeros(count).index_add_(0, place, rewards)


def load_reward_policy(configs: Configs, weights: Path | None, precision: Precision, world: World) -> Policy:
    """Load what is trained; without its weights if ``split_reward_model`` has each rank read its own part."""
    flags = configs[ModelConfig]
    base = base_folder(flags)
    tokenizer, template = load_tokenizer(flags, base)
    model = load_reward_model(base, flags, precision.weights, without_weights=world.size > 1)
    embedded = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > embedded:
        raise ModelError(
            f"the tokenizer of {base} has {len(tokenizer)} ids, and the model embeds {embedded}",
            hint="resize the model's embeddings, or use the tokenizer that belongs to it",
        )
    disable_dropout(model)
    fuse_norms(model)
    if world.size == 1:
        model.to(world.device)  # type: ignore[arg-type]
    check_reward_model(model)
    own_dtype = getattr(torch, stored_dtype(base))
    return Policy(model, tokenizer, base, template, source=base, own_dtype=own_dtype)


def split_reward_model(
    policy: Policy, layout: Any, configs: Configs, precision: Precision, world: World
) -> Any:
    """Return ``policy``'s model as the ranks run it, with its weights."""
    new = new_tensors(policy.base)
    parallel = split_policy(policy, layout, configs, precision, world, RewardModel, new)
    if world.size > 1 and new:
        draw_head(policy.model)
    return parallel


def _build(
    configs: Configs, world: World, steps: int, max_tokens: int, precision: Precision
) -> PolicyTrainer:
    settings = configs[SFTConfig]
    loss = RewardLoss(settings.reward_margin, settings.center_rewards_coefficient)
    flags = replace(configs[ModelConfig], router_replay="off")
    shared = supervised(configs, max_tokens)
    return build_trainer(
        Configs([*shared, flags], shared.given), weights=None, total_steps=steps, world=world,
        precision=precision, load=load_reward_policy, split=split_reward_model,
        trains=partial(RewardTrainer, loss=loss),
    )  # fmt: skip


def train_reward_model(configs: Configs) -> None:
    """Train, and write a Hugging Face folder to ``--output_dir``; every rank calls it.

    Raises ConfigError for flags that name no data or no usable folder, and for data without a pair.
    """
    configs = with_launch_settings(configs)
    _check_flags(configs)
    with launched_world(base_folder(configs[ModelConfig])) as world:
        if world.rank > 0:
            follow(world, partial(_build, configs, world), ["rewards"])
        else:
            _train(configs, world)


def _check_flags(configs: Configs) -> None:
    check_flags(configs, _READ)
    flags = {**configs.flags}
    for name, needed in (("lora_rank", 0), *((size, 1) for size in _WHOLE)):
        if flags[name] != needed:
            raise ConfigError(
                f"--{name} {flags[name]} with --objective reward, which trains whole layers, sharded over the"
                " processes (FSDP2)",
                hint="leave it out",
            )
    given = sorted(configs.given & {"chat_format", "chat_template_kwargs", "thinking_retention"})
    if given:
        logger.warning(
            "--objective reward does not read --%s: a scorer renders by the model's folder alone",
            ", --".join(given),
        )


def _train(configs: Configs, world: World) -> None:
    settings, flags = configs[SFTConfig], configs[ModelConfig]
    base = base_folder(flags)
    # Render as the scorer will, which has the folder alone.
    chat_format = open_chat_format(base, ModelConfig(chat_template=flags.chat_template))
    if settings.sft_from_records is not None:
        source = replace(configs[RunConfig], run_name=settings.sft_from_records)
        groups = asyncio.run(groups_of_records(source, settings.sft_split, chat_format))
    else:
        groups = read_pairs(Path(str(configs[TaskConfig].train_file)), chat_format)
    trained, heldout = _split(groups, settings.reward_heldout)
    used = [item for group in (*trained, *heldout) for item in group.items]
    _check_lengths(configs, base, used)
    controller, steps = start(configs, world, partial(_build, configs, world), len(trained), used)
    padding = _padding(controller.policy.tokenizer, {int(_last_id(item)) for item in used})
    logger.info("%d steps of %d groups", steps, settings.batch_size)
    train_steps(configs, controller, [group.items for group in trained], steps, shown=_SHOWN)
    scale = _measure(controller, heldout or trained, is_held_out=bool(heldout))
    save(configs, controller, steps, partial(_complete, padding=padding, scale=scale))
    controller.end()


def _split(groups: Sequence[PairGroup], fraction: float) -> tuple[list[PairGroup], list[PairGroup]]:
    """Return the groups that are trained and those held out, each with a pair; log what is left out."""
    paired = [group for group in groups if group.pairs]
    trained = [group for group in paired if not group.is_held_out(fraction)]
    heldout = [group for group in paired if group.is_held_out(fraction)]
    if not trained:
        why = "all are held out" if paired else "the scores of each are equal"
        raise ConfigError(
            f"none of {len(groups)} groups has a pair to train: {why}",
            hint="lower --reward_heldout"
            if paired
            else "give groups whose trajectories have different scores",
        )
    ties = sum(len(group.items) * (len(group.items) - 1) // 2 - group.pairs for group in groups)
    logger.info(
        "%d groups with %d pairs are trained, %d with %d held out; left out: %d groups without two scores,"
        " %d pairs with equal scores",
        len(trained), sum(group.pairs for group in trained), len(heldout),
        sum(group.pairs for group in heldout), len(groups) - len(paired), ties,
    )  # fmt: skip
    return trained, heldout


def _check_lengths(configs: Configs, base: Path, data: Sequence[DBRecordData]) -> None:
    """Raise ConfigError for a trajectory that no micro-batch, or not the model, takes."""
    longest = max(data, key=lambda item: item.tokens)
    limits = [("the context of the model", model_context_length(base))]
    if torch.accelerator.is_available():  # on a CPU the limit is raised to the longest
        limits.append(("--max_tokens", configs[TrainConfig].max_tokens))
    for name, limit in limits:
        if isinstance(limit, int) and longest.tokens > limit:
            count = sum(item.tokens > limit for item in data)
            raise ConfigError(
                f"{count} of {len(data)} trajectories are longer than {name}, {limit} tokens:"
                f" {longest.id} has {longest.tokens}",
                hint="raise it, or leave out these trajectories",
            )


def _last_id(item: DBRecordData) -> int:
    return int(np.frombuffer(item.input_ids, np.int32)[-1])


def _padding(tokenizer: Any, last: set[int]) -> str:
    """Return a token to pad with that ends no trajectory: transformers reads the last one that is no padding.

    A tokenizer that pads with its end of turn would have it read the token before (transformers issue 35352).
    """
    own = tokenizer.pad_token_id
    if own is not None and own not in last:
        return str(tokenizer.pad_token)
    taken = {*last, tokenizer.eos_token_id}
    for token in (tokenizer.unk_token_id, *sorted(tokenizer.added_tokens_decoder), tokenizer.bos_token_id):
        if token is not None and token not in taken:
            return str(tokenizer.convert_ids_to_tokens(token))
    raise ModelError(
        "the tokenizer has no token to pad with: each of its special tokens ends a trajectory",
        hint="add one to the tokenizer, and give it as pad_token",
    )


def _measure(controller: Controller, groups: Sequence[PairGroup], *, is_held_out: bool) -> RewardScale:
    """Return mean and scale of the rewards of ``groups``, and log the accuracy on their pairs."""
    data = [item for group in _first(groups, _MEASURED) for item in group.items]
    rewards = controller.compute("rewards", data)
    _, metrics = RewardLoss()(torch.tensor(rewards), data)
    name = "held out" if is_held_out else "trained"
    logger.info(
        "%s: accuracy %.3f, margin %.3f on %d pairs", name, metrics["accuracy"], metrics["margin"],
        metrics["pairs"],
    )  # fmt: skip
    spread = statistics.pstdev(rewards)
    return RewardScale(
        mean=statistics.fmean(rewards), scale=spread if spread > 0 else 1.0,
        measured={name: {key: round(value, 4) for key, value in metrics.items()}},
    )  # fmt: skip


def _first(groups: Sequence[PairGroup], limit: int) -> Iterator[PairGroup]:
    """Yield the first groups that have at most ``limit`` trajectories together, and at least one."""
    count = 0
    for group in groups:
        count += len(group.items)
        if count > limit and count > len(group.items):
            return
        yield group


def _complete(folder: Path, padding: str, scale: RewardScale) -> None:
    """Write what a reward model has beside its weights: labels, padding, and the scale of its rewards."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        _update(path, {"pad_token": padding})
    else:
        path.write_text(json.dumps({"pad_token": padding}), encoding="utf-8")
    if (folder / "special_tokens_map.json").is_file():
        _update(folder / "special_tokens_map.json", {"pad_token": padding})
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(str(folder)).pad_token_id
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    _update(folder / "config.json", {**labels, "pad_token_id": token})
    (folder / REWARDS).write_text(json.dumps(scale.to_json(), indent=1) + "\n", encoding="utf-8")


def _update(path: Path, values: Mapping[str, Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}, indent=2) + "\n", encoding="utf-8")
