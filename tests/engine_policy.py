"""The tiny policy that engines serve in the contract tests, and what its logprobs must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.documents.sampling import SamplingParams
from agentrl.inference.engine import Generation

VOCAB = 512
EOS = 1


def save_model(folder: Path, seed: int) -> str:
    """A Qwen3 of random weights with a tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        initializer_range=0.15, bos_token_id=0, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one two three"], trainer)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return str(folder)


def prompt(seed: int, length: int = 40) -> list[int]:
    """Random ids."""
    return [int(item) for item in np.random.default_rng(seed).integers(2, VOCAB, length)]


def plain_logits(folder: str, ids: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """float32[len(output), vocab]: transformers' own logits at each generated token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*ids, *output]])).logits[0, len(ids) - 1 : -1]
    return logits


def plain_logprobs(
    folder: str, ids: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """float32[len(output), vocab]: the policy's log-probabilities at each generated token."""
    return torch.log_softmax(plain_logits(folder, ids, output) / temperature, dim=-1)


def assert_logprobs(
    folder: str, ids: Sequence[int], made: Generation, start: int = 0, end: int | None = None,
    temperature: float = 1.0,
) -> None:  # fmt: skip
    """The logprobs of tokens ``[start, end)`` are the policy's."""
    assert_close(plain_logprobs(folder, ids, made.output_ids, temperature)[start:end], made, start, end)


def assert_close(expected: torch.Tensor, made: Generation, start: int = 0, end: int | None = None) -> None:
    """The logprobs of tokens ``[start, end)`` are those of ``expected`` [end - start, vocab]."""
    tokens = torch.tensor(made.output_ids)[start:end]
    gap = expected.gather(-1, tokens[:, None])[:, 0] - torch.tensor(made.logprobs)[start:end]
    assert gap.abs().mean() < 1e-4
    assert gap.abs().max() < 1e-3


def sampled_logprobs(
    kind: str, folder: str, ids: Sequence[int], made: Generation, params: SamplingParams
) -> torch.Tensor:
    """float32[len(output), vocab]: log-probabilities of what engine ``kind`` drew each token from.

    At most one parameter truncates, and the repetition penalty is set alone: engines order them differently.
    """
    bias = torch.zeros(VOCAB)
    for token, value in params.extra.get("logit_bias", {}).items():
        bias[int(token)] = value
    rows = []
    for place, row in enumerate(plain_logits(folder, ids, made.output_ids)):
        counted = torch.tensor(_counted(kind, params, ids, made.output_ids, place), dtype=torch.long)
        counts = torch.bincount(counted, minlength=VOCAB)
        shifted = row + bias - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
        factor = torch.where(shifted < 0, params.repetition_penalty, 1 / params.repetition_penalty)
        shifted = torch.where(counts > 0, shifted * factor, shifted)
        rows.append(_truncated((shifted / params.temperature).softmax(-1), params).log())
    return torch.stack(rows)


def _counted(
    kind: str, params: SamplingParams, ids: Sequence[int], output: Sequence[int], place: int
) -> list[int]:
    """The tokens that penalties count before output ``place``.

    SGLang prepares a step while the one before still runs: it counts the last token of the prompt first, and
    lags one token behind from there. vLLM's repetition penalty counts the whole prompt too.
    """
    if kind == "sglang":
        return [ids[-1], *output][:place]
    if kind == "vllm" and params.repetition_penalty != 1.0:
        return [*ids, *output[:place]]
    return list(output[:place])


def _truncated(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ordered, order = probs.sort(descending=True)
    keep = torch.arange(VOCAB) < (params.top_k if params.top_k > 0 else VOCAB)
    keep &= ordered.cumsum(-1) - ordered <= params.top_p
    keep &= ordered >= params.min_p * ordered[0]
    kept = torch.zeros_like(probs)
    kept[order[keep]] = ordered[keep]
    return kept / kept.sum()
