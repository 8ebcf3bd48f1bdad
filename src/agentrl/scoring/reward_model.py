"""Scorer ``reward_model``: the reward that a server of a trained reward model gives to the conversation.

The text is rendered and tokenized here, by the model's own folder, and the server gets ids. So a score is
that of the ids which training compares, whatever template or special tokens the server would add.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from agentrl.base.concurrency import Deadline, current_deadline
from agentrl.chat.chat_format import ChatFormat, Message, require_text_only
from agentrl.chat.model_folder import model_context_length
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import ModelConfig
from agentrl.errors import AgentRLError, ConfigError, ModelError, ScorerError, judge
from agentrl.llm.agent_config import RewardEndpoint, RewardSection, load_reward
from agentrl.llm.chat import Completion, EndpointClient, LLMError, NoAnswerError, Use, endpoint_client, put
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer

REWARD = "reward_model"
"""The scorer's name, and that of its section in ``--agent_config_path``."""
REWARDS = "rewards.json"
"""The file of a model's folder with the ``RewardScale``."""
_ENDLESS = 2**31
"""Context of a model whose configuration names none."""
_SECONDS = 120.0
"""Time limit of a score outside ``run_scorer``."""
_RESERVE = 0.05
"""Fraction of the scorer's time that is kept to report which models failed, and how."""
_CHECKED: Sequence[Message] = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
_SERVE = "serve it by `sglang … --is-embedding`, `vllm serve … --runner pooling` or the local engine"


def render_trajectory(chat_format: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation as a reward model reads it, in training and from a server.

    Tools are not described. Raises ImageError for images, TrajectoryError for what cannot be rendered.
    """
    require_text_only(messages, "a reward model")
    return chat_format.render(messages, None, add_generation_prompt=False)


@dataclass(frozen=True, slots=True)
class RewardScale:
    """Mean and standard deviation of a model's rewards on the data that it was measured on."""

    mean: float = 0.0
    scale: float = 1.0
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What training measured, for the reader of the file."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``rewards.json``."""
        return asdict(self)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the scale that ``folder`` has; None without the file. Raises ModelError for a wrong one."""
        path = folder / REWARDS
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = cls(float(content["mean"]), float(content["scale"]), content.get("measured") or {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if not (math.isfinite(found.mean) and 0 < found.scale < math.inf):
            raise ModelError(f"{path} has mean {found.mean} and scale {found.scale}; the scale is above 0")
        return found

    def normalize(self, reward: float, how: str) -> float:
        """Return ``reward`` as it is (``none``), in standard deviations (``affine``), or σ of these."""
        if how == "none":
            return reward
        value = (reward - self.mean) / self.scale
        # Avoid an overflow of exp: σ(x) = (1 + tanh(x/2))/2.
        return value if how == "affine" else 0.5 * (1.0 + math.tanh(0.5 * value))


@dataclass(frozen=True)
class RewardModel:
    """How the reward model of a section reads conversations, and where it is asked."""

    section: RewardSection
    chat_format: ChatFormat
    scale: RewardScale
    max_tokens: int
    """Most tokens of a trajectory: those of the section, or the model's context if that is shorter."""

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the model of the section ``reward_model``. Raises ConfigError."""
        section = load_reward(path)
        folder = Path(section.folder)
        try:
            chat_format, scale, context = _open_folder(folder, _changed(folder))
        except ModelError as error:
            raise ConfigError(f"reward_model.folder: {error.message}", hint=error.hint) from error
        if scale is None and section.normalize != "none":
            raise ConfigError(
                f"reward_model.normalize is {section.normalize}, and {folder} has no {REWARDS}",
                hint='set it to none, or write {"mean": …, "scale": …} of its rewards there',
            )
        limit = min(section.max_tokens or _ENDLESS, context or _ENDLESS)
        return cls(section, chat_format, scale or RewardScale(), limit)

    def render(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """Return a conversation's ids, and how many before them are left out. Raises ScorerError."""
        try:
            ids = render_trajectory(self.chat_format, messages)
        except AgentRLError as error:
            raise ScorerError(f"the reward model cannot read it: {error.message}", hint=error.hint) from error
        excess = max(0, len(ids) - self.max_tokens)
        if excess and not self.section.truncate:
            is_own = self.max_tokens == self.section.max_tokens
            bound = "reward_model.max_tokens" if is_own else f"the context of {self.section.folder}"
            more = "raise it, if the model and its server take more, or " if is_own else ""
            raise ScorerError(
                f"the trajectory has {len(ids)} tokens, and the reward model reads {self.max_tokens}:"
                f" {bound}",
                hint=f"{more}set reward_model.truncate: true to leave out the beginning",
            )
        return ids[excess:], excess

    async def reward(self, ids: Sequence[int], deadline: Deadline) -> tuple[float, dict[str, Any]]:
        """Return the reward of the first server that gives one, and details for the Record.

        Raises ScorerError, which names an outage if every server is down.
        """

        async def request(client: EndpointClient, timeout: float, use: Use) -> Completion:
            return await _ask(client, ids, timeout, use)

        try:
            answer = await put(self.section, request, len(ids), reward_of, deadline)
        except NoAnswerError as error:
            names = ", ".join(endpoint.model for endpoint in self.section.models)
            raise ScorerError(
                f"no reward model gave a reward: {error}",
                hint="see reward_model in the agent config",
                outage=judge(names) if error.is_outage else None,
                retry_after=error.retry_after,
            ) from error
        return answer.value, {"model": answer.model, "tokens": len(ids), "seconds": answer.spent.seconds}


def _changed(folder: Path) -> tuple[int, ...]:
    """Return when the files that decide how a model reads were written: another may take its place."""
    files = (folder / name for name in ("config.json", "tokenizer.json", "chat_template.jinja", REWARDS))
    return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)


@lru_cache(maxsize=4)
def _open_folder(folder: Path, changed: tuple[int, ...]) -> tuple[ChatFormat, RewardScale | None, int | None]:
    chat_format = open_chat_format(folder, ModelConfig())
    return chat_format, RewardScale.read(folder), model_context_length(folder)


@scorer(REWARD)
async def reward_model(context: ScorerContext) -> ScoreResult:
    """Return the reward of the conversation's last token, normalized as the section says.

    Raises ScorerError if no server gives one finite number, and for a trajectory that is too long, has images
    or no conversation.
    """
    if not context.messages:
        raise ScorerError("the trajectory has no conversation that a reward model could read")
    model = await asyncio.to_thread(RewardModel.open, context.agent_config_path)
    ids, left_out = await asyncio.to_thread(model.render, context.messages)
    limit = current_deadline()
    seconds = _SECONDS if limit is None else limit.left()
    reward, details = await model.reward(ids, Deadline(seconds * (1 - _RESERVE)))
    if left_out:
        details["left_out_tokens"] = left_out
    return ScoreResult(model.scale.normalize(reward, model.section.normalize), {"reward": reward, **details})


async def _ask(client: EndpointClient, ids: Sequence[int], timeout: float, use: Use) -> Completion:
    """Send ids to a server; return its reply as it is. Raises LLMError."""
    endpoint = client.endpoint
    assert isinstance(endpoint, RewardEndpoint)
    if endpoint.protocol == "sglang":
        body: dict[str, Any] = {"input_ids": list(ids)}
    else:  # without use_activation vLLM answers the sigmoid of a reward
        body = {"model": endpoint.model, "input": list(ids), "use_activation": False}
    started = time.monotonic()
    reply = await client.post("/classify", body, timeout)
    use.amount = len(ids)
    return Completion(
        model=endpoint.model, text=reply.decode("utf-8", "replace"), prompt_tokens=len(ids),
        completion_tokens=0, cost=len(ids) * endpoint.input_price / 1e6, seconds=time.monotonic() - started,
    )  # fmt: skip


def reward_of(reply: str) -> float | None:
    """Return the reward in a reply of SGLang or vLLM; None unless it holds exactly one, and that is finite.

    SGLang answers {"embedding": [r]}, vLLM {"data": [{"probs": [r]}]}. Several numbers are a hidden state, or
    the labels of a classifier.
    """
    try:
        content = json.loads(reply)
        values = content["data"][0]["probs"] if "data" in content else content["embedding"]
        (value,) = values
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


async def refused_endpoints(model: RewardModel) -> tuple[list[str], list[str]]:
    """Send each server one conversation; return those that serve no reward model, and those that are down."""
    ids, _ = model.render(_CHECKED)
    wrong: list[str] = []
    down: list[str] = []
    for endpoint in model.section.models:
        client = await endpoint_client(endpoint)
        use = await client.limits.acquire(len(ids))
        try:
            reply = await _ask(client, ids, model.section.timeout, use)
        except LLMError as error:
            # A server that generates has no such path, or refuses it.
            is_wrong = not error.is_outage or error.status in (404, 405)
            (wrong if is_wrong else down).append(f"{endpoint.model}: {error}")
            continue
        finally:
            client.limits.release()
        if reward_of(reply.text) is None:
            wrong.append(f"{endpoint.model} answers {reply.text[:200]!r}, which is not one finite number")
    return [f"reward_model: {problem}\n    → {_SERVE}" for problem in wrong], down
