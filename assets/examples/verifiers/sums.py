"""A small environment of verifiers 0.4: one question, one answer, a reward and a metric."""

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """The right answer goes with the task, and is not shown."""

    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Scored by its last reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the reply is the answer."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the reply."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """What ``args={"taskset": {…}}`` may have."""

    count: int = 100


class Sums(vf.Taskset[Sum, SumsConfig]):
    """Sums of two small numbers."""

    def load(self) -> Iterator[Sum]:
        """Yield the tasks in a fixed order."""
        for number in range(self.config.count):
            one, other = number % 10, number // 10 % 10
            data = SumData(
                prompt=f"{one} + {other} = ?", system_prompt="Write only the number.", answer=str(one + other)
            )
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
