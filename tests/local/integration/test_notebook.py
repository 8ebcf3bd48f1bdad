"""The example notebook runs as a person runs it, with a model that is made in a second and fewer steps."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_policy import write_tiny_policy

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

NOTEBOOK = Path(__file__).parents[3] / "assets" / "examples" / "notebook" / "train.ipynb"
SMALL = """model="model", steps=2, min_score_spread=0, drop_zero_advantage=False, max_turns=1,
    max_new_tokens=8, max_prompt_tokens=512, prompt_reserve_tokens=64, num_generations=2, groups_per_step=1,
    lora_rank=4, balance_sample=False,"""
"""Equal scores are trained too: a model with random weights answers nothing."""


@pytest.mark.timeout(400)
def test_the_example_notebook_trains_and_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_policy(tmp_path / "model")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if "agentrl.run(" in cell.source:
            head, _ = cell.source.split("steps=4")
            cell.source = f"{head}{SMALL}\n)\nrun.wait()"
        cell.source = cell.source.replace("range(16)", "range(2)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = {cell.source.splitlines()[0][:14]: cell.outputs for cell in notebook.cells if "outputs" in cell}
    steps = shown['run.steps()[["s'[:14]][0]["data"]["text/plain"]
    assert [line.split()[1] for line in steps.splitlines()[1:]] == ["1", "2"]
    assert shown["before, after "][-1]["text"].count("0.000 [0.000, 0.000]") == 2
    assert (tmp_path / "output").is_dir()
