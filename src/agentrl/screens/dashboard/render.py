"""Render pages from templates, with untrusted text made visible, and serve the files that they load."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from agentrl import __version__
from agentrl.documents.document import now
from agentrl.observe.metric_definitions import definition_of
from agentrl.observe.terminal import MISSING, age, duration, finite, number, percent, signed
from agentrl.screens.run_screens import amount

_JOINERS = "\u200c\u200d"
"""Emoji and some scripts need them; they hide nothing."""
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _hidden_characters() -> str:
    """Return the character class of what a browser does not show, or that reorders what it shows."""
    codes = [
        code
        for code in (*range(0x20000), *range(0xE0000, 0xE1000))  # all others are visible or unassigned
        if unicodedata.category(chr(code)) in _HIDDEN_CATEGORIES and chr(code) not in "\n\t" + _JOINERS
    ]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


_HIDDEN = re.compile(f"[{_hidden_characters()}]")


def visible(value: object) -> Markup:
    """Return untrusted text as HTML: hidden characters become marked escapes such as ``\\x1b``, ``\\u202e``.

    Line feeds and tabs stay; show it in an element whose style keeps them (class ``text``).
    """
    text = "" if value is None else str(value).replace("\r\n", "\n")
    parts: list[Markup] = []
    end = 0
    for match in _HIDDEN.finditer(text):
        parts += [escape(text[end : match.start()]), _marked(match[0])]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def _marked(character: str) -> Markup:
    code = ord(character)
    name = unicodedata.name(character, f"U+{code:04X}")
    shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return Markup('<span class="hidden-character" title="{}">{}</span>').format(name, shown)


def excerpt(value: object, limit: int = 120) -> Markup:
    """Return the first ``limit`` characters on one line, as ``visible`` shows them."""
    line = " ".join(str("" if value is None else value)[: 8 * limit].split())
    return visible(line if len(line) <= limit else line[: limit - 1] + "…")


def time(moment: datetime | None) -> Markup:
    """Return a moment in UTC as a ``<time>`` element."""
    if moment is None:
        return Markup(MISSING)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S}"
    )


def ago(moment: datetime | None, at: datetime | None = None) -> Markup:
    """Return how long before ``at`` (now) a moment was, as a ``<time>`` element titled with the time."""
    if moment is None:
        return Markup(MISSING)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S}", age(moment, at or now())
    )


_SPARK = (96, 22)
"""Width and height of a sparkline, in pixels."""


def sparkline(values: Sequence[float | None]) -> Markup:
    """Return a curve of the size of a word, as SVG; nothing for fewer than two values."""
    known = [found for value in values if (found := finite(value)) is not None]
    if len(known) < 2:
        return Markup("")
    width, height = _SPARK
    low, high = min(known), max(known)
    step, below = width / (len(known) - 1), height / ((high - low) or 1)
    points = " ".join(
        f"{step * index:.1f},{below * (high - value) if high > low else height / 2:.1f}"
        for index, value in enumerate(known)
    )
    return Markup(
        '<svg class="spark" width="{0}" height="{1}" viewBox="-2 -2 {2} {3}" role="img" aria-label="{4}">'
        '<title>{4}</title><polyline points="{5}"/></svg>'
    ).format(
        width, height, width + 4, height + 4,
        f"the last {len(known)} steps: {number(known[0])} to {number(known[-1])}, {number(low)} at least,"
        f" {number(high)} at most", points,
    )  # fmt: skip


FILTERS = {
    "sparkline": sparkline,
    "visible": visible,
    "excerpt": excerpt,
    "number": number,
    "percent": percent,
    "signed": signed,
    "amount": amount,
    "duration": duration,
    "time": time,
    "ago": ago,
}
"""The Jinja filters of every template."""


STATIC = "/static"
_FOLDER = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
SECTIONS: Sequence[tuple[str, str]] = (
    ("", "Overview"),
    ("tasks", "Tasks"),
    ("steps", "Steps"),
    ("trajectories", "Trajectories"),
    ("compare", "Versions"),
    ("rewards", "Rewards"),
)
"""The pages of a run in its navigation: last part of the address, and title."""
_POLL_SECONDS = 10
THEME_COOKIE = "agentrl_theme"


def link(*parts: object, **query: object) -> str:
    """Return the address of a page: ``link("runs", run, "steps", 5, sort="reward")``.

    A slash in a part stays; a query value of None is left out.
    """
    path = "/" + "/".join(quote(str(part), safe="/") for part in parts if part != "")
    given = [(name, str(value)) for name, value in query.items() if value is not None]
    return f"{path}?{urlencode(given)}" if given else path


def same_page(request: Request, **query: object) -> str:
    """Return the address of this page with some query parameters replaced; None removes one."""
    kept: dict[str, object] = dict(request.query_params)
    return link(*request.url.path.strip("/").split("/"), **{**kept, **query}).replace("%25", "%")


@cache
def templates() -> Environment:
    """Return the environment of the templates, whose output is escaped."""
    environment = Environment(
        loader=PackageLoader("agentrl.screens.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.globals.update(
        asset=asset, link=link, version=__version__, sections=SECTIONS, definition_of=definition_of
    )
    return environment


def compile_templates() -> None:
    """Compile every template, so that no request waits for it."""
    environment = templates()
    for name in environment.list_templates():
        environment.get_template(name)


def render(
    request: HTTPConnection,
    template: str,
    *,
    run: str | None = None,
    section: str | None = None,
    live: bool = False,
    charts: bool = False,
    status: int = HTTPStatus.OK,
    **context: Any,
) -> HTMLResponse:
    """Return the page of a template, which extends ``base.html``.

    ``run`` gives the page the navigation of a run, with ``section`` (of ``SECTIONS``) marked as the current
    one. With ``live``, elements that have an ``id`` and the attribute ``data-live`` are replaced when the run
    changes. With ``charts``, the page loads what draws them.
    """
    theme = request.cookies.get(THEME_COOKIE)
    events = None
    if live:
        events = link("runs", run, "events") if run is not None else ""
    text = templates().get_template(template).render(
        request=request,
        run=run,
        section=section,
        events=events,
        poll_seconds=_POLL_SECONDS,
        charts=charts,
        theme=theme if theme in ("light", "dark") else None,
        **context,
    )  # fmt: skip
    return HTMLResponse(text.encode("utf-8", "replace"), status)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    version: str
    media_type: str


@cache
def _files() -> dict[str, _File]:
    """Return the files by name."""
    files = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            files[path.name] = _File(path, version, _TYPES[path.suffix])
    return files


def asset(name: str) -> str:
    """Return the address of a file of ``static/``."""
    return f"{STATIC}/{_files()[name].version}/{name}"


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


routes = [Route(f"{STATIC}/{{version}}/{{name}}", _serve)]
