"""Flags of evaluations: which policy is evaluated, on which engine, and what tokens cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.fields import Flags, flag, require


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Flags):
    """The policy that `agentrl eval` evaluates, and its engine."""

    section = "evaluation"

    eval_version: int | None = flag(
        None,
        "policy version to evaluate (default: the newest that an engine serves, else the newest published)",
        within="[0, inf)",
        per_process=True,
    )
    eval_model: str | None = flag(
        None, "model folder or checkpoint to evaluate instead of a policy version", per_process=True
    )
    eval_label: str = flag(
        "", "label of a repetition: samples the same file and policy again", per_process=True
    )
    eval_samples: int | None = flag(
        None,
        "trajectories per task of an evaluation (default: --num_generations if it is given, else 1)",
        within="[1, inf)",
        unit="trajectories",
        per_process=True,
    )
    eval_steps: int | None = flag(
        None,
        "follow the run: evaluate each published version whose step is a multiple of this",
        within="[1, inf)",
        unit="optimizer steps",
        per_process=True,
    )
    eval_engine: Literal["auto", "own", "shared"] = flag(
        "auto",
        "engine of an evaluation: shared (live engines of the run that serve the version), own (started for"
        " the evaluation by the flags of `agentrl serve`), or auto (shared if there is one, else own)",
        per_process=True,
    )
    eval_input_price: float = flag(
        0.0, "price of a million prompt tokens, for the cost in reports", within="[0, inf)", per_process=True
    )
    eval_output_price: float = flag(
        0.0,
        "price of a million generated tokens, for the cost in reports",
        within="[0, inf)",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.eval_version is None or self.eval_model is None,
            f"--eval_version {self.eval_version} and --eval_model {self.eval_model} name two policies",
            "give one of them; `agentrl eval compare` compares two evaluations",
        )
        require(
            self.eval_steps is None or (self.eval_version is None and self.eval_model is None),
            f"--eval_steps {self.eval_steps} evaluates the versions of a run, not one policy",
            "leave out --eval_version and --eval_model",
        )
        require(
            self.eval_engine != "shared" or (self.eval_steps is None and self.eval_model is None),
            "--eval_engine is shared, and the run's engines serve only the newest version of the run",
            "use --eval_engine own with --eval_steps and --eval_model",
        )
        require(
            all(character.isalnum() or character in "_.-" for character in self.eval_label),
            f"--eval_label is {self.eval_label!r}",
            "use letters, digits, '_', '.' and '-'",
        )
