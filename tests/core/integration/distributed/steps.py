"""Training data of steps that a planner has to merge, split and distribute over ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tiny_models import VOCABULARY, trajectory

from agentrl.documents.model_call import SamplingMask, pack_ids, pack_routing, unpack_ids
from agentrl.documents.record import TokenColumns, TopLogprobs
from agentrl.documents.training import DBRecordData

MAX_TOKENS = 48
"""Of a micro-batch: less than the largest group, more than the longest path."""
SYSTEM = 4
"""Tokens that every trajectory of a step begins with."""


def step_data(step: int) -> list[DBRecordData]:
    """Return the data of one step: every third, from step 1, has one trajectory, too few for two ranks.

    The others have three groups with a common context: six trajectories of two turns behind one prompt; two
    whose context is reset and branches; and one by itself. The first group, and each trajectory of the
    second, are more than a micro-batch holds.
    """
    rng = np.random.default_rng(step)
    shared = rng.integers(0, VOCABULARY, SYSTEM)
    alone = _behind(shared, _chain(rng, "alone/0", prompt=SYSTEM + 2), "alone")
    if step % 3 == 1:
        return [alone]
    prompt = np.concatenate([shared, rng.integers(0, VOCABULARY, 6)])
    group = [_behind(prompt, _chain(rng, f"group/{i}", prompt=len(prompt)), "group") for i in range(6)]
    resets = [_behind(shared, _reset(rng, f"resets/{i}"), "resets") for i in range(2)]
    return [*group[:3], alone, *resets, *group[3:]]


def _chain(rng: np.random.Generator, name: str, *, prompt: int) -> DBRecordData:
    """Return a trajectory of a prompt, a generated turn, an observation, and a second turn."""
    first, observed, second = (prompt + np.cumsum(rng.integers(2, 8, 3))).tolist()
    return trajectory(rng, [(0, second, -1)], [(prompt, first), (observed, second)], name)


def _reset(rng: np.random.Generator, name: str) -> DBRecordData:
    """Return a trajectory with 6 tokens of context (2 generated), two branches, and a fork in one of them."""
    nodes = [(0, 6, -1), (6, 14, 0), (14, 26, 1), (26, 37, 1), (37, 52, 0)]
    return trajectory(rng, nodes, [(4, 6), (15, 26), (29, 37), (40, 52)], name)


def _behind(prompt: np.ndarray, item: DBRecordData, task: str) -> DBRecordData:
    """Return ``item`` as a trajectory of ``task`` that begins with the ids of ``prompt``.

    Those with an even number were sampled with top-k: each token is one of the 20 ids around it. A teacher
    has a logprob of each token, and the likeliest ids of all but every fifth.
    """
    ids = unpack_ids(item.input_ids).copy()
    ids[: len(prompt)] = prompt
    trained = np.concatenate([ids[span.start : span.end] for span in item.spans])
    kept = (
        (trained[:, None] + np.arange(-10, 10)) % VOCABULARY
        if item.id[-1] in "024"
        else trained[:, None][:, :0]
    )
    mask = SamplingMask.of(kept.reshape(len(trained), -1).tolist()).pack()
    likeliest = [
        {} if place % 5 == 4 else {(id + shift) % VOCABULARY: -1.5 - shift / 4 for shift in range(6)}
        for place, id in enumerate(trained.tolist())
    ]
    values = np.linspace(-3.0, -0.5, len(trained), dtype=np.float32)
    columns = TokenColumns({"teacher": values}, {"teacher": TopLogprobs.of(likeliest)}).pack()
    return replace(
        item, task=task, input_ids=pack_ids(ids.tolist()), sampling_mask=mask, routing=_routing(ids),
        columns=columns,
    )  # fmt: skip


def _routing(ids: np.ndarray) -> bytes:
    """Return two of 8 experts for each token and layer, by its id; every seventh id routes freely."""
    first = ids[:, None] + np.arange(2)
    experts = np.stack([first % 8, (first + 1 + ids[:, None] % 3) % 8], -1)
    experts[ids % 7 == 0] = 0
    return pack_routing(experts)
