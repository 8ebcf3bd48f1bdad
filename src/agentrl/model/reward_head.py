"""A reward model: a decoder, and a linear head that makes one number of the last token's hidden state.

It is transformers' ``…ForSequenceClassification`` with one label, which SGLang and vLLM serve unchanged. The
head is float32 whatever the decoder is: rewards that are compared differ by less than bfloat16 resolves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from agentrl.config.schema import ModelConfig
from agentrl.data.forest import TokenForest, forest_from_sequences, merge_prefixes
from agentrl.errors import ModelError
from agentrl.model.attention import build_executor, set_attention
from agentrl.model.check_model import small_copy
from agentrl.model.load import check_names, empty_as, is_empty, load_as
from agentrl.weights.folder import read_config

HEAD = "score.weight"
_TOLERANCE = 1e-2
_HINT = "give a causal language model, or a reward model that was trained from one"


def is_reward_model(folder: Path) -> bool:
    """Return whether the config.json in ``folder`` names a sequence classifier. Raises ModelError."""
    named = read_config(folder).get("architectures") or [""]
    return str(named[0]).endswith("ForSequenceClassification")


def load_reward_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, *, without_weights: bool = False
) -> PreTrainedModel:
    """Load a causal language model or a reward model as a reward model with its decoder in ``dtype``.

    A causal model gets a head that ``draw_head`` draws. ``without_weights`` all stay on the meta device.
    Raises ModelError for a model with images, with several labels, or of a class without such a head.
    """
    content = read_config(folder)
    if "vision_config" in content:
        raise ModelError(f"{folder} reads images, and a reward model reads text only", hint=_HINT)
    labels = content.get("num_labels") or len(content.get("id2label") or "12")
    if is_reward_model(folder) and labels != 1:
        raise ModelError(
            f"{folder} is a classifier of {labels} labels, and a reward is one number", hint=_HINT
        )
    kind: Any = AutoModelForSequenceClassification
    settings = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if without_weights:
        model = empty_as(kind, folder, config, dtype, **settings)
    else:
        model, report = load_as(kind, folder, config, dtype, **settings)
        missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
        missing -= set(new_tensors(folder))
        check_names(str(folder), model, model.state_dict().keys(), missing, report["unexpected_keys"])
    if not isinstance(model, GenericForSequenceClassification):
        raise ModelError(
            f"{type(model).__name__} is no decoder with a linear head on its last token", hint=_HINT
        )
    head = model.score
    head.weight.data = head.weight.data.float()
    # Publish it in float32 too: this is what transformers keeps when it converts the other weights.
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "score"}
    if not without_weights and new_tensors(folder):
        draw_head(model)
    return model


def new_tensors(folder: Path) -> tuple[str, ...]:
    """Return the tensors of the reward model that ``folder`` does not hold: the head, unless it has one."""
    return () if is_reward_model(folder) else (HEAD,)


@torch.no_grad()
def draw_head(model: Any, seed: int = 0) -> None:
    """Draw the head from N(0, 1/(H + 1)), as arXiv 2009.01325 does; equal on all ranks that share it."""
    weight = model.score.weight
    drawn = torch.empty(weight.shape).normal_(
        std=1 / math.sqrt(weight.shape[-1] + 1), generator=torch.Generator().manual_seed(seed)
    )
    if isinstance(weight, DTensor):
        # Take each rank's own part: all ranks have drawn the same.
        own = distribute_tensor(
            drawn.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
        )
        weight.copy_(own)
    else:
        weight.copy_(drawn)


def forest_rewards(model: Any, hidden: Tensor, forest: TokenForest) -> Tensor:
    """Return the reward at each trainable token of ``forest``, float32[T], with gradient.

    ``hidden`` [N, H] has a row per token. A trajectory's one trainable token is its last.
    """
    last = torch.from_numpy(forest.target).to(hidden.device)
    return cast(Tensor, model.score(hidden[last].float()))[:, 0]


@torch.no_grad()
def check_reward_model(model: Any) -> None:
    """Raise ModelError unless each executor that may run ``model`` gives the rewards of its plain decoder.

    As ``check_model`` does, it checks a small copy of a model that is on the meta device or in bfloat16.
    """
    if model.dtype == torch.bfloat16 or is_empty(model):
        model = small_copy(model)
    common = list(range(8))
    sequences = [[*common, 2, 0, 1], [*common, 3, 1]]
    marks = [[place == len(ids) - 1 for place in range(len(ids))] for ids in sequences]
    forest = merge_prefixes(forest_from_sequences(sequences, marks))
    set_attention(model, "sdpa")
    states = [
        model.get_decoder()(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        for ids in sequences
    ]
    own = model.score(torch.cat([each.last_hidden_state[0, -1:] for each in states]).float())[:, 0]
    for name in build_executor(model).choices(forest):
        found = forest_rewards(model, build_executor(model, name)(forest), forest)
        error = float((found - own).abs().max())
        # Negate <=, so that NaN is refused too.
        if not error <= _TOLERANCE * max(1.0, float(own.abs().max())):
            raise ModelError(
                f"a reward of {type(model).__name__} differs by {error:.3g} from its plain decoder's",
                hint=_HINT,
            )
