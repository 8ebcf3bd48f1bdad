"""Serve the stylesheet, the module and plotly.js, each under an address with its version, cached for good."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PLOTLY = "plotly.min.js"
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    version: str
    media_type: str


@cache
def _files() -> dict[str, _File]:
    """Return the files by name. The packaged plotly.js is found without importing plotly."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            found[path.name] = _File(path, version, _TYPES[path.suffix])
    plotly = importlib.util.find_spec("plotly")
    for folder in (plotly.submodule_search_locations or []) if plotly else []:
        path = Path(folder) / "package_data" / _PLOTLY
        found[_PLOTLY] = _File(path, importlib.metadata.version("plotly"), _TYPES[".js"])
    return found


def asset(name: str) -> str:
    """Return the address of a file of ``static/``, or of ``plotly.min.js``."""
    return f"/static/{_files()[name].version}/{name}"


@cache
def _compressed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


async def _serve(request: Request) -> Response:
    file = _files().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404, "The file does not exist.")
    headers = {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        content = await asyncio.to_thread(_compressed, file.path)
    else:
        content = await asyncio.to_thread(file.path.read_bytes)
    return Response(content, media_type=file.media_type, headers=headers)


routes = [Route("/static/{version}/{name}", _serve)]
