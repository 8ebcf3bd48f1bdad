"""The commands of ``agentrl``: their modules, what they are for, and two examples of each for ``--help``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, cast

from agentrl.errors import ConfigError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "mongo": ("agentrl.local.local_cli:mongo", "the embedded MongoDB: up, status, down"),
    "tasks": ("agentrl.cli.tasks", "check tasks of any source, load them into a run, list what is loaded"),
    "tools": ("agentrl.worlds.worlds_cli", "a manager of tool servers: a node for each trajectory"),
    "db": ("agentrl.lab.db_cli", "the database of a run: check, copy, prune, rescore, reopen"),
    "runs": ("agentrl.screens.screens_cli:runs", "the runs of a server: list, tag, note, rename, delete"),
    "fork": ("agentrl.lab.lab_cli:fork", "a new run that begins at a stored checkpoint of another"),
    "retract": ("agentrl.lab.lab_cli:retract", "withdraw trajectories and tasks from a run, everywhere"),
    "serve": ("agentrl.cli.services:serve", "run one inference engine that follows the published weights"),
    "sample": ("agentrl.cli.services:sample", "a sampler: claims, runs and scores trajectories"),
    "samplers": ("agentrl.cli.samplers", "the samplers of a run: list them, drain some"),
    "gateway": ("agentrl.cli.services:gateway", "model APIs in front of rollouts, for any agent"),
    "score": ("agentrl.cli.services:score", "scores sampled trajectories that wait for a score"),
    "teach": ("agentrl.cli.services:teach", "a teacher: fills in its logprobs of sampled trajectories"),
    "train": ("agentrl.cli.services:train", "the trainer"),
    "launch": (
        "agentrl.local.local_cli:launch",
        "the processes of a run on this machine, each on GPUs of its own",
    ),
    "recipes": ("agentrl.cli.recipes", "list the recipes of --recipe: their flags, sources, golden values"),
    "plan": ("agentrl.local.local_cli:plan", "plan memory, layout and services for a model and GPUs"),
    "whatif": ("agentrl.lab.lab_cli:whatif", "train stored steps again with another loss, and compare"),
    "sweep": ("agentrl.lab.lab_cli:sweep", "what-ifs with many settings and seeds, judged on held-out tasks"),
    "try": ("agentrl.local.local_cli:try_one", "run one task's trajectory, print it, keep nothing"),
    "eval": (
        "agentrl.cli.services:evaluate",
        "evaluate a policy on a task file; compare and list evaluations",
    ),
    "blame": ("agentrl.lab.lab_cli:blame", "which trajectories moved held-out tasks between evaluations"),
    "sft": ("agentrl.cli.services:sft", "supervised fine-tuning on conversations"),
    "dashboard": (
        "agentrl.screens.screens_cli:dashboard",
        "web pages about the runs of a server, with forms that label and manage them",
    ),
    "status": ("agentrl.screens.screens_cli:status", "what runs now: the runs of a server, or one run, live"),
    "audit": ("agentrl.screens.screens_cli:audit", "look at a run: its state, a trajectory, its curve"),
    "parity": ("agentrl.local.parity", "compare the trainer's logprobs with an engine's"),
    "doctor": ("agentrl.local.doctor", "check this machine, and say how to fix each fault"),
    "completion": ("agentrl.cli.completion", "print the completion of bash, zsh or fish"),
    "quickstart": ("agentrl.local.local_cli:quickstart", "the whole loop on this machine"),
}
"""Command → (module, and its function if that is not ``main``; what it is for)."""

EXAMPLES: Final[dict[str, tuple[str, str]]] = {
    "agentrl mongo": ("agentrl mongo up", "agentrl mongo status --mongo_dir /data/mongo"),
    "agentrl tasks": (
        "agentrl tasks check train.parquet --eval_file test.parquet",
        "agentrl tasks load tasks.jsonl --run_name math",
    ),
    "agentrl tools": (
        "agentrl tools manager --mcp_servers_file servers.yml",
        "agentrl tools manager --mcp_servers_file servers.yml --host 0.0.0.0 --port 8000 --max_nodes 64",
    ),
    "agentrl db": ("agentrl db check --run_name math", "agentrl db reopen --run_name math --dry_run"),
    "agentrl db check": (
        "agentrl db check --run_name math --output_dir output/math",
        "agentrl db check --run_name math --final --json",
    ),
    "agentrl db export": (
        "agentrl db export exports/math --run_name math",
        "agentrl db export exports/math --run_name math --db_connection_string mongodb://db:27017",
    ),
    "agentrl db import": (
        "agentrl db import exports/math --run_name math",
        "agentrl db import exports/math --run_name math_copy",
    ),
    "agentrl db prune": (
        "agentrl db prune --run_name math --before_step 100 --dry_run",
        "agentrl db prune --run_name math --older_than_days 30 --output_dir output/math",
    ),
    "agentrl db rescore": (
        "agentrl db rescore --run_name math --scorer math --dry_run",
        "agentrl db rescore --run_name math --from_labels --status ready",
    ),
    "agentrl db reopen": (
        "agentrl db reopen --run_name math --failure_kind tool --dry_run",
        "agentrl db reopen --run_name math --split train",
    ),
    "agentrl retract": (
        "agentrl retract math --scorer broken_v1 --because 'wrong units' --dry_run",
        "agentrl retract math --task task_001 --rebuild",
    ),
    "agentrl db users": ("agentrl db users --run_name math", "agentrl db users --run_name math --create"),
    "agentrl db accept": (
        "agentrl db accept groups --run_name math",
        "agentrl db accept sampling loss --run_name math",
    ),
    "agentrl serve": (
        "agentrl serve --run_name math --model_name_or_path models/Qwen3-0.6B",
        "agentrl serve --config run.yaml --engine sglang --inf_tp_size 2",
    ),
    "agentrl sample": (
        "agentrl sample --run_name math --train_file tasks.jsonl --model_name_or_path models/Qwen3-0.6B",
        "agentrl sample --config run.yaml --target_concurrency 4",
    ),
    "agentrl samplers": (
        "agentrl samplers --run_name math",
        "agentrl samplers drain node7-4242 --run_name math --wait_seconds 60",
    ),
    "agentrl samplers drain": (
        "agentrl samplers drain node7-4242 --run_name math",
        "agentrl samplers drain 'node7-*' --run_name math --wait_seconds 60",
    ),
    "agentrl gateway": (
        "agentrl gateway --run_name math --model_name_or_path models/Qwen3-0.6B",
        "agentrl gateway --config run.yaml --gateway_port 8790",
    ),
    "agentrl score": (
        "agentrl score --run_name math --agent_config_path assets/agent_config.yml",
        "agentrl score --config run.yaml --max_concurrent_scorings 64",
    ),
    "agentrl teach": (
        "agentrl teach --run_name math --model_name_or_path models/Qwen3-0.6B --teacher models/Qwen3-8B",
        "agentrl teach --self --run_name math --model_name_or_path models/Qwen3-0.6B",
    ),
    "agentrl train": (
        "agentrl train --run_name math --model_name_or_path models/Qwen3-0.6B --learning_rate 1e-6",
        "accelerate launch --config_file assets/fsdp2_dst.yml -m agentrl.train --config run.yaml --tp_size 2",
    ),
    "agentrl launch": (
        "agentrl launch train --config run.yaml --train_gpus 0-3 --engine_gpus 4-7",
        "agentrl launch eval --config run.yaml --eval_file test.jsonl --inf_tp_size 2",
    ),
    "agentrl recipes": ("agentrl recipes", "agentrl recipes dapo"),
    "agentrl plan": (
        "agentrl plan --model models/Qwen3-8B --gpus 8xH100 --context 32768",
        "agentrl plan --model models/Qwen3-8B --gpus 2x4090 --context 8192 --lora_rank 16 --json",
    ),
    "agentrl whatif": (
        "agentrl whatif math --steps 40-60 --loss_calculater GSPO",
        "agentrl whatif math math_without --without ids.txt",
    ),
    "agentrl sweep": ("agentrl sweep losses.yml --parallel 2", "agentrl sweep losses.yml --state"),
    "agentrl try": (
        "agentrl try --config run.yaml --train_file tasks.jsonl",
        "agentrl try --config run.yaml --train_file tasks.jsonl --max_turns 4",
    ),
    "agentrl eval": (
        "agentrl eval --config run.yaml --eval_file test.jsonl --eval_version 120 --eval_samples 4",
        "agentrl eval --config run.yaml --eval_file test.jsonl --eval_steps 20",
    ),
    "agentrl eval compare": (
        "agentrl eval compare 100 120 --run_name demo",
        "agentrl eval compare 120 other/eval-m3fa9c1d2 --run_name demo",
    ),
    "agentrl blame": (
        "agentrl blame math 100 120 --out blamed.txt",
        "agentrl blame math 100 120 --changes all --top 50 --label blamed --csv effects.csv",
    ),
    "agentrl sft": (
        "agentrl sft --model_name_or_path models/Qwen3-0.6B --train_file conversations.jsonl"
        " --output_dir output/sft",
        "agentrl sft --config run.yaml --sft_from_records math --sft_min_score 1 --output_dir output/sft",
    ),
    "agentrl dashboard": (
        "agentrl dashboard",
        "agentrl dashboard --host 0.0.0.0 --token_file dashboard.token",
    ),
    "agentrl status": ("agentrl status", "agentrl status math --once"),
    "agentrl runs": ("agentrl runs", "agentrl runs rm math_1 math_2 --folders"),
    "agentrl runs rm": ("agentrl runs rm math_1", "agentrl runs rm math_1 math_2 --folders --yes"),
    "agentrl runs rename": (
        "agentrl runs rename math_1 math_baseline",
        "agentrl runs rename math_1 math_baseline --db_connection_string mongodb://db:27017",
    ),
    "agentrl runs tag": ("agentrl runs tag math +baseline", "agentrl runs tag math +best -candidate"),
    "agentrl runs note": ('agentrl runs note math "twice the learning rate"', 'agentrl runs note math ""'),
    "agentrl fork": (
        "agentrl fork math math_gspo --from_step 40",
        "agentrl fork math math_2 --db_connection_string mongodb://db:27017",
    ),
    "agentrl audit": ("agentrl audit run --run_name math", "agentrl audit record 4f1c --run_name math"),
    "agentrl audit run": ("agentrl audit run --run_name math", "agentrl audit run --config run.yaml"),
    "agentrl audit record": (
        "agentrl audit record 4f1c --run_name math",
        "agentrl audit record --run_name math",
    ),
    "agentrl audit records": (
        "agentrl audit records --run_name math --step 5",
        "agentrl audit records --config run.yaml --failure tool --limit 50",
    ),
    "agentrl audit curve": (
        "agentrl audit curve --run_name math",
        "agentrl audit curve reward entropy kl_k3 --run_name math --out curve.svg",
    ),
    "agentrl doctor": ("agentrl doctor", "agentrl doctor --config run.yaml --engine sglang"),
    "agentrl parity": (
        "agentrl parity --model_name_or_path models/Qwen3-0.6B --engine local",
        "agentrl parity --model_name_or_path models/Qwen3-0.6B --engine sglang,vllm --prompts 32",
    ),
    "agentrl completion": (
        'eval "$(agentrl completion bash)"',
        "agentrl completion fish > ~/.config/fish/completions/agentrl.fish",
    ),
    "agentrl quickstart": ("agentrl quickstart", "agentrl quickstart --tiny"),
}
"""Command → its examples."""


def examples_text(command: str) -> str:
    """Return the lines that show the examples of ``command``; words behind the command are ignored."""
    words = command.split()
    for length in (3, 2):
        found = EXAMPLES.get(" ".join(words[:length]))
        if found is not None:
            return "\n".join(["examples:", *(f"  {example}" for example in found)])
    return ""


def function_of(command: str) -> Callable[[list[str]], int]:
    """Import the function that runs ``agentrl COMMAND``, which takes the words behind the command.

    Raises ConfigError if the wing with the command is not installed.
    """
    module, _, name = COMMANDS[command][0].partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != (wing := ".".join(module.split(".")[:2])):
            raise
        raise ConfigError(
            f"agentrl {command} is a command of {wing}, which is not installed",
            hint="install the whole of AgentRL; the core alone has the commands of a run",
        ) from error
    return cast("Callable[[list[str]], int]", getattr(found, name or "main"))
