"""Estimate a trajectory's advantages and the critic's targets by GAE, from values and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.training import DBRecordData

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the T trainable tokens of a trajectory, in the order of its spans."""

    advantage: Doubles
    """float64[T]."""
    target: Doubles
    """float64[T], the return that the critic learns; NaN: it learns nothing at the token."""


def estimate(
    data: DBRecordData,
    values: NDArray[np.floating],
    *,
    gamma: float,
    gae_lambda: float,
    over: Literal["tokens", "turns"],
) -> Estimate:
    """Return A_t = Σ_k (γλ)^k·δ_(t+k) with δ_t = r_t + γ·V_(t+1) − V_t, and the targets A_t + V_t.

    This is generalized advantage estimation (arXiv 1506.02438). ``values`` [T] are V before each token, in
    the order of spans. An episode is the trajectory's trained tokens in the order of their model calls, and
    ends after the last one, where V is 0. Context takes no time: the next trained token is the next state.
    With ``over`` turns, a model call is one action: V is that before its first token, where the critic learns
    alone, and all of its tokens have its advantage.

    Why not along the token tree? Calls that follow one another do not always lie behind one another in it: a
    chat format that drops earlier thoughts, and a context reset, begin a branch or a root. Tokens of a branch
    that nothing continues would never see the score. In the order of calls each token has one successor,
    however its trajectory branches, and a single chain is the textbook's.
    """
    if not data.spans:
        return Estimate(np.zeros(0), np.zeros(0))
    order, call = _in_time(data)
    # Begin an action at each token, or where the call changes.
    starts = np.arange(len(order))
    if over == "turns":
        starts = np.flatnonzero(np.diff(call, prepend=-1))
    before = values.astype(np.float64)[order][starts]
    after = np.append(before[1:], 0.0)
    rewards = np.add.reduceat(_rewards(data, call), starts)
    advantage = _discounted_sums(rewards + gamma * after - before, gamma * gae_lambda)
    estimated = Estimate(np.empty(len(order)), np.full(len(order), np.nan))
    estimated.advantage[order] = np.repeat(advantage, np.diff(np.append(starts, len(order))))
    estimated.target[order[starts]] = advantage + before
    return estimated


def _in_time(data: DBRecordData) -> tuple[Ints, Ints]:
    """Return int64[T] twice: the trainable tokens by model call, and the call of each, ascending."""
    lengths = np.array([span.end - span.start for span in data.spans])
    first = np.cumsum(lengths) - lengths
    by_call = sorted(range(len(lengths)), key=lambda i: (data.spans[i].call, data.spans[i].start))
    order = np.concatenate([np.arange(first[i], first[i] + lengths[i]) for i in by_call])
    call = np.repeat([data.spans[i].call for i in by_call], lengths[by_call])
    return order, call


def _rewards(data: DBRecordData, call: Ints) -> Doubles:
    """Return float64[T], the reward after each token in time.

    The score comes after the last token, a call's own reward after its last one. The reward of a call that is
    not trained comes after the trained token before it; without one it is no policy's doing.
    """
    rewards = np.zeros(len(call))
    ends = np.searchsorted(call, np.arange(len(data.turn_advantages)), side="right") - 1
    for end, reward in zip(ends, data.turn_advantages, strict=True):
        if end >= 0:
            rewards[end] += reward
    rewards[-1] += data.advantage
    return rewards


def _discounted_sums(summands: Doubles, decay: float) -> Doubles:
    """Return S_t = x_t + ``decay``·S_(t+1), by doubling: after k rounds S_t has 2^k summands.

    A loop over a million tokens would take Python a second; these rounds are a few vector operations.
    """
    sums, reach, factor = summands.copy(), 1, decay
    while reach < len(sums) and factor:
        sums[:-reach] += factor * sums[reach:].copy()
        reach, factor = 2 * reach, factor * factor
    return sums
