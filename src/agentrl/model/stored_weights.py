"""Check that a model has the weights that its folder holds: none of them random, and none left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentrl.errors import ModelError

_LISTED = 3


def check_report(where: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise ModelError unless ``from_pretrained``, by its loading ``report``, loaded what ``where`` holds."""
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    check_names(where, model, model.state_dict().keys(), missing, report["unexpected_keys"])
    # transformers unties what differs. Engines read config.json instead, and skip the separate head.
    declared = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    if untied := declared - model.all_tied_weights_keys.keys():
        raise ModelError(
            f"the weights in {where} cannot be loaded: {tied_apart(min(untied))}",
            hint="set tie_word_embeddings to false if the head is the model's own; else delete it",
        )


def check_names(
    where: str, model: Any, known: Collection[str], missing: Collection[str], unused: Collection[str]
) -> None:
    """Raise ModelError if a tensor of ``model`` is in no file, or if one of the files belongs into the model.

    ``known`` are the tensors of the model or of its stage, ``missing`` those of them that no file has, and
    ``unused`` the other tensors of the files. A whole layer may be unused, such as one that predicts further
    tokens; a bias or a scale beside a weight may not, nor one of more layers than config.json counts.
    """
    kind = type(model).__name__
    if missing:
        others = f"; they have {_listed(unused)} instead" if unused else ""
        raise ModelError(
            f"the weights in {where} lack {len(missing)} tensors of {kind}: {_listed(missing)}{others}",
            hint="give a folder that holds the whole model, with the names of its architecture",
        )
    if getattr(model.config, "quantization_config", None) is not None:
        return  # the quantizer has read scales and packed values
    config = model.config.get_text_config()
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    layers = config.num_hidden_layers + predicting  # transformers has no modules for the latter
    owners = {name.rpartition(".")[0] for name in known}
    modules = {owner[:end] for owner in owners for end in _ends(owner)}
    left_out = []
    for name in unused:
        nearest = name[: max((end for end in _ends(name) if name[:end] in modules), default=0)]
        part = name.removeprefix(nearest).lstrip(".").partition(".")[0]
        if nearest in owners or (nearest and part.isdigit() and int(part) >= layers):
            left_out.append(name)
    if left_out:
        raise ModelError(
            f"{kind} leaves out {len(left_out)} tensors that {where} holds: {_listed(left_out)}",
            hint="correct config.json: its number of layers, its biases, its quantization",
        )


def tied_apart(name: str) -> str:
    """Return what is wrong with files that hold a tied tensor ``name`` with values of its own."""
    return f"{name} is tied to another parameter by config.json, and the files hold different values"


def _ends(name: str) -> list[int]:
    """Return where the name of each module around a tensor or module ends, itself included."""
    return [place for place, letter in enumerate(name) if letter == "."] + [len(name)]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_LISTED]) + (", …" if len(names) > _LISTED else "")
