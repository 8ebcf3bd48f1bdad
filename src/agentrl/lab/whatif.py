"""Compare what-ifs with their parent: curves, the weight of each token in the loss, and the weights."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from agentrl.chat.model_folder import read_tokenizer_file
from agentrl.config.load import Configs
from agentrl.config.schema import LossConfig, ModelConfig, RunConfig
from agentrl.data.stream import StepData, freshness_of, whitens_data
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.run import Relative
from agentrl.documents.training import DBRecordData, TrainStep, readable_checkpoints
from agentrl.errors import AgentRLError, ConfigError
from agentrl.lab.flags import parent_configs
from agentrl.lab.rescore import Regrouping, regrouping_of
from agentrl.lab.whatif_run import (
    Floats,
    RecordedSettings,
    RecordedStream,
    checkpoint_roots,
    stored_flags,
    token_weights,
)
from agentrl.losses.settings import LossSettings
from agentrl.observe.plotting import COLORS
from agentrl.observe.terminal import MISSING, finite, number, table
from agentrl.store.client import Store, open_existing
from agentrl.weights.delta import LayerDifference, layer_differences
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
class ComparedChild:
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
class WhatIfComparison:
    """What the page shows."""

    parent: str
    steps: Mapping[int, TrainStep]
    children: Sequence[ComparedChild] = field(default_factory=tuple)


async def compare_runs(names: Sequence[str], here: Configs) -> WhatIfComparison:
    """Compare what-ifs of one parent with it. Raises ConfigError for any other run."""
    parents: set[str] = set()
    children: list[ComparedChild] = []
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
    return WhatIfComparison(parent=parents.pop(), steps=dict(sorted(steps.items())), children=children)


async def _child(
    store: Store, source: Store, relative: Relative, parents: Mapping[int, TrainStep], here: Configs
) -> ComparedChild:
    steps = {step.recorded.step: step for step in await store.steps.find() if step.recorded is not None}
    compared = [
        found
        for number in [at for at in sorted(steps) if at >= relative.since and at in parents][:_STEPS_COMPARED]
        if (found := await _tokens(store, source, relative, (parents[number], steps[number]), here))
    ]
    tokens = min(compared, key=lambda found: found.cosine, default=None)
    layers, why = await _layers(store, source, steps)
    return ComparedChild(
        name=store.run_name, changed=relative.changed, without=len(relative.without),
        steps=dict(sorted(steps.items())), tokens=tokens, layers=layers, no_layers=why,
    )  # fmt: skip


async def _layers(
    store: Store, source: Store, steps: Mapping[int, TrainStep]
) -> tuple[Sequence[LayerDifference], str | None]:
    """Return how far the weights of the last step are apart, or why that is not known."""
    if not steps:
        return (), "the what-if has trained no step"
    last = max(steps)
    folders = []
    for run, step in ((source, last), (store, steps[last].step)):
        folder = await _weights(run, step)
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


async def _configs(store: Store, step: TrainStep, here: Configs) -> Configs:
    """Return the flags of the trainer that made a step of a run."""
    found = (await stored_flags(store, [step]))[step.id]
    return parent_configs(found.values, found.given, here)


async def _weights(store: Store, step: int) -> Path | None:
    """Return a folder of this machine with the weights of a run after ``step``; None if none is stored."""
    for version in reversed(await store.policy_versions.all()):
        if version.step == step and version.is_full and version.pruned_at is None and step > 0:
            folder = Path(version.location)
            if await asyncio.to_thread(folder.is_dir):
                return folder
    roots = await checkpoint_roots(store)
    found = [item for root in roots for item in await asyncio.to_thread(readable_checkpoints, root)]
    own = {item.id for item in await store.steps.find()}
    alive = [item for item in found if own.issuperset(item.state.train_steps)]
    return next((item.model for item in alive if item.state.step == step), None)


async def _tokens(
    store: Store, source: Store, relative: Relative, steps: tuple[TrainStep, TrainStep],
    here: Configs,
) -> Tokens | None:  # fmt: skip
    """Compare the weights of the tokens of one step; None without stored statistics."""
    configs = await _configs(source, steps[0], here), await _configs(store, steps[1], here)
    base = base_folder(configs[0][ModelConfig])
    vocabulary = int(architecture(base).get("vocab_size") or 2**31 - 1)
    weights: list[dict[str, Floats]] = []
    batches: list[StepData] = []
    for owner, step, flags, regroups in (
        (source, steps[0], configs[0], False), (store, steps[1], configs[1], True),
    ):  # fmt: skip
        settings = RecordedSettings(
            freshness=freshness_of(flags),
            whitens=whitens_data(flags),
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


_WIDTH, _HEIGHT, _MARGIN = 420, 150, 8
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222 }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } tr { border-bottom: 1px solid #ddd }
th, td { padding: .2rem .7rem; text-align: right } th:first-child, td:first-child { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(25rem, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100%; background: #fafafa }
td.text { font: 13px ui-monospace, monospace; white-space: pre-wrap; text-align: left }
mark { background: #ffe08a } .key span { margin-right: 1rem } .note { color: #666 }
"""


def print_comparison(console: Console, found: WhatIfComparison) -> None:
    """Print the means over the steps, and how far each what-if is from the parent."""
    first, last = _ends(found)
    rows = _means_of(found)
    console.print(table(f"Steps {first}-{last} of {found.parent}: means", _COLUMNS, rows))


def write_page(found: WhatIfComparison, out: Path) -> None:
    """Write the page. Raises ConfigError for a file that cannot be written."""
    first, last = _ends(found)
    runs = [(found.parent, found.steps), *((child.name, child.steps) for child in found.children)]
    title = f"Steps {first}-{last} of {escape(found.parent)}, trained again"
    page = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1>",
        _table(["run", "differs in"], [[child.name, _differs(child)] for child in found.children]),
        _table(_COLUMNS, _means_of(found)),
        f"<h2>Curves</h2>{_key([name for name, _ in runs])}<div class=charts>",
        *(_chart(metric, [steps for _, steps in runs]) for metric in CURVES),
        "</div><h2>Tokens</h2><p class=note>The weight of a token is −∂loss/∂log π: above 0, the update makes"
        " it more likely. It is computed from the stored ratios of the step, without the KL to a reference"
        " and the entropy bonus. Tokens are ordered by the difference between the two vectors of weights,"
        " each scaled to length 1.</p>",
        *(_token_rows(found.parent, child) for child in found.children),
        "<h2>Weights</h2>",
        *(_layer_rows(found.parent, child) for child in found.children),
        "</html>",
    ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="give another --out") from error


_COLUMNS = ["run", *CURVES, "token cosine", "weights apart"]


def _ends(found: WhatIfComparison) -> tuple[int, int]:
    return min(found.steps, default=0), max(found.steps, default=0)


def _means_of(found: WhatIfComparison) -> list[list[str]]:
    rows = [[found.parent, *_means(found.steps), MISSING, MISSING]]
    for child in found.children:
        cosine = MISSING if child.tokens is None else f"{child.tokens.cosine:.3f}"
        apart = MISSING if child.distance is None else f"{child.distance:.1e}"
        rows.append([child.name, *_means(child.steps), cosine, apart])
    return rows


def _means(steps: Mapping[int, TrainStep]) -> list[str]:
    columns = [[value for _, value in _points(steps, name)] for name in CURVES]
    return [number(math.fsum(values) / len(values)) if values else MISSING for values in columns]


def _points(steps: Mapping[int, TrainStep], metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of the steps that have a value."""
    values = ((at, finite(step.metrics.get(metric))) for at, step in steps.items())
    return [(at, value) for at, value in values if value is not None]


def _differs(child: ComparedChild) -> str:
    listed = [f"{name}: {old} → {new}" for name, (old, new) in child.changed.items()]
    if child.without:
        listed.append(f"{child.without} Records left out")
    return ", ".join(listed) or "nothing"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _key(names: Sequence[str]) -> str:
    spans = (f'<span style="color:{_color(i)}">■ {escape(name)}</span>' for i, name in enumerate(names))
    return f"<p class=key>{''.join(spans)}</p>"


def _chart(metric: str, runs: Sequence[Mapping[int, TrainStep]]) -> str:
    """Return a figure with a line per run, the parent's beneath the others'; empty without a value."""
    lines = [_points(steps, metric) for steps in runs]
    points = [point for line in lines for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return f"{across * _WIDTH:.1f},{(1 - up) * _HEIGHT:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{_color(i)}" stroke-width="{3 if i == 0 else 1.5}"'
        f' points="{" ".join(place(*point) for point in line)}"/>'
        for i, line in enumerate(lines)
    )
    caption = f"{metric} <span class=note>{number(low)} to {number(high)}, steps {left}-{right}</span>"
    box = f"{-_MARGIN} {-_MARGIN} {_WIDTH + 2 * _MARGIN} {_HEIGHT + 2 * _MARGIN}"
    picture = f'<svg viewBox="{box}" role="img" aria-label="{metric}">{drawn}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"


def _token_rows(parent: str, child: ComparedChild) -> str:
    found = child.tokens
    if found is None:
        return f"<h3>{escape(child.name)}</h3><p class=note>Both runs store no values of single tokens.</p>"
    rows = "".join(
        f"<tr><td class=text>{escape(item.before)}<mark>{escape(item.token)}</mark>{escape(item.after)}</td>"
        f"<td>{item.parent:+.2e}</td><td>{item.child:+.2e}</td><td>{escape(item.record)}</td></tr>"
        for item in found.changes
    )
    return (
        f"<h3>{escape(child.name)}, step {found.step}</h3><p>{found.count:,} tokens; cosine of the weights"
        f" {found.cosine:.4f}. {found.only[0]:,} tokens have a weight in {escape(parent)} alone,"
        f" {found.only[1]:,} in {escape(child.name)} alone.</p><table><tr><th>token</th>"
        f"<th>{escape(parent)}</th><th>{escape(child.name)}</th><th>Record</th></tr>{rows}</table>"
    )


def _layer_rows(parent: str, child: ComparedChild) -> str:
    name = escape(child.name)
    if not child.layers:
        return f"<h3>{name}</h3><p class=note>{escape(child.no_layers or '')}</p>"
    rows = [
        [item.layer, f"{item.difference:.3e}", f"{item.norm:.4g}", f"{item.relative:.1e}"]
        for item in child.layers
    ]
    columns = ["layer", "‖difference‖", f"‖{parent}‖", "relative"]
    return f"<h3>{name} after step {max(child.steps)}</h3>{_table(columns, rows)}"
