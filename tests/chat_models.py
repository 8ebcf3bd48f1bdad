"""Model folders with a byte tokenizer, the control tokens of a family, and a template of its kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_fakes import byte_tokenizer
from tokenizers import AddedToken

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import ModelConfig

QWEN = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
GEMMA = [
    "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>",
    "<image|>", '<|"|>',
]  # fmt: skip
LLAMA = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<|python_tag|>",
]  # fmt: skip
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
]  # fmt: skip

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and KEEP %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Its thoughts stay where ``KEEP`` is true."""

KEEPS_ALL = CHATML.replace("KEEP", "true")
KEEPS_NONE = CHATML.replace("KEEP", "loop.last")
KEEPS_CYCLE = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages if m.role == 'user' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
    "{%- set seen = namespace(users=0) %}"
    + CHATML.replace(
        "{{ '<|im_start|>' + m.role",
        "{%- if m.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}"
        "{{ '<|im_start|>' + m.role",
    ).replace("KEEP", "seen.users == ns.last")
)

RESULTS_OF_F = (
    CHATML.replace("KEEP", "true")
    .replace(
        "{{- m.content or '' }}",
        "{%- if m.role == 'assistant' and m.tool_calls %}{% set ns.last = m.tool_calls[-1].function.name %}"
        "{% endif %}{%- if m.role == 'tool' %}"
        "{%- if not ns.last %}{{ raise_exception('no call') }}{% endif %}"
        "{{ 'functions.' + ns.last + ' ' }}{% endif %}{{ m.content or '' }}",
    )
    .replace("{%- for m in messages %}", "{%- set ns = namespace(last='') %}{%- for m in messages %}")
)
"""A gpt-oss template's way: every result is attributed to the last call."""

RESULTS_BEHIND_CALLS = (
    "{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}"
    "{%- if m.tool_calls %}{%- for r in messages[loop.index0 + 1:] if r.role == 'tool' and r.tool_call_id in"
    " (m.tool_calls | map(attribute='id') | list) %}{{ '<r>' + r.content }}{% endfor %}{% endif %}"
    "{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A Gemma 4 template's way: a result is found from the call before it, else it is left out."""

ONE_CALL = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ '<tool_call>\\n' + m.tool_calls[0].function | tojson + '\\n</tool_call>' }}"
    "{%- else %}{{ m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A Llama 3.1 template's way: parallel calls raise, and text beside a call is left out."""

TEXT_ARGUMENTS = CHATML.replace("KEEP", "true").replace(
    "'\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>'",
    '\'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments'
    " + '}\\n</tool_call>'",
)
"""A DeepSeek V3 template's way: arguments that are not text raise."""


def write_model(
    folder: Path,
    template: str | None,
    special: Sequence[str] = QWEN,
    tags: Sequence[str] = QWEN_TAGS,
    eos: str = "<|im_end|>",
    model_type: str = "",
) -> Path:
    """Write tokenizer, template and configuration into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": eos, **({"chat_template": template} if template is not None else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    return folder


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4": {"special": GEMMA, "tags": [], "eos": "<turn|>", "model_type": "gemma4"},
    "llama-3": {"special": LLAMA, "tags": [], "eos": "<|eot_id|>", "model_type": "llama"},
    "deepseek-v3": {"special": DEEPSEEK, "tags": [], "eos": DEEPSEEK[1], "model_type": "deepseek_v3"},
    "qwen3": {"model_type": "qwen3"},
}
"""What ``write_model`` is given for each family of chat formats."""


def opened(folder: Path, template: str | None, *, name: str = "auto", **files: Any) -> ChatFormat:
    """Write a model with ``template`` into ``folder / "model"``, and open its chat format."""
    flags = {key: files.pop(key) for key in ("thinking_retention", "chat_template_kwargs") if key in files}
    folder = write_model(folder / "model", template, **files)
    return open_chat_format(folder, ModelConfig(chat_format=name, **flags))


def of_family(folder: Path, name: str, **flags: Any) -> ChatFormat:
    """Open the renderer of a family."""
    return opened(folder, None, name=name, **FAMILIES[name], **flags)
