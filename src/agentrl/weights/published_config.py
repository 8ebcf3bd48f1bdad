"""Write config.json so that readers of its older and of its newer spelling read one and the same model.

transformers 5 writes ``rope_parameters`` instead of ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor``, ``dtype`` instead of ``torch_dtype``, and ``num_local_experts`` instead of
``num_experts``. A reader of the older spelling finds none of these and takes defaults without a word, such as
a rotary base of 10,000 instead of 1,000,000.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.weights.folder import read_config

_OWN = frozenset(("architectures", "dtype", "torch_dtype", "quantization_config"))
"""Fields that describe what is written, not the base: the class, its dtype, and that nothing is quantized."""
_MOVED = ("rope_theta", "partial_rotary_factor")
"""Fields that transformers 5 moved into ``rope_parameters`` under the same name."""
_OLDER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


def write_config(folder: Path, base: Path | None, dtype: str | None, config: Any = None) -> None:
    """Complete the config.json in ``folder``, which transformers wrote, in both spellings.

    Fields of the config.json in ``base`` keep their spelling and their values. ``dtype``, if given, is
    written into each part of the model that names one. ``config`` is what transformers wrote, as an object:
    it knows the other names of its fields. Raises ModelError if a file cannot be read.
    """
    content = read_config(folder)
    if base is not None:
        content = _joined(read_config(base), content)
    for key, part in [
        ("", content),
        *((key, part) for key, part in content.items() if isinstance(part, dict)),
    ]:
        if not key or part.keys() & {"dtype", "torch_dtype"}:
            named = dtype or part.get("dtype")
            part.update({} if named is None else {"dtype": named, "torch_dtype": named})
        owner = getattr(config, key, None) if key else config
        for other, name in getattr(owner, "attribute_map", {}).items():
            if name in part:
                part.setdefault(other, part[name])
        _spell_rope(part)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _joined(base: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``base``, and beside them those that ``written`` alone has."""
    joined = {**written, **{key: value for key, value in base.items() if key not in _OWN}}
    for key, value in written.items():
        if key.endswith("_config") and isinstance(value, dict) and isinstance(base.get(key), dict):
            joined[key] = _joined(base[key], value)
    return joined


def _spell_rope(part: dict[str, Any]) -> None:
    """Write beside ``rope_parameters`` of a part what it says in the older spelling."""
    found = part.get("rope_parameters")
    if not isinstance(found, dict):
        return
    # By kind of layer in some models. The older spelling has one, of layers with full attention.
    whole, sliding = found.get("full_attention", found), found.get("sliding_attention")
    if not isinstance(whole, dict) or any(isinstance(value, dict) for value in whole.values()):
        return
    kind = str(part.get("model_type"))
    for name in _MOVED:
        older = _OLDER_NAMES.get(kind, {}).get(name, name)
        if name in whole and part.get(older) != whole[name]:
            part[older] = whole[name]
    if kind.startswith("gemma3") and isinstance(sliding, dict) and "rope_theta" in sliding:
        part["rope_local_base_freq"] = sliding["rope_theta"]
    scaling = {name: value for name, value in whole.items() if name not in _MOVED}
    part.setdefault("rope_scaling", None if scaling in ({}, {"rope_type": "default"}) else scaling)
