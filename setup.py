"""Copy ``assets/``, and what engines and extras need, into the wheel. All else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("assets")
BESIDE = ("deploy/sglang", "deploy/vllm", "requirements")
"""Folders that a wheel has in ``agentrl/assets/`` and a clone beside ``assets/``."""
LEFT_OUT = shutil.ignore_patterns("agent_config.yml", "results", "__pycache__", "*.pyc", ".*")
"""What is not shipped: archives, and the keys in agent_config.yml, which a user makes from the example."""


class BuildWithAssets(build_py):
    """Copies the assets, too. An editable installation reads them where they are."""

    def run(self) -> None:
        """Build the modules, then copy the assets."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "agentrl" / "assets"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(SOURCE, target, ignore=LEFT_OUT)
            for folder in BESIDE:
                shutil.copytree(folder, target / folder, ignore=LEFT_OUT)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files of the build, the assets among them."""
        target = Path(self.build_lib) / "agentrl" / "assets"
        assets = [str(file) for file in target.rglob("*") if file.is_file()]
        return [*super().get_outputs(include_bytecode), *assets]


setup(cmdclass={"build_py": BuildWithAssets})
