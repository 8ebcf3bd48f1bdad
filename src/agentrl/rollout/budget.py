"""Keep prompts and generations within the model's context length."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.schema import AgentConfig, SamplingConfig
from agentrl.documents.sampling import SamplingParams

_SMALLEST_SHARE = 4
"""In a context shorter than the limits allow for, the reserve is at most this fraction: a quarter."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The tokens that a trajectory's prompts and generations may have.

    ``context_length`` is the largest number of tokens of a prompt and its continuation; None if unknown.
    """

    config: AgentConfig
    context_length: int | None

    @property
    def prompt_limit(self) -> int:
        """Return the length of the longest prompt, which leaves at least one token to generate."""
        if self.context_length is None:
            return self.config.max_prompt_tokens
        return min(self.config.max_prompt_tokens, self.context_length - 1)

    @property
    def full_at(self) -> int:
        """Return the length up to which a context is not full: the limit without the reserve."""
        limit, reserve = self.prompt_limit, self.config.prompt_reserve_tokens
        if limit < self.config.max_prompt_tokens:
            reserve = min(reserve, limit // _SMALLEST_SHARE)
        return limit - reserve

    def clamp(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Return ``params`` with ``max_new_tokens`` lowered to what the prompt leaves of the context."""
        if self.context_length is None or prompt_tokens + params.max_new_tokens <= self.context_length:
            return params
        return params.replace(max_new_tokens=max(1, self.context_length - prompt_tokens))

    def name_limit(self, prompt_tokens: int) -> str:
        """Return why a prompt of this length does not fit."""
        if self.prompt_limit == self.config.max_prompt_tokens:
            name = "--max_prompt_tokens is"
        else:
            name = f"the context of {self.context_length:,} tokens allows"
        return f"the next prompt has {prompt_tokens:,} tokens, and {name} {self.prompt_limit:,}"


def context_problem(agent: AgentConfig, sampling: SamplingConfig, context_length: int | None) -> str | None:
    """Return why the limits exceed the context; None if they fit or the length is unknown."""
    longest = agent.max_prompt_tokens + sampling.max_new_tokens
    if context_length is None or longest <= context_length:
        return None
    budget = Budget(agent, context_length)
    left = context_length - budget.prompt_limit
    return (
        f"--max_prompt_tokens {agent.max_prompt_tokens} + --max_new_tokens {sampling.max_new_tokens} exceed"
        f" the context of {context_length} tokens: a context is full at {budget.full_at}, and the longest"
        f" prompt leaves {left} tokens"
    )
