"""Flags of a teacher, whose logprobs `agentrl teach` fills in."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.flags import Flags, flag, require_plain_url


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Flags):
    """The teacher of on-policy distillation, and what it reads."""

    section = "teacher"

    teacher: str | None = flag(
        None,
        "the teacher: a model folder, or the URL of an SGLang or vLLM server; `agentrl launch` then starts"
        " `agentrl teach`",
        per_process=True,
    )
    teacher_name: str = flag(
        "", "fill for tasks with this meta.teacher, and for those that name no teacher", per_process=True
    )
    teacher_tokenizer: str | None = flag(
        None,
        "folder with the teacher's tokenizer (default: that of the model, if its folder is here)",
        per_process=True,
    )
    teacher_prompt: str | None = flag(
        None,
        "file with a prompt that the teacher alone reads, at the end of the system message: {answer} and"
        " {query} are the task's",
        per_process=True,
    )
    teacher_top_logprobs: int = flag(
        16,
        "most likely ids to store beside each token's logprob, for the reverse KL over them (0: only the"
        " sampled token's logprob)",
        within="[0, 1000]",
        unit="ids",
    )
    teacher_concurrency: int = flag(8, "trajectories asked about at a time", within="[1, inf)")
    teacher_timeout_seconds: float = flag(
        300.0, "time limit of a request to a server", within="(0, inf)", unit="seconds"
    )
    teacher_wait_seconds: float = flag(
        600.0, "longest wait for a server at the start", within="[0, inf)", unit="seconds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and "://" in self.teacher:
            require_plain_url("teacher", self.teacher)
