"""A Hugging Face folder of a random two-layer Qwen3 with a byte tokenizer and a ChatML template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.renderer import ChatTemplate, ControlTokens, TemplateRenderer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\\n' }}{{ message['content'] }}"
    "<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_format(template: str = TEMPLATE) -> ChatFormat:
    """``tiny_tokenizer`` as the chat format of rollouts and fine-tuning."""
    tokenizer = tiny_tokenizer()
    tokens = ControlTokens(tokenizer.backend_tokenizer, template)
    stop_ids = {tokenizer.eos_token_id}
    return ChatFormat(TemplateRenderer(ChatTemplate(template, {}), tokens, stop_ids, "hermes"))


def write_tiny_policy(
    folder: Path, *, hidden_size: int = 32, template: str | None = TEMPLATE, seed: int = 0
) -> Path:
    """Save model and tokenizer into ``folder``; the same weights for each ``seed``."""
    tokenizer = tiny_tokenizer(template)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4,
        max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
