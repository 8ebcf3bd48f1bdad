"""The pages: each module has ``routes``, a list of Starlette routes. A new module here is a new page."""

from __future__ import annotations

import importlib
import pkgutil

from starlette.routing import Route


def all_routes() -> list[Route]:
    """Return the routes of every page module, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [route for module in modules for route in module.routes]
