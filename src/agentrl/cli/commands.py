"""Name the commands of ``agentrl``: their modules, and what they are for."""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, str]] = {
    "mongo": ("agentrl.cli.mongo", "the embedded MongoDB: up, status, down"),
    "tasks": ("agentrl.cli.tasks", "load a JSONL file of tasks; list what is loaded"),
    "tools": ("agentrl.cli.tools", "a manager of tool servers: a node for each trajectory"),
    "db": ("agentrl.cli.db", "the database of a run: check, copy, prune, rescore, reopen"),
    "runs": ("agentrl.cli.runs", "the runs of a server: list, tag, note, rename, delete"),
    "serve": ("agentrl.cli.serve", "run one inference engine that follows the published weights"),
    "sample": ("agentrl.cli.sample", "a sampler: claims, runs and scores trajectories"),
    "gateway": ("agentrl.cli.gateway", "model APIs in front of rollouts, for any agent"),
    "score": ("agentrl.cli.score", "scores sampled trajectories that wait for a score"),
    "train": ("agentrl.cli.train", "the trainer"),
    "launch": ("agentrl.cli.launch", "the processes of a run on this machine, each on GPUs of its own"),
    "plan": ("agentrl.cli.plan", "plan memory, layout and services for a model and GPUs"),
    "try": ("agentrl.cli.try_task", "run one task's trajectory, print it, keep nothing"),
    "eval": ("agentrl.cli.evaluate", "evaluate a policy on a task file; compare and list evaluations"),
    "sft": ("agentrl.cli.sft", "supervised fine-tuning on conversations"),
    "dashboard": ("agentrl.cli.dashboard", "web pages about the runs of a server; reads only"),
    "status": ("agentrl.cli.status", "what runs now: the runs of a server, or one run, live"),
    "audit": ("agentrl.cli.audit", "look at a run: its state, a trajectory, its curve"),
    "parity": ("agentrl.cli.parity", "compare the trainer's logprobs with an engine's"),
    "doctor": ("agentrl.cli.doctor.command", "check this machine, and say how to fix each fault"),
    "completion": ("agentrl.cli.completion", "print the completion of bash, zsh or fish"),
    "quickstart": ("agentrl.cli.quickstart", "the whole loop on this machine"),
}
"""Command → (module with ``main``, what it is for)."""
