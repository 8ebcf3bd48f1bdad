"""Make the model of ``agentrl quickstart --tiny``: two Qwen3 layers, warmed up by two phases of SFT.

python -m agentrl.base.installation demo/tiny.py FOLDER SEED       # the model with random weights alone
python -m agentrl.base.installation demo/tiny.py --warmed SEED     # the warmed-up one, in .agentrl/models
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.processes import run_child, tail
from agentrl.cli.main import run
from agentrl.errors import ModelError
from demo.sft_examples import tiny_sft_conversations
from demo.smollm import CHAT_TEMPLATE, install_template
from demo.tasks import QUESTION, call_text, tiny_expressions

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
MARKS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>")
VOCABULARY = 400
CONTEXT_TOKENS = 1024
MODEL_BYTES = 8_000_000

MODELS = Path(".agentrl/models")
LOG = Path("logs/quickstart-tiny-sft.out")
BUILD_SECONDS = 300.0
PHASE_SECONDS = 900.0


@dataclass(frozen=True)
class Phase:
    """One phase of the warm-up: one run of ``agentrl sft``."""

    name: str
    mixed: bool
    steps: int
    learning_rate: float


PHASES = (
    Phase("correct conversations", mixed=False, steps=320, learning_rate=3e-3),
    Phase("mixed conversations", mixed=True, steps=60, learning_rate=5e-4),
)
"""First correct conversations, then some with mistakes that reinforcement learning can correct."""

BATCH_SIZE = 16


def prepare_tiny_model(seed: int, report: Callable[[str], None]) -> Path:
    """Return the folder of the warmed-up model; make it first if it is missing. Raises ModelError."""
    folder = MODELS / f"tiny-seed{seed}"
    if not (folder / "config.json").is_file():
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS, prefix=".tmp-tiny-") as scratch:
            _make(seed, folder, Path(scratch), report)
    install_template(CHAT_TEMPLATE, folder)
    return folder


def _make(seed: int, folder: Path, scratch: Path, report: Callable[[str], None]) -> None:
    report(f"making a two-layer model with seed {seed} in {folder}, once")
    model = scratch / "random"
    _run(["-m", "agentrl.base.installation", "demo/tiny.py", str(model), str(seed)], BUILD_SECONDS)
    for number, phase in enumerate(PHASES):
        report(f"supervised warm-up: {phase.steps} steps on {phase.name}")
        file = scratch / f"phase{number}.jsonl"
        write_conversations(file, seed, phase)
        output = folder if phase is PHASES[-1] else scratch / f"phase{number}"
        _run([*_sft_command(phase, seed), *_paths(model, file, output)], PHASE_SECONDS)
        model = output


def write_conversations(file: Path, seed: int, phase: Phase) -> None:
    """Write as many conversations as the phase trains, one per line, so that none is seen twice."""
    conversations = tiny_sft_conversations(seed, phase.steps * BATCH_SIZE, mixed=phase.mixed)
    file.write_text("".join(f"{json.dumps(item)}\n" for item in conversations), encoding="utf-8")


def _sft_command(phase: Phase, seed: int) -> list[str]:
    return [
        "-m", "agentrl", "sft", "--run_name", "quickstart-tiny-sft", "--seed", str(seed),
        "--max_steps", str(phase.steps), "--batch_size", str(BATCH_SIZE), "--max_tokens", "2048",
        "--learning_rate", str(phase.learning_rate), "--lr_scheduler_type", "linear", "--warmup_steps", "5",
    ]  # fmt: skip


def _paths(model: Path, file: Path, output: Path) -> list[str]:
    return ["--model_name_or_path", str(model), "--train_file", str(file), "--output_dir", str(output)]


def _run(arguments: list[str], seconds: float) -> None:
    """Run Python in a child process, so that this one does not load torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        code = run_child([sys.executable, *arguments], log=LOG, env=environment, seconds=seconds)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"the warm-up did not end within {seconds:g} s", hint=f"see {LOG}") from error
    if code != 0:
        raise ModelError(
            f"the warm-up ended with exit code {code}:\n{tail(LOG)}", hint=f"the whole log is {LOG}"
        )


def build_tiny_model(
    folder: Path,
    seed: int,
    template: Path = CHAT_TEMPLATE,
    *,
    corpus: Iterable[str] | None = None,
    whole_numbers: bool = False,
    context_tokens: int = CONTEXT_TOKENS,
) -> Path:
    """Write a model with random weights and a small tokenizer; the same seed gives the same bytes.

    The tokenizer is trained on ``corpus``, by default the quickstart's questions. Each digit is a token of
    its own; with ``whole_numbers`` the numbers of the corpus may be tokens.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from agentrl.weights.folder import atomic_model_folder

    tokenizer = _tokenizer(_corpus() if corpus is None else corpus, whole_numbers=whole_numbers)
    tokenizer.model_max_length = context_tokens
    start, end, pad = tokenizer.convert_tokens_to_ids([START, END, PAD])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context_tokens,
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


def _tokenizer(corpus: Iterable[str], *, whole_numbers: bool) -> Any:
    """Return a byte-level BPE tokenizer trained on ``corpus``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=not whole_numbers),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    core.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=core, bos_token=START, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS
    )


def _corpus() -> Iterator[str]:
    words = "system user assistant tool Tools string Evaluates arithmetic"
    for expression, _ in zip(tiny_expressions(0), range(500), strict=False):
        yield f"{words}\n{QUESTION.format(expression)} {call_text(expression)}"


def main(folder: str, seed: int) -> int:
    """Make the model with random weights in ``folder``, or with ``--warmed`` the one that is warmed up."""
    if folder == "--warmed":
        prepare_tiny_model(seed, lambda text: print(f"quickstart: {text}", flush=True))
    else:
        build_tiny_model(Path(folder), seed)
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1], int(sys.argv[2])), "agentrl quickstart"))
