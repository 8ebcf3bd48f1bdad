"""One optimizer step's forward and backward over its micro-batches; the optimizer itself is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.data.prefix_merging import merge_prefixes
from agentrl.errors import ForestError
from agentrl.losses.compute import Denominators
from agentrl.losses.metrics import TokenMetrics
from agentrl.losses.settings import LossSettings
from agentrl.model.attention.compatibility import set_attention
from agentrl.model.attention.executor import build_executor
from agentrl.model.logprobs import DEFAULT_CHUNK, token_logprobs
from agentrl.model.output_head import DEFAULT_VOCAB_CHUNK, check_output_head, output_head
from agentrl.train.clock import Stopwatch
from agentrl.train.step_loss import StepLoss, TrajectorySums, token_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How the model is run; none of it changes a loss beyond rounding."""

    executor: str = "auto"
    chunk_size: int = DEFAULT_CHUNK
    """Tokens per chunk of the projection onto the vocabulary."""
    vocab_chunk_size: int = DEFAULT_VOCAB_CHUNK
    """Vocabulary entries per chunk of it."""
    autocast_dtype: torch.dtype | None = None
    """Matrix products in this dtype; the logits stay float32."""
    entropy_gradient: bool = False
    """Entropies carry a gradient; ``forward_backward`` sets it where the loss needs it."""


class Begin(Protocol):
    """What is called before each micro-batch."""

    def __call__(self, *, is_last: bool) -> None:
        """``is_last``: gradients are complete after its backward."""


class Stages(Protocol):
    """Stages of layers that every forest passes; this process computes one of them."""

    def logprobs(
        self, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """``forest_logprobs`` of each, without gradient, on every stage."""

    def train(
        self, forests: Sequence[TokenForest], options: ForwardOptions, loss: StepLoss, watch: Stopwatch
    ) -> None:
        """Forward and backward of all; the last stage adds to ``loss``, which stays 0 on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How one process of several computes its share of a step."""

    logprobs: Callable[[TokenForest, ForwardOptions], tuple[Tensor, Tensor]]
    """``forest_logprobs`` of the model that the processes hold together."""
    join: Callable[[float, TokenMetrics], tuple[float, TokenMetrics]]
    """Sums the loss and the metrics of all processes."""
    total: Callable[[Tensor], Tensor]
    """The sum of a tensor over all processes that train different data."""
    begin: Begin
    """Announces a micro-batch."""
    stages: Stages | None = None
    """What runs the forests in place of ``logprobs`` where the layers are spread over processes."""


def forest_logprobs(
    model: Any, forest: TokenForest, options: ForwardOptions | None = None
) -> tuple[Tensor, Tensor]:
    """Logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token of ``forest``.

    Both are of softmax(logits/temperature), with the temperature that each token was sampled at.
    """
    options = options or ForwardOptions()
    executor = build_executor(model, options.executor, trains=model.training)
    device = model.device
    enabled = options.autocast_dtype is not None
    with torch.autocast(device.type, dtype=options.autocast_dtype, enabled=enabled):
        hidden = executor(forest)
    return token_logprobs(
        hidden,
        output_head(model),
        torch.from_numpy(forest.parent[forest.target]).to(device),
        torch.from_numpy(forest.input_ids[forest.target]).to(device),
        temperature=torch.from_numpy(forest.temperature),
        entropy_gradient=options.entropy_gradient,
        chunk_size=options.chunk_size,
        vocab_chunk_size=options.vocab_chunk_size,
    )


def count_step(forests: Sequence[TokenForest]) -> Denominators:
    """The denominators of a step; over several ranks, their sum."""
    total = Denominators(0, 0)
    for forest in forests:
        whole = forest.row_tokens[forest.row]
        total = total + Denominators(forest.trainable_tokens, float((1.0 / whole).sum()))
    return total


@torch.no_grad()
def trajectory_sums(
    model: Any,
    forests: Sequence[TokenForest],
    settings: LossSettings,
    *,
    options: ForwardOptions | None = None,
    ranks: Ranks | None = None,
) -> TrajectorySums | None:
    """What a loss reads of whole trajectories, by one more forward over each forest; None where not needed.

    It is needed where the loss of a token depends on its whole trajectory (GSPO, corrections named ``seq_…``)
    and a forest of any process holds a part of one.
    """
    if not settings.reads_trajectory:
        return None
    numbers = 1 + max((int(forest.trajectory.max(initial=-1)) for forest in forests), default=-1)
    found = torch.tensor([any(forest.holds_parts for forest in forests), numbers], device=model.device)
    if ranks is not None:
        found = ranks.total(found)
    if not found[0]:
        return None
    sums = torch.zeros(3, int(found[1]), dtype=torch.float64, device=model.device)
    computed = each_logprobs(model, forests, options or ForwardOptions(), ranks)
    for forest, (logprobs, _) in zip(forests, computed, strict=True):
        batch = token_batch(forest, logprobs, settings)
        number = torch.from_numpy(forest.trajectory[forest.row]).to(model.device)
        sums.index_add_(1, number, TrajectorySums.of_tokens(batch, settings))
    if ranks is not None:
        sums = ranks.total(sums)
    return TrajectorySums(*sums)


def each_logprobs(
    model: Any, forests: Sequence[TokenForest], options: ForwardOptions, ranks: Ranks | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """``forest_logprobs`` of each forest in turn; with ``ranks``, of the model that they hold together.

    Called under ``no_grad``: stages of layers keep nothing to go back through.
    """
    if ranks is not None and ranks.stages is not None:
        yield from ranks.stages.logprobs(forests, options)
        return
    for forest in forests:
        yield _logprobs(model, forest, options, ranks)


def _logprobs(
    model: Any, forest: TokenForest, options: ForwardOptions | None, ranks: Ranks | None
) -> tuple[Tensor, Tensor]:
    if ranks is None:
        return forest_logprobs(model, forest, options)
    return ranks.logprobs(forest, options or ForwardOptions())


def forward_backward(
    model: Any,
    forests: Sequence[TokenForest],
    settings: LossSettings,
    *,
    options: ForwardOptions | None = None,
    denominators: Denominators | None = None,
    ranks: Ranks | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    watch: Stopwatch | None = None,
) -> dict[str, Any]:
    """Add the gradients of one step's loss to ``model``, a micro-batch at a time, and report the step.

    The loss and the gradients are those of all ``forests`` in one batch, however they are split, and also
    where they hold parts of trajectories. ``denominators`` are those of the whole step where ``forests`` are
    one rank's share, and with ``ranks`` every forest is run, trainable or not, since other processes wait for
    it. ``backward`` is called with each micro-batch's share of the loss. ``watch`` gets the seconds of
    ``forward`` and ``backward``.

    Returns ``loss``, ``tokens`` of ``forests``, ``trainable_tokens`` and ``trajectories`` of the whole step,
    and everything in ``TokenMetrics.report``. Raises ForestError where no token of the step is trainable,
    ConfigError for a loss or correction that does not exist, ModelError for a model that is not exact on the
    forests.
    """
    options = replace(options or ForwardOptions(), entropy_gradient=settings.entropy_coef > 0)
    whole = denominators or count_step(forests)
    if whole.tokens == 0:
        raise ForestError("a step without a trainable token", hint="leave out data without trainable spans")
    sums = trajectory_sums(model, forests, settings, options=options, ranks=ranks)
    watch = watch or Stopwatch(model.device)
    found = StepLoss(settings=settings, whole=whole, sums=sums)
    if ranks is not None and ranks.stages is not None:
        ranks.stages.train(forests, options, found, watch)
    else:
        for place, forest in enumerate(forests, 1):
            if forest.trainable_tokens == 0 and ranks is None:
                continue
            if ranks is not None:
                ranks.begin(is_last=place == len(forests))
            share = found.add(forest, *_logprobs(model, forest, options, ranks))
            watch.lap("forward")
            backward(share)
            watch.lap("backward")
    loss, metrics = found.loss, found.metrics
    if ranks is not None:
        loss, metrics = ranks.join(loss, metrics)
    counts = {
        "tokens": sum(forest.tokens for forest in forests),
        "trainable_tokens": whole.tokens,
        "trajectories": round(whole.trajectories),
    }
    return {"loss": loss, **counts, **metrics.report()}


@torch.no_grad()
def check_model(model: Any) -> None:
    """Refuse, before training, a model that executors or ``output_head`` do not reproduce; ModelError.

    Runs the model as it is and through each executor that may run it on two sequences with a common prefix.
    """
    vocabulary = model.config.get_text_config().vocab_size
    common = [index % vocabulary for index in range(8)]
    sequences = [[*common, 2 % vocabulary, 0, 1], [*common, 3 % vocabulary, 1]]
    forest = merge_prefixes(forest_from_sequences(sequences, [[False] * len(ids) for ids in sequences]))
    set_attention(model, "sdpa")
    alone = [
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        for ids in sequences
    ]
    logits = torch.cat([alone[0], alone[1][len(common) :]])
    for name in build_executor(model, trains=model.training).choices(forest):
        executor = build_executor(model, name, trains=model.training)
        check_output_head(model, executor(forest), logits)
