"""Read ``assets/agent_config.yml``: endpoints of judges and browse models, and their limits; and prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from agentrl.base.installation import shipped_files
from agentrl.base.validation import PlainText, SettingsFile, SettingsModel, Switch, Text, read_settings, wrong

S = TypeVar("S", bound="AgentSection")


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise wrong("a number")
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(_no_boolean)]
"""A number from 1 on; text with one is read too, which an environment variable gives."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_boolean)]
Name = Annotated[PlainText, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits(SettingsModel):
    """The limits of a model in one process (None: no limit), and its prices."""

    max_concurrency: Count | None = 32
    """Requests under way at a time."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and reply together."""
    input_price: Amount = 0.0
    """Price of a million prompt tokens, in any currency."""
    output_price: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint(_Limits):
    """One model behind an OpenAI-compatible API."""

    model: Name
    base_url: Text
    api_key: Name = field(repr=False)
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0}, compare=False)
    """Parameters of every request."""
    extra_body: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """More of them, which win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection(SettingsModel):
    """One section of the file: its endpoints, and the tries and times of each (seconds)."""

    name: str
    models: tuple[ModelEndpoint, ...]
    max_retries: Count = 3
    """Tries of one model."""
    retry_delay: Amount = 1.0
    backoff_factor: Annotated[Amount, Field(ge=1)] = 2.0
    timeout: Annotated[Amount, Field(ge=0.001)] = 60.0
    cost_limit: Amount | None = None
    """What one process may spend on this section, in the currency of the prices; None: no limit."""
    extra_body: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Parameters of every request of all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSection(AgentSection):
    """``scorer_agent``: the judge."""

    judge_prompt_template: str | None = None
    rubric_prompt_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEndpoint(ModelEndpoint):
    """A server of a reward model."""

    protocol: Literal["sglang", "vllm"] = "sglang"
    """Of its ``/classify``; the local engine has SGLang's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection(AgentSection):
    """``reward_model``: the scorer of that name (docs/scoring.md)."""

    models: tuple[RewardEndpoint, ...]
    folder: Text
    """The model's folder: its tokenizer, its chat template, and the scale of its rewards."""
    max_tokens: Count | None = None
    """Longest trajectory, if it is not the model's whole context."""
    truncate: Switch = False
    """Leave out the beginning of a longer one; else it is not scored."""
    normalize: Literal["none", "affine", "sigmoid"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowseSection(AgentSection):
    """``browse_agent``: what condenses long results of tools (docs/browse_agent.md)."""

    status: Switch = True
    browse_tools: tuple[Text, ...] = ()
    default_purpose: Mapping[str, PlainText] = field(default_factory=dict)
    """Tool → what to look for."""
    min_prompt_length: Count = 1500
    """Tokens; a shorter result is passed on as it is."""
    max_prompt_length: Count = 60_000
    """Tokens of one part; a longer result is read in parts."""
    tokenizer_path: Text | None = None
    enable_logging: Switch = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice(SettingsModel):
    """What a million tokens of a model cost."""

    input: Amount = 0.0
    output: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(SettingsModel):
    """The file ``--prices``: what a run pays for, in one currency."""

    gpu_hour: Amount = 0.0
    """An hour of one GPU; an engine or a trainer without any counts as one."""
    tool_second: Amount = 0.0
    models: Mapping[str, ModelPrice] = field(default_factory=dict)
    """By the name of a judge, a browse agent or a fixed model; in place of its ``input_price`` and
    ``output_price``."""


model_prices: dict[str, ModelPrice] = {}
"""The prices of models that ``use_prices`` read: each call is stored with what it cost then."""


def read_prices(path: str | Path | None) -> Prices | None:
    """Return the prices of a file; None without a path. Raises ConfigError."""
    if path is None:
        return None
    hint = "write gpu_hour, tool_second and models: docs/operations.md#what-a-run-costs"
    file = read_settings(path, what="the file of --prices,", hint=hint)
    return file.check(Prices, file.content)


def use_prices(path: str | Path | None) -> None:
    """Read the prices: each call of a model is stored with what it costs by them from now on."""
    model_prices.update(prices.models if (prices := read_prices(path)) else {})


def load_judge(path: str | Path) -> JudgeSection:
    """Return the section ``scorer_agent``. Raises ConfigError."""
    return _load(path, "scorer_agent", JudgeSection)


def load_reward(path: str | Path) -> RewardSection:
    """Return the section ``reward_model``. Raises ConfigError."""
    return _load(path, "reward_model", RewardSection)


def load_browse(path: str | Path, *, is_required: bool = False) -> BrowseSection | None:
    """Return the section ``browse_agent``; None without it or with ``status: false``.

    Raises ConfigError, without the file only if it ``is_required``.
    """
    section = _section(_read(path), "browse_agent") if is_required or Path(path).exists() else None
    if section is None or section.get("status") is False:
        return None
    return _load(path, "browse_agent", BrowseSection)


def section_values(path: str | Path, name: str) -> dict[str, Any]:
    """Return a section as it stands in the file, variables expanded; {} without the file or the section."""
    file = _read(path) if Path(path).exists() else None
    section = None if file is None else _section(file, name)
    return {} if file is None or section is None else dict(file.expand(section, name))


def _load(path: str | Path, name: str, kind: type[S]) -> S:
    """Read a section; ``${NAME}`` becomes an environment variable.

    A limit in the section is the default of its models. Raises ConfigError for a missing file, section, key
    or variable, an unknown key and a wrong value.
    """
    file = _read(path)
    section = _section(file, name)
    if not section or not section.get("models"):
        raise file.error(f"no section {name} with models", name)
    values = file.expand(section, name)
    limits = {item.name: values.pop(item.name) for item in dataclasses.fields(_Limits) if item.name in values}
    file.check(_Limits, limits, name)
    if isinstance(values["models"], list):
        values["models"] = [
            {**limits, **each} if isinstance(each, dict) else each for each in values["models"]
        ]
    checked = file.check(kind, values, name, name=name)
    return replace(
        checked,
        models=tuple(
            replace(each, params={**each.params, **checked.extra_body, **each.extra_body})
            for each in checked.models
        ),
    )


def _read(path: str | Path) -> SettingsFile:
    example = shipped_files() / "agent_config_example.yml"
    hint = f"copy {example} there and fill it in, or give another file by --agent_config_path"
    return read_settings(path, what="the agent configuration", hint=hint)


def _section(file: SettingsFile, name: str) -> dict[str, Any] | None:
    if not isinstance(file.content, dict):
        raise file.error("the file does not hold a mapping")
    section = file.content.get(name)
    return section if isinstance(section, dict) else None
