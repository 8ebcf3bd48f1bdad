"""The page that manages a run: its tags and its note, another name, its deletion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.config.run import EngineListConfig
from agentrl.dashboard import security
from agentrl.dashboard.failures import BadQueryError
from agentrl.dashboard.query import checked_query, choice
from agentrl.dashboard.render import link, render
from agentrl.dashboard.stores import cache_of, open_run, pool_of
from agentrl.errors import (
    ConfigError,
    RunMissingError,
    StoreDeniedError,
    StoreError,
    StoreUnavailableError,
)
from agentrl.store.admin.rename import rename_run
from agentrl.store.admin.runs import RunAdmin
from agentrl.store.client import Store
from agentrl.store.views.runs import Runs

_ALIVE_SECONDS = EngineListConfig().alive_seconds


async def _show(request: Request) -> Response:
    async with open_run(request) as store:
        admin = RunAdmin(store.connection)
        remarks = await admin.remarks()
        holders = await Runs(store.connection).holders(store.run_name, _ALIVE_SECONDS)
        try:
            folder, why_not = await admin.output_folder(), None
        except ConfigError as error:
            folder, why_not = None, error.message
    token, cookie = security.give_token(request)
    response = render(
        request, "manage.html", run=store.run_name, section="", csrf=token, remarks=remarks, holders=holders,
        folder=folder, why_not=why_not,
    )  # fmt: skip
    security.set_cookie(request, response, cookie)
    return response


async def _change(request: Request) -> Response:
    form = await security.posted_form(request)
    action = choice(form, "action", ("describe", "rename", "delete"), "describe")
    name = request.path_params["run"]
    with checked_query(), _conflicts():
        if action == "rename":
            new = form.get("new_name", "").strip()
            await rename_run(replace(pool_of(request).run, run_name=name), new, _ALIVE_SECONDS)
            await pool_of(request).forget(name)
            target = link("runs", new)
        elif action == "delete":
            async with open_run(request) as store:
                await _delete(store, form)
            await pool_of(request).forget(name)
            target = link()
        else:
            async with open_run(request) as store:
                await _describe(store, form)
            target = link("runs", name)
    cache_of(request).clear()
    return RedirectResponse(target, HTTPStatus.SEE_OTHER)


async def _describe(store: Store, form: Mapping[str, str]) -> None:
    """Give the run the tags and the note of the form. Raises ConfigError."""
    admin, wanted = RunAdmin(store.connection), set(form.get("tags", "").replace(",", " ").split())
    tags = set((await admin.remarks()).tags)
    await admin.tag(wanted - tags, tags - wanted)
    await admin.note(form.get("note", ""))


async def _delete(store: Store, form: Mapping[str, str]) -> None:
    """Delete the run whose name the form repeats."""
    if form.get("name", "") != store.run_name:
        raise BadQueryError(f"to delete run {store.run_name!r}, write its name into the field")
    admin = RunAdmin(store.connection)
    await admin.require_ended(_ALIVE_SECONDS)
    await admin.delete(await admin.output_folder() if form.get("folder") else None, _ALIVE_SECONDS)


@contextmanager
def _conflicts() -> Iterator[None]:
    """Answer 409 where the state of a run forbids a change: it is live, or the name is taken."""
    try:
        yield
    except (RunMissingError, StoreDeniedError, StoreUnavailableError):
        raise
    except StoreError as error:
        raise HTTPException(HTTPStatus.CONFLICT, f"{error.message}: {error.hint}") from error


routes = [
    Route("/runs/{run}/manage", _show),
    Route("/runs/{run}/manage", _change, methods=["POST"]),
]
