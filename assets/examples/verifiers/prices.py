"""An environment of verifiers 0.4 with a tool: look up a price, then name it."""

from collections.abc import Iterator

import verifiers.v1 as vf

PRICES = {"pear": "3", "plum": "7", "fig": "12"}


class Shop(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A tool server of each rollout."""

    @vf.tool
    async def price(self, item: str) -> str:
        """Return the price of an item."""
        return PRICES.get(item, "unknown")


class PriceData(vf.TaskData):
    """What is asked for."""

    item: str


class Price(vf.Task[PriceData, vf.State, vf.TaskConfig]):
    """Scored by its last reply; whoever looked it up gets a tenth more."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the tool servers of a rollout."""
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the reply is the price."""
        return float(trace.last_reply == PRICES[self.data.item])

    @vf.reward(weight=0.1)
    async def asked(self, trace: vf.Trace) -> float:
        """Whether the tool was called."""
        return float(bool(trace.tool_messages))


class Prices(vf.Taskset[Price, vf.TasksetConfig]):
    """A task for each item."""

    def load(self) -> Iterator[Price]:
        """Yield the tasks in a fixed order."""
        for item in PRICES:
            yield Price(PriceData(prompt=f"What does a {item} cost?", item=item), self.config.task)


__all__ = ["Prices"]

if __name__ == "__main__":  # verifiers starts a tool server as `python -m MODULE`
    Shop.run()
