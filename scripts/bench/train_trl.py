"""One GRPO step of Hugging Face TRL on the ids that ours trains: padded rows, TRL's own loss and backward."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentrl.documents.packing import unpack_ids
from agentrl.documents.training import DBRecordData


def trl_step(model: Any, data: Sequence[DBRecordData], rows: int) -> Callable[[], float]:
    """A function that computes TRL's loss over ``data``, ``rows`` trajectories at a time, steps, and returns
    the gradient's norm.

    float32, no recomputation, no reference model, a mean over the step's tokens: the settings that ours has.
    """
    trainer = _trainer(model, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> float:
        batches = [data[start : start + rows] for start in range(0, len(data), rows)]
        trainer.current_gradient_accumulation_steps = len(batches)
        trainer.args.steps_per_generation = len(batches)
        for batch in batches:
            loss = trainer.compute_loss(model, _padded(batch, data))
            trainer.accelerator.backward(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return step


def _trainer(model: Any, rows: int) -> Any:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="agentrl-bench-trl-"), report_to=[], beta=0.0, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=rows, num_generations=rows,
        loss_type="dapo", use_cpu=not torch.cuda.is_available(), use_liger_kernel=False,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=arguments, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset(
            InMemoryTable(pyarrow.table({"prompt": ["x"] * rows})), fingerprint="agentrl-bench"
        ),
    )  # fmt: skip


def _padded(batch: Sequence[DBRecordData], data: Sequence[DBRecordData]) -> dict[str, torch.Tensor]:
    """Prompts to the left and completions to the right, padded to the longest of the step, as TRL does."""
    prompts = [item.spans[0].start for item in batch]
    longest_prompt = max(item.spans[0].start for item in data)
    longest = max(item.tokens - item.spans[0].start for item in data)
    inputs = {
        name: torch.zeros(len(batch), width, dtype=torch.int64)
        for name, width in (
            ("prompt_ids", longest_prompt), ("prompt_mask", longest_prompt),
            ("completion_ids", longest), ("completion_mask", longest), ("tool_mask", longest),
        )
    }  # fmt: skip
    for index, (item, prompt) in enumerate(zip(batch, prompts, strict=True)):
        ids = torch.from_numpy(unpack_ids(item.input_ids).copy()).long()
        inputs["prompt_ids"][index, longest_prompt - prompt :] = ids[:prompt]
        inputs["prompt_mask"][index, longest_prompt - prompt :] = 1
        inputs["completion_ids"][index, : item.tokens - prompt] = ids[prompt:]
        inputs["completion_mask"][index, : item.tokens - prompt] = 1
        for span in item.spans:
            inputs["tool_mask"][index, span.start - prompt : span.end - prompt] = 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs["num_items_in_batch"] = torch.tensor(sum(item.trainable_tokens for item in data))
    inputs["advantages"] = torch.tensor([item.advantage for item in batch])
    return {name: tensor.to(device) for name, tensor in inputs.items()}
