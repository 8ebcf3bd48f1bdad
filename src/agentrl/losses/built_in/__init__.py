"""The losses of AgentRL, one file each. None imports torch: ``config`` reads the flags that they declare."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
