"""Train the quickstart's task with TRL's GRPOTrainer; started by time_to_reward.py in a venv with TRL.

    python scripts/bench/time_to_reward_trl.py --model DIR --out FILE --setting lora [--steps 20] [--seed 0]

Writes one JSON line per optimizer step: ``step``, ``reward``, ``at`` (Unix time) and ``cpu_seconds``. It
needs only TRL, and of AgentRL the task files, the calculator and the measurement of this CPU's products
(PYTHONPATH=src).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGAN = time.time()

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TASKS = Path("assets/tasks/calculator_train.jsonl")
GROUP, CALL_TOKENS, COMPLETION_TOKENS = 8, 40, 96


@dataclass(frozen=True)
class Setting:
    """One configuration of TRL to compare with."""

    learning_rate: float
    lora_rank: int = 0
    prompts: int = 4
    dtype: str = "float32"
    autocast: bool = True
    """Multiply in bfloat16, as AgentRL does: where this CPU computes that faster than float32."""
    micro_batch: int = 8
    scale_rewards: str = "group"


SETTINGS = {
    "lora-fast": Setting(1e-3, lora_rank=16),
    "lora-small": Setting(1e-3, lora_rank=16, prompts=2),
    "lora-one-batch": Setting(1e-3, lora_rank=16, micro_batch=32),
    "lora-bf16": Setting(1e-3, lora_rank=16, dtype="bfloat16", autocast=False),
    "lora": Setting(2e-4, lora_rank=16),
    "full": Setting(1e-5),
}


def calculate(expression: str) -> str:
    """
    Evaluates arithmetic.

    Args:
        expression: The expression.
    """
    import demo_path  # noqa: F401
    from demo.arithmetic import evaluate

    return evaluate(expression)


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """Return 1.0 for each completion whose last message answers exactly, else 0.0."""
    return [float(_answered(messages) == right) for messages, right in zip(completions, answer, strict=True)]


def _answered(messages: list[dict[str, Any]]) -> str | None:
    found = ANSWER.findall(str(messages[-1].get("content") or "")) if messages else []
    return found[-1].strip() if found else None


def load_tasks(seed: int) -> list[dict[str, Any]]:
    """Return the quickstart's tasks as rows of a data set, shuffled."""
    rows = []
    for line in TASKS.read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        prompt = [*task["messages"], {"role": "user", "content": task["query"]}]
        rows.append({"prompt": prompt, "answer": task["answer"]})
    random.Random(seed).shuffle(rows)
    return rows


def train(
    model: Path, out: Path, setting: Setting, *, steps: int, seed: int, seconds: float, stop_at: float
) -> None:
    """Train for ``steps``, ``seconds``, or to the reward ``stop_at``; write a line per step to ``out``."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_schema, qwen3_template

    from agentrl.model.flops import bfloat16_speed

    class Writer(TrainerCallback):
        """Writes each step's reward, and stops at the time limit."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: object) -> None:
            if "reward" not in (logs or {}):
                return
            line = {
                "step": state.global_step,
                "reward": logs["reward"],
                "at": time.time(),
                "cpu_seconds": sum(os.times()[:2]),
            }
            with out.open("a", encoding="utf-8") as sink:
                sink.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            control.should_training_stop |= time.time() - BEGAN > seconds or logs["reward"] >= stop_at

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_schema, tokenizer.response_template = qwen3_schema, qwen3_template
    adapter = LoraConfig(
        r=setting.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    rows = setting.prompts * GROUP
    hidden_size = AutoConfig.from_pretrained(model).hidden_size
    is_fast, reason = bfloat16_speed(torch.device("cpu"), hidden_size)
    print(f"bfloat16 autocast {setting.autocast and is_fast}: {reason}", flush=True)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(load_tasks(seed)),
        processing_class=tokenizer,
        tools=[calculate],
        peft_config=adapter if setting.lora_rank else None,
        callbacks=[Writer()],
        args=GRPOConfig(
            output_dir=str(out.parent / "trl"),
            model_init_kwargs={"dtype": setting.dtype},
            use_cpu=True,
            bf16=setting.autocast and is_fast,
            seed=seed,
            max_steps=steps,
            learning_rate=setting.learning_rate,
            lr_scheduler_type="constant",
            num_generations=GROUP,
            per_device_train_batch_size=setting.micro_batch,
            gradient_accumulation_steps=rows // setting.micro_batch,
            gradient_checkpointing=False,
            max_completion_length=COMPLETION_TOKENS,
            generation_kwargs={"max_new_tokens": CALL_TOKENS},
            max_tool_calling_iterations=1,
            temperature=1.0,
            scale_rewards=setting.scale_rewards,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    print(f"torch threads {torch.get_num_threads()}, ready after {time.time() - BEGAN:.1f} s", flush=True)
    trainer.train()


def main() -> int:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--setting", choices=tuple(SETTINGS), required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--stop_at", type=float, default=2.0, help="end after a step with this reward")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    setting = SETTINGS[given.setting]
    train(
        given.model, given.out, setting,
        steps=given.steps, seed=given.seed, seconds=given.seconds, stop_at=given.stop_at,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
