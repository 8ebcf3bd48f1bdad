"""What a trainer takes its data from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from parsed_flags import parsed

from agentrl.base.registry import Registry
from agentrl.documents.run import PARENT, Relative
from agentrl.errors import ConfigError
from agentrl.train import start


async def test_the_steps_of_a_parent_are_trained_by_what_registers_for_them_and_else_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources: Registry[Any] = Registry("step source", group="agentrl.no_sources")
    monkeypatch.setattr(start, "STEP_SOURCES", sources)
    parent = Relative(id=PARENT, run="math", kind="whatif", step=3, checkpoint="/c", steps=(4, 6))

    async def of_parent() -> Relative:
        return parent

    async def open_steps(*given: Any) -> Any:
        return given

    store = cast("Any", SimpleNamespace(ancestry=SimpleNamespace(parent=of_parent)))
    progress = cast("Any", SimpleNamespace(train_steps=["1/1"]))
    configs = parsed()
    with pytest.raises(ConfigError, match="unknown step source 'whatif'"):
        await start.open_source(store, configs, cast("Any", None), progress, None)
    sources.add(open_steps, "whatif")
    opened = await start.open_source(store, configs, cast("Any", None), progress, 5)
    assert cast("Any", opened) == (store, parent, configs, ["1/1"], 5)
