"""Check and import the packages of the extra ``agentrl[environments]``, at first use only."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from agentrl.errors import ConfigError


def require_package(module: str, environment: str) -> None:
    """Raise ConfigError unless ``module`` is installed. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"environment {environment} needs the package {module.replace('_', '-')}",
            hint="pip install 'agentrl[environments]'",
        )


def import_package(module: str, environment: str) -> Any:
    """Return the imported module. Raises ConfigError if it is not installed or cannot be imported."""
    require_package(module.partition(".")[0], environment)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"environment {environment} cannot import {module}: {type(error).__name__}: {error}",
            hint="pip install --upgrade 'agentrl[environments]'",
        ) from error
