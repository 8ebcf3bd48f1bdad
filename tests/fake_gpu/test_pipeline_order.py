"""The exchanges of pipeline stages end as NCCL runs them: an operation waits for its counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed import parallel_model
from agentrl.distributed.parallel_model import InFlight, PipelineModel
from agentrl.model.flops import Stopwatch
from agentrl.model.logprobs import ForwardOptions

pytestmark = pytest.mark.fake_gpu


@dataclass(frozen=True)
class Operation:
    """A send to, or a receive from, stage ``peer``."""

    sends: bool
    peer: int
    tokens: int
    """Of the forest whose hidden states or gradient it moves; each forest has a length of its own."""


Batch = list[Operation]
"""Operations that start together; a stage goes on when all have ended."""


class RecordedStage(PipelineModel):
    """One stage of ``PipelineModel.micro_batches``, with layers that do nothing."""

    def __init__(self, stage: int, stages: int) -> None:
        nn.Module.__init__(self)
        self._place = stage, stages
        self._reduction = "last"
        self.backwards: list[int] = []

    def forward(self, *unused: Any) -> tuple[()]:
        return ()

    def _forward(
        self, forest: TokenForest, options: Any, received: Tensor | None, watch: Stopwatch
    ) -> InFlight:
        return InFlight(forest, received, _states(forest), "")

    def _backward(self, item: InFlight, gradient: Any, watch: Stopwatch, *, is_last: bool) -> Tensor | None:
        self.backwards.append(item.forest.tokens)
        return None if item.received is None else _states(item.forest)

    def _buffer(self, forest: TokenForest | None, peer: int) -> Tensor | None:
        if forest is None or not 0 <= peer < self._stages:
            return None
        buffer = _states(forest)
        buffer.grad = _states(forest)
        return buffer

    @property
    def _group(self) -> Any:
        return None

    @property
    def _stage(self) -> int:
        return self._place[0]

    @property
    def _stages(self) -> int:
        return self._place[1]

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1


def _states(forest: TokenForest) -> Tensor:
    return torch.empty(forest.tokens, 1, device="meta")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that the stages exchange from now on."""
    found: list[Batch] = []

    def operation(operate: Any, tensor: Tensor, *, group: Any, group_peer: int) -> Operation:
        return Operation(operate is dist.isend, group_peer, len(tensor))

    def start(operations: Batch) -> list[Any]:
        found.append(operations)
        return []

    monkeypatch.setattr(parallel_model.dist, "P2POp", operation)
    monkeypatch.setattr(parallel_model.dist, "batch_isend_irecv", start)
    return found


def deadlock(programs: Sequence[list[Batch]]) -> str:
    """Run the stages' batches against each other; return where they hang, or "".

    Two operations match if each is the first that is left between the two stages in its direction, and the
    stages run the batches that hold them.
    """
    left = [[list(batch) for batch in program] for program in programs]
    while any(left):
        before = sum(len(batch) for program in left for batch in program) + sum(map(len, left))
        for stage, program in enumerate(left):
            for operation in list(program[0]) if program else ():
                others = left[operation.peer][0] if left[operation.peer] else []
                mate = next((o for o in others if o.peer == stage and o.sends != operation.sends), None)
                if mate is not None:
                    assert mate.tokens == operation.tokens, f"stage {stage} exchanges another forest"
                    program[0].remove(operation)
                    others.remove(mate)
        left = [program[1:] if program and not program[0] else program for program in left]
        if sum(len(batch) for program in left for batch in program) + sum(map(len, left)) == before:
            return f"stages wait for {[program[:1] for program in left]}"
    return ""


@pytest.mark.parametrize("stages", range(2, 9))
def test_no_number_of_micro_batches_hangs(stages: int, batches: list[Batch]) -> None:
    for count in range(1, 25):
        forests = [forest_from_sequences([[0] * size], [[False] * size]) for size in range(1, count + 1)]
        programs: list[list[Batch]] = []
        for stage in range(stages):
            model = RecordedStage(stage, stages)
            watch = Stopwatch(torch.device("cpu"))
            for forest, _ in model.micro_batches(forests, ForwardOptions(), watch):
                model.backwards.append(forest.tokens)
            assert model.backwards == list(range(1, count + 1))
            programs.append(list(batches))
            batches.clear()
        assert not deadlock(programs), (stages, count)


def test_a_schedule_that_hangs_is_seen() -> None:
    first = [[Operation(sends=True, peer=1, tokens=1)], [Operation(sends=False, peer=1, tokens=1)]]
    second = [[Operation(sends=True, peer=0, tokens=1)], [Operation(sends=False, peer=0, tokens=1)]]
    assert deadlock([first, second])
