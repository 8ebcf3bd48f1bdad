from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.distributed.pipeline_stages import assign_layers, check_stages
from agentrl.errors import ModelError
from agentrl.model.check_model import check_model, list_kinds, small_copy
from agentrl.model.load import allocate, is_empty, placeholders


class ChangedLlama(LlamaForCausalLM):
    """A model whose forward does something that its configuration does not declare: it changes logits."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return logits that are not those of the head."""
        output: Any = super().forward(*args, **named)
        output.logits = type(self).change(output.logits)
        return output


def empty(kind: str, **more: Any) -> Any:
    with torch.device("meta"):
        return type(tiny_model(kind))(tiny_model(kind, **more).config)


def test_a_copy_is_small_and_equal_every_time_and_draws_no_random_numbers() -> None:
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=50_000, hidden_size=64, intermediate_size=4096, num_hidden_layers=40)
        )
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = small_copy(model), small_copy(model)
    assert torch.equal(torch.rand(1), expected)
    assert sum(parameter.numel() for parameter in one.parameters()) < 4e6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert len(one.model.layers) == 3
    assert len(model.model.layers) == model.config.num_hidden_layers == 40


def test_a_copy_has_a_layer_of_every_kind() -> None:
    kinds = ["full_attention"] * 4 + ["sliding_attention"]
    model = empty("qwen3", num_hidden_layers=5, layer_types=kinds, sliding_window=9, use_sliding_window=True)
    assert list_kinds(model) == [0, 0, 0, 0, 1]
    assert small_copy(model).config.layer_types == kinds


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_an_empty_model_is_checked_on_its_copy(kind: str) -> None:
    model = empty(kind, num_hidden_layers=4)
    check_model(model)
    check_stages(model, assign_layers(4, 4))
    assert is_empty(model)


@pytest.mark.parametrize(
    "change", [lambda logits: 2 * logits, lambda logits: 30 * torch.tanh(logits / 30)], ids=["scale", "cap"]
)
def test_logits_that_the_configuration_does_not_declare_are_found(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChangedLlama, "change", change, raising=False)
    with torch.device("meta"):
        model = ChangedLlama(tiny_model("llama").config)
    with pytest.raises(ModelError, match="the logits of ChangedLlama differ by"):
        check_model(model)


def test_tied_weights_stay_tied_when_they_are_allocated() -> None:
    model = empty("llama", tied=True)
    allocate(model, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_what_is_added_beside_placeholders_has_storage() -> None:
    model = empty("llama", tied=True)
    before = dict(model.named_parameters())
    with placeholders(model):
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.device.type == "cpu"
        model.extra = nn.Linear(2, 2, device=weight.device)
        model.model.embed_tokens.weight.requires_grad = False
    assert not model.extra.weight.is_meta
    assert all(model.get_parameter(name) is value for name, value in before.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.requires_grad
