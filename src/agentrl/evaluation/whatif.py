"""Compare what-ifs with their parent: curves, the weight of each token in the loss, and the weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.chat.model_folder import read_tokenizer_file
from agentrl.config.load import Configs
from agentrl.config.schema import LossConfig, ModelConfig, RunConfig, TrainConfig
from agentrl.config.whatif import parent_configs
from agentrl.data.recorded import RecordedSettings, RecordedStream
from agentrl.data.regroup import Regrouping, regrouping_of
from agentrl.data.step_source import StepData
from agentrl.documents.checkpoint import readable_checkpoints
from agentrl.documents.family import Relative
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.training import DBRecordData, TrainStep
from agentrl.errors import AgentRLError, ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.store.client import Store, open_existing
from agentrl.train.source import freshness_of
from agentrl.train.token_weights import Floats, token_weights
from agentrl.train.whatif import stored_flags
from agentrl.weights.difference import LayerDifference, layer_differences
from agentrl.weights.folder import architecture, base_folder

CURVES = ("loss", "reward", "kl_k3", "grad_norm", "entropy", "clipped_fraction", "lr")
_STEPS_COMPARED = 4
"""Steps whose tokens are compared, the first ones: later weights differ for other reasons than the loss."""
_TOKENS_SHOWN, _TOKENS_OF_RECORD = 16, 3
_AROUND = 12
"""Tokens of context before and after one that is shown."""


@dataclass(frozen=True, kw_only=True)
class TokenChange:
    """One token whose weight in the loss differs between two runs."""

    record: str
    before: str
    token: str
    after: str
    parent: float
    child: float


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How two runs weigh the tokens of one step of the parent."""

    step: int
    count: int
    """Tokens that both trained and whose statistics are stored."""
    cosine: float
    """Of the two vectors of weights: 1, they differ by a factor at most."""
    only: tuple[int, int]
    """Tokens that only the parent weighs, and that only the child weighs; the other's weight is 0."""
    changes: tuple[TokenChange, ...]
    """The tokens that differ most, after both vectors have length 1."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """One what-if beside its parent."""

    name: str
    changed: Mapping[str, Any]
    without: int
    steps: Mapping[int, TrainStep]
    """By the number of the parent's step."""
    tokens: Tokens | None
    """Of the one of the first steps whose tokens differ most."""
    layers: Sequence[LayerDifference]
    no_layers: str | None
    """Why ``layers`` is empty."""

    @property
    def distance(self) -> float | None:
        """‖child − parent‖ as a share of ‖parent‖, over all weights; None without ``layers``."""
        norm = sum(layer.norm**2 for layer in self.layers)
        return (sum(layer.difference**2 for layer in self.layers) / norm) ** 0.5 if norm else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the page shows."""

    parent: str
    steps: Mapping[int, TrainStep]
    children: Sequence[Child] = field(default_factory=tuple)


async def compare_runs(names: Sequence[str], here: Configs) -> Comparison:
    """Compare what-ifs of one parent with it. Raises ConfigError for any other run."""
    parents: set[str] = set()
    children: list[Child] = []
    steps: dict[int, TrainStep] = {}
    for name in names:
        async with await open_existing(replace(here[RunConfig], run_name=name)) as store:
            relative = await store.ancestry.parent()
            if relative is None or relative.kind != "whatif":
                raise ConfigError(
                    f"run {name!r} is not a what-if", hint="give runs that `agentrl whatif` has trained"
                )
            parents.add(relative.run)
            if len(parents) > 1:
                raise ConfigError(
                    f"{', '.join(names)} have {len(parents)} parents: {', '.join(sorted(parents))}",
                    hint="compare what-ifs of one run",
                )
            source = store.beside(relative.run)
            found = {step.step: step for step in await source.steps.find()}
            child = await _child(store, source, relative, found, here)
            children.append(child)
            steps |= {number: found[number] for number in child.steps if number in found}
    return Comparison(parent=parents.pop(), steps=dict(sorted(steps.items())), children=children)


async def _child(
    store: Store, source: Store, relative: Relative, parents: Mapping[int, TrainStep], here: Configs
) -> Child:
    steps = {step.recorded.step: step for step in await store.steps.find() if step.recorded is not None}
    configs = await _configs(source, here), await _configs(store, here)
    compared = [
        found
        for number in [at for at in sorted(steps) if at >= relative.since and at in parents][:_STEPS_COMPARED]
        if (found := await _tokens(store, source, relative, (parents[number], steps[number]), configs))
    ]
    tokens = min(compared, key=lambda found: found.cosine, default=None)
    layers, why = await _layers(store, source, steps, configs)
    return Child(
        name=store.run_name, changed=relative.changed, without=len(relative.without),
        steps=dict(sorted(steps.items())), tokens=tokens, layers=layers, no_layers=why,
    )  # fmt: skip


async def _layers(
    store: Store, source: Store, steps: Mapping[int, TrainStep], configs: tuple[Configs, Configs]
) -> tuple[Sequence[LayerDifference], str | None]:
    """Return how far the weights of the last step are apart, or why that is not known."""
    if not steps:
        return (), "the what-if has trained no step"
    last = max(steps)
    folders = []
    for run, flags, step in ((source, configs[0], last), (store, configs[1], steps[last].step)):
        folder = await _weights(run, flags, step)
        if folder is None:
            return (), (
                f"the weights of step {last} of {run.run_name} are no longer stored; a what-if without other"
                " flags makes them again"
            )
        folders.append(folder)
    try:
        return await asyncio.to_thread(layer_differences, *folders), None
    except AgentRLError as error:
        return (), error.message


async def _configs(store: Store, here: Configs) -> Configs:
    """Return the flags of a run's trainer."""
    found = await stored_flags(store)
    own = {"run_name": store.run_name, "output_dir": found.values.get("output_dir")}
    return parent_configs(found.values, found.given, here).with_flags(own)


async def _weights(store: Store, configs: Configs, step: int) -> Path | None:
    """Return a folder of this machine with the weights of a run after ``step``; None if none is stored."""
    for version in reversed(await store.policy_versions.all()):
        if version.step == step and version.is_full and version.pruned_at is None and step > 0:
            folder = Path(version.location)
            if await asyncio.to_thread(folder.is_dir):
                return folder
    found = await asyncio.to_thread(readable_checkpoints, Path(configs[RunConfig].output))
    own = {item.id for item in await store.steps.find()}
    alive = [item for item in found if own.issuperset(item.state.train_steps)]
    return next((item.model for item in alive if item.state.step == step), None)


async def _tokens(
    store: Store, source: Store, relative: Relative, steps: tuple[TrainStep, TrainStep],
    configs: tuple[Configs, Configs],
) -> Tokens | None:  # fmt: skip
    """Compare the weights of the tokens of one step; None without stored statistics."""
    base = base_folder(configs[0][ModelConfig])
    vocabulary = int(architecture(base).get("vocab_size") or 2**31 - 1)
    weights: list[dict[str, Floats]] = []
    batches: list[StepData] = []
    for owner, step, flags, regroups in (
        (source, steps[0], configs[0], False), (store, steps[1], configs[1], True),
    ):  # fmt: skip
        settings = RecordedSettings(
            freshness=freshness_of(flags),
            whitens=flags[TrainConfig].advantage_whitening == "batch",
            verifies=False,
            regrouping=regrouping_of(relative) if regroups else Regrouping(),
        )
        batch = await RecordedStream(source, [steps[0]], settings, last=step.step).take(step.step)
        if batch is None:
            return None
        batches.append(batch)
        stored = await owner.training.token_statistics(step)
        loss = LossSettings.of(flags[LossConfig])
        weights.append(await asyncio.to_thread(token_weights, batch, stored, loss, vocabulary))
    return _compare(steps[0].step, batches[0], weights[0], weights[1], _decoder(base))


def _compare(
    step: int, batch: StepData, parent: Mapping[str, Floats], child: Mapping[str, Floats],
    decode: Callable[[Sequence[int]], str],
) -> Tokens | None:  # fmt: skip
    both = [
        item
        for item in batch.data
        if item.id in parent and len(parent[item.id]) == len(child.get(item.id, ()))
    ]
    if not both:
        return None
    one, two = (np.concatenate([side[item.id] for item in both]) for side in (parent, child))
    lengths = [float(np.linalg.norm(side)) or 1.0 for side in (one, two)]
    gap = np.abs(one / lengths[0] - two / lengths[1])
    place = [(item, index) for item in both for index in range(item.trainable_tokens)]
    most: list[int] = []
    shown: Counter[str] = Counter()
    for index in np.argsort(-gap, kind="stable").tolist():
        record = place[index][0].id
        if gap[index] > 0 and shown[record] < _TOKENS_OF_RECORD and len(most) < _TOKENS_SHOWN:
            shown[record] += 1
            most.append(index)
    return Tokens(
        step=step,
        count=len(one),
        cosine=float(one @ two) / (lengths[0] * lengths[1]),
        only=(int(((one != 0) & (two == 0)).sum()), int(((one == 0) & (two != 0)).sum())),
        changes=tuple(
            _change(place[index], (float(one[index]), float(two[index])), decode) for index in most
        ),
    )  # fmt: skip


def _change(
    place: tuple[DBRecordData, int], weights: tuple[float, float], decode: Callable[[Sequence[int]], str]
) -> TokenChange:
    item, index = place
    ids = unpack_ids(item.input_ids).tolist()
    places = [place for span in item.spans for place in range(span.start, span.end)]
    at = places[index]
    return TokenChange(
        record=item.id, parent=weights[0], child=weights[1],
        before=decode(ids[max(0, at - _AROUND) : at]),
        token=decode(ids[at : at + 1]),
        after=decode(ids[at + 1 : at + 1 + _AROUND]),
    )  # fmt: skip


def _decoder(base: Path) -> Callable[[Sequence[int]], str]:
    """Return the function from token ids to their text; without a tokenizer the ids in brackets."""
    try:
        tokenizer = read_tokenizer_file(base / "tokenizer.json")
    except (OSError, AgentRLError, ValueError):
        return lambda ids: "".join(f"[{id}]" for id in ids)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
