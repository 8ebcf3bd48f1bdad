from __future__ import annotations

from pathlib import Path

import pytest
from test_layouts import run_together

LAYOUTS = {
    2: ["fsdp2", "fsdp2_lora_bf16", "tp2_tied", "ep2", "pp2_tied"],
    4: ["fsdp2×tp2", "ep2×fsdp2", "pp2×fsdp2"],
}
"""By the number of processes; the other layouts of ``loading.py`` are run by hand."""


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_read_their_shards_alone_and_train_as_if_loaded_whole(world: int, tmp_path: Path) -> None:
    told = run_together(world, "loading.py", *LAYOUTS[world], "--folder", str(tmp_path))
    assert [line.split()[0] for line in told.splitlines() if line.endswith("  ok")] == LAYOUTS[world]
