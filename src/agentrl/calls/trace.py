"""Open the spans of a trajectory, with the names and attributes of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from agentrl.base.spans import NO_SPAN, Attributes, Span, tracer
from agentrl.chat.chat_format import Message
from agentrl.chat.parsers.parser import ToolCall
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import StopReason
from agentrl.documents.task import Claim
from agentrl.inference.engine import Generation

PROVIDER = "agentrl"


def trajectory_span(claim: Claim, agent: str) -> Span:
    """Return the root span of one attempt at a trajectory."""
    if not tracer().is_recording:
        return NO_SPAN
    task = claim.task
    attributes: Attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": agent,
        "gen_ai.request.model": tracer().policy,
        "gen_ai.conversation.id": claim.record_id,
        "agentrl.record": claim.record_id,
        "agentrl.task": task.id,
        "agentrl.split": task.split,
        "agentrl.epoch": task.epoch,
        "agentrl.traj_id": claim.traj_id,
        "agentrl.attempt": claim.attempt,
        "agentrl.environment": task.environment,
        "agentrl.scorer": task.scorer,
    }
    span = tracer().span(f"invoke_agent {agent}", attributes, root=True)
    span.messages("gen_ai.input.messages", [{"role": "user", "content": task.query}])
    return span


def end_trajectory(
    span: Span, reason: StopReason, final_answer: str | None, turns: int, tool_calls: int
) -> None:
    """Set how the agent ended."""
    if not span.is_recording:
        return
    span.set({
        "agentrl.stop_reason": str(reason),
        "agentrl.turns": turns,
        "agentrl.tool_calls": tool_calls,
    })  # fmt: skip
    answer = {"role": "assistant", "content": final_answer}
    span.messages("gen_ai.output.messages", [answer])


def model_call_span(record_id: str, params: SamplingParams, *, trace: str | None = None) -> Span:
    """Return the span of one model call of the policy; ``trace`` names the trajectory's trace.

    Without ``trace`` it is a child of the current span.
    """
    if not tracer().is_recording:
        return NO_SPAN
    model = tracer().policy
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": record_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.extra.get("sampling_seed"),
    }
    return tracer().span(f"chat {model}", attributes, kind="client", trace=trace)


def gateway_call_span(claim: Claim, params: SamplingParams, dialect: str) -> Span:
    """Return the span of a call through a gateway; its trajectory's trace may be of another process."""
    if claim.trace_id is None:
        return NO_SPAN
    span = model_call_span(claim.record_id, params, trace=claim.trace_id)
    span.set({"agentrl.gateway.dialect": dialect})
    return span


def end_model_call(
    span: Span,
    generation: Generation,
    messages: Sequence[Message],
    response: Message,
    call: str | None = None,
) -> None:
    """Set what a model call generated; ``messages`` are its new ones, ``call`` is the id of its document."""
    if not span.is_recording:
        return
    versions = sorted({each.version for each in generation.versions})
    engine = urlsplit(generation.engine_url)
    calls_tools = generation.finish_reason == "stop" and response.get("tool_calls")
    span.set({
        "gen_ai.response.id": call,
        "gen_ai.response.model": f"{tracer().policy}@{versions[-1]}" if versions else None,
        "gen_ai.response.finish_reasons": ["tool_calls" if calls_tools else generation.finish_reason],
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": len(generation.output_ids),
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "server.address": engine.hostname,
        "server.port": engine.port,
        "agentrl.policy_version": versions[-1] if versions else None,
        "agentrl.policy_versions": versions,
        "agentrl.generate_seconds": generation.seconds,
    })  # fmt: skip
    span.messages("gen_ai.input.messages", messages)
    span.messages("gen_ai.output.messages", [response])


def tool_span(call: ToolCall) -> Span:
    """Return the span of one tool call."""
    if not tracer().is_recording:
        return NO_SPAN
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.name,
        "gen_ai.tool.type": "function",
    }
    span = tracer().span(f"execute_tool {call.name}", attributes)
    span.content("gen_ai.tool.call.arguments", lambda: call.arguments)
    return span


def end_tool(span: Span, execution: ToolExecution) -> None:
    """Set the result of a tool call."""
    if not span.is_recording:
        return
    span.set({
        "agentrl.tool.server": execution.server,
        "agentrl.tool.reward": execution.reward,
        "agentrl.tool.result_chars": len(execution.result),
    })  # fmt: skip
    span.content("gen_ai.tool.call.result", lambda: execution.result)
    if execution.error:
        span.fail("tool_error")
