"""A two-layer Qwen3-shaped model from scratch: its tokenizer, and the conversations that warm it up."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.quickstart.servers.arithmetic import evaluate
from agentrl.quickstart.smollm import CHAT_TEMPLATE, install_template
from agentrl.quickstart.tasks import CALCULATOR_TOOLS, QUESTION, call_text, tiny_expressions

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
MARKS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>")
VOCABULARY = 400
CONTEXT_TOKENS = 1024
MODEL_BYTES = 8_000_000

MIXTURE = {"right": 0.3, "guess": 0.65, "wrong call": 0.05}
"""Shares of the kinds of conversation in the mixed phase."""

Conversation = dict[str, Any]
"""One line of an SFT file: ``{"messages": [...], "tools": [...]}``."""


def build_tiny_model(folder: Path, seed: int, template: Path = CHAT_TEMPLATE) -> Path:
    """Write a model with random weights and a tokenizer trained here as ``folder``; same seed, same bytes."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from agentrl.weights.model_folder import atomic_model_folder

    tokenizer = _tokenizer()
    start, end, pad = tokenizer.convert_tokens_to_ids([START, END, PAD])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    )
    with atomic_model_folder(folder, MODEL_BYTES) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        install_template(template, temporary)
    return folder


def tiny_sft_conversations(seed: int, count: int, *, mixed: bool) -> Iterator[Conversation]:
    """``count`` conversations about arithmetic: a question, a call, its result and an answer.

    Without ``mixed`` all are right: they teach the form and the copying. With ``mixed`` most guess instead of
    calling, and a few call with a wrong expression, so that the model behaves rightly only sometimes and
    reinforcement learning has something to find.
    """
    rng = random.Random(f"{seed}/{mixed}")
    for expression, _ in zip(tiny_expressions(rng.getrandbits(32)), range(count), strict=False):
        kind = rng.choices(tuple(MIXTURE), weights=tuple(MIXTURE.values()))[0] if mixed else "right"
        yield {"messages": _messages(rng, expression, kind), "tools": CALCULATOR_TOOLS}


def _messages(rng: random.Random, expression: str, kind: str) -> list[dict[str, Any]]:
    question = {"role": "user", "content": QUESTION.format(expression)}
    if kind == "guess":
        return [question, _answer(_wrong(rng, evaluate(expression)))]
    written = _wrong_call(rng, expression) if kind == "wrong call" else expression
    result = evaluate(written)
    call = {"name": "calculate", "arguments": {"expression": written}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        _answer(result),
    ]


def _answer(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def _wrong(rng: random.Random, value: str) -> str:
    """Another number of about the same size."""
    return str(int(value) + rng.choice([-10, -2, -1, 1, 2, 10]))


def _wrong_call(rng: random.Random, expression: str) -> str:
    """The expression with another number."""
    left, operator, right = expression.split()
    return f"{left} {operator} {_wrong(rng, right)}"


def _tokenizer() -> Any:
    """A byte-level BPE trained on the conversations themselves; a digit is always a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=core, bos_token=START, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS
    )


def _corpus() -> Iterator[str]:
    words = "system user assistant tool Tools string Evaluates arithmetic"
    for expression, _ in zip(tiny_expressions(0), range(500), strict=False):
        yield f"{words}\n{QUESTION.format(expression)} {call_text(expression)}"


if __name__ == "__main__":
    build_tiny_model(Path(sys.argv[1]), int(sys.argv[2]))
