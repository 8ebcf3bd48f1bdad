"""Stages of layers: who holds what, that together they are the model, and the order in which forests pass."""

from __future__ import annotations

import copy
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from tiny_models import VOCABULARY, chains, packed, tiny_model, tree
from torch import Tensor, nn

from agentrl.data.forest import TokenForest
from agentrl.distributed import parallel_model
from agentrl.distributed.mesh import Layout, Mesh
from agentrl.distributed.parallel_model import InFlight, PipelineModel
from agentrl.distributed.pipeline_stages import (
    assign_layers,
    assign_model_layers,
    check_stages,
    keep_stage,
    run_stage,
    tied_weight,
)
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention import build_executor
from agentrl.model.flops import Stopwatch
from agentrl.model.logprobs import ForwardOptions

SHARES = [range(1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize(
    ("layers", "stages", "head", "counts"),
    [
        (4, 1, 0.0, [4]),
        (4, 4, 9.0, [1, 1, 1, 1]),
        (8, 2, 0.0, [4, 4]),
        (7, 2, 0.0, [3, 4]),
        (28, 2, 5.0, [16, 12]),
        (28, 4, 5.0, [8, 8, 8, 4]),
        (9, 4, 0.0, [2, 2, 2, 3]),
    ],
)
def test_layers_are_dealt_so_that_the_slowest_stage_has_least(
    layers: int, stages: int, head: float, counts: list[int]
) -> None:
    shares = assign_layers(layers, stages, head)
    assert [len(share) for share in shares] == counts
    assert [place for share in shares for place in share] == list(range(layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pp_size is 3, and the model has 2 layers"):
        assign_model_layers(tiny_model("llama"), 3)


def test_a_decoder_without_a_list_of_layers_is_refused() -> None:
    model = tiny_model("llama")
    cast("Any", model.get_decoder()).layers = nn.Identity()
    with pytest.raises(ModelError, match="no list of layers"):
        assign_model_layers(model, 2)


def test_a_model_that_is_more_than_its_layers_is_refused_and_left_whole() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    check_stages(model, SHARES)
    before = model.state_dict().keys()
    decoder = cast("Any", model.get_decoder())
    plain = decoder.forward

    def scaled(**named: Any) -> Any:
        output = plain(**named)
        output.last_hidden_state = 1.1 * output.last_hidden_state
        return output

    decoder.forward = scaled
    with pytest.raises(ModelError, match="the hidden states of 3 stages differ by"):
        check_stages(model, SHARES)
    assert model.state_dict().keys() == before


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    cast("Any", model.get_decoder()).layers[1:3].requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="--freeze leaves nothing to train in stage 1"):
        check_stages(model, SHARES)


def cut(model: nn.Module) -> list[nn.Module]:
    stages = [copy.deepcopy(model) for _ in SHARES]
    for index, stage in enumerate(stages):
        keep_stage(stage, index, SHARES)
    return stages


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_every_parameter_once_under_its_own_name(tied: bool) -> None:
    model = tiny_model("qwen3", tied=tied, num_hidden_layers=4)
    names = [{name for name, _ in stage.named_parameters()} for stage in cut(model)]
    assert set.union(*names) == {name for name, _ in model.named_parameters()}
    shared = {"model.embed_tokens.weight"} if tied else set()
    assert [names[0] & names[1], names[0] & names[2], names[1] & names[2]] == [set(), shared, set()]
    assert [tied_weight(stage) is not None for stage in cut(model)] == [tied, False, tied]
    assert all(stage.get_input_embeddings().num_embeddings == VOCABULARY for stage in cut(model))  # type: ignore[operator]


@pytest.mark.parametrize("executor", ["sdpa", "varlen", "per_sequence"])
def test_stages_after_each_other_are_the_model_and_so_are_their_gradients(executor: str) -> None:
    model = tiny_model("qwen3", num_hidden_layers=4)
    forest = packed([*chains(1, 2), tree(1)])
    build_executor(model, executor)(forest).square().sum().backward()
    stages, passed = cut(model), [None]
    outputs: list[Tensor] = []
    for stage in stages:
        outputs.append(run_stage(build_executor(stage, executor), forest, cast("Any", passed[-1])))
        passed.append(cast("Any", outputs[-1].detach().requires_grad_()))
    gradient = 2 * outputs[-1].detach()
    for output, received in zip(reversed(outputs), reversed(passed[:-1]), strict=True):
        output.backward(gradient)
        gradient = cast("Any", received).grad if received is not None else gradient
    for stage in stages:
        for name, parameter in stage.named_parameters():
            expected = model.get_parameter(name).grad
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-4)


class Wire:
    """Between two neighbors: what is sent waits until it is received, as on a network without buffers."""

    def __init__(self) -> None:
        self._items: queue.Queue[tuple[Any, threading.Event]] = queue.Queue()

    def send(self, item: Any) -> threading.Event:
        taken = threading.Event()
        self._items.put((item, taken))
        return taken

    def receive(self) -> Any:
        item, taken = self._items.get(timeout=20)
        taken.set()
        return item


class StageMesh(Mesh):
    """The mesh of one of several stages, without processes."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(Layout(pp=stages))
        object.__setattr__(self, "stage", stage)

    def coordinate(self, name: str) -> int:
        return int(self.stage) if name == "pp" else 0


@dataclass(frozen=True)
class States:
    """Stand in for the hidden states of a forest."""

    forest: Any

    def requires_grad_(self) -> States:
        return self

    @property
    def grad(self) -> Any:
        return ("gradient", self.forest)


class Rehearsal(PipelineModel):
    """A stage that computes nothing and notes what it would: which forests go forward and back, and when."""

    def __init__(self, stage: int, wires: list[tuple[Wire, Wire]]) -> None:
        super().__init__(nn.Identity(), StageMesh(stage, len(wires) + 1), products=torch.float32)
        self.wires = wires
        self.notes: list[tuple[str, Any]] = []
        self.finals: list[bool] = []

    def forward(self, forest: Any, options: Any, received: Any = None) -> Any:
        assert received == (None if self._stage == 0 else States(forest))
        self.notes.append(("forward", forest))
        return (forest,)

    def _forward(self, forest: Any, options: Any, received: Any, watch: Any) -> InFlight:
        self(forest, options, received)
        return InFlight(forest, received, cast("Any", States(forest)), "")

    def _backward(self, item: InFlight, gradient: Any, watch: Any, *, is_last: bool) -> Any:
        assert gradient == States(item.forest).grad
        self.notes.append(("backward", item.forest))
        self.finals.append(is_last)
        return None if self._stage == 0 else States(item.forest).grad

    def _exchange(
        self, *, states: Any = None, gradient: Any = None, states_of: Any = None, gradient_of: Any = None
    ) -> Any:
        before = self.wires[self._stage - 1] if self._stage > 0 else None
        after = self.wires[self._stage] if not self._is_last else None
        sent = [before[1].send(gradient)] if before and gradient is not None else []
        sent += [after[0].send(states)] if after and states is not None else []
        arriving = before[0].receive() if before and states_of is not None else None
        returning = after[1].receive() if after and gradient_of is not None else None
        assert all(event.wait(20) for event in sent)
        return arriving, returning


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_forest_goes_forward_and_back_in_order_with_few_under_way(
    stages: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        parallel_model, "set_reduction", lambda stage, _, *, is_last: stage.finals.append(is_last)
    )
    wires = [(Wire(), Wire()) for _ in range(stages - 1)]
    rehearsals = [Rehearsal(stage, wires) for stage in range(stages)]
    forests = cast("list[TokenForest]", [f"forest {index}" for index in range(count)])

    def run(stage: Rehearsal) -> None:
        watch = Stopwatch(torch.device("cpu"))
        for forest, _ in stage.micro_batches(forests, ForwardOptions(), watch):
            stage.notes.append(("backward", forest))

    with ThreadPoolExecutor(stages) as pool:
        list(pool.map(run, rehearsals))
    for index, stage in enumerate(rehearsals):
        for kind in ("forward", "backward"):
            assert [forest for what, forest in stage.notes if what == kind] == forests
        under_way = most = 0
        for what, _ in stage.notes:
            under_way += 1 if what == "forward" else -1
            most = max(most, under_way)
        assert most == min(count, stages - index)
        assert stage.finals == [False] * (count - 1) + [True]
