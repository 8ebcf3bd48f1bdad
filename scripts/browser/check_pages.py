"""Open every page of the dashboard in headless Chromium: server time, console, accessibility, screenshots.

Reads DASHBOARD_URL, DASHBOARD_RUN and DASHBOARD_IDS, which serve_large_run.py sets. Exits with 1 if a page is
slower than the limit, logs to the console, has a serious finding of axe-core, is wider than the window of
a desk or a phone, has a chart that shows nothing, or runs text of a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

LIMIT_MS = 300.0
LOGIN = {"Authorization": f"Bearer {os.environ['DASHBOARD_TOKEN']}"}
_GRAVE = ("serious", "critical")
_DESK, _PHONE = {"width": 1440, "height": 900}, {"width": 400, "height": 800}
_MAX_IMAGE_BYTES = 200_000
_TIMEOUT_MS = 60_000
_HIDES_LINKS = """(() => {
    const nav = document.querySelector(".top nav");
    if (!nav || nav.scrollWidth <= nav.clientWidth) return false;
    const here = nav.querySelector("[aria-current]")?.getBoundingClientRect();
    const hidden = here && (here.left < 0 || here.right > window.innerWidth);
    return hidden || !getComputedStyle(nav).backgroundImage.includes("gradient");
})()"""
"""Whether the navigation is wider than its frame and shows no shade, or not the current page's link."""

_EMPTY_LEGENDS = """[...document.querySelectorAll(".u-legend .u-value")]
    .filter((value) => ["", "–", "--"].includes(value.textContent)).length"""
_CHARTS = """async () => {
    const wrong = [];
    for (const plot of document.querySelectorAll("[data-live-chart]")) {
        plot.scrollIntoView();
        await new Promise((done) => setTimeout(done, 150));
        const canvas = plot.querySelector("canvas");
        const name = `the chart ${plot.dataset.liveChart}`;
        if (!canvas || canvas.clientHeight < 200) {
            wrong.push(`${name} is not drawn, or flat`);
            continue;
        }
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const isColored = (_, at) => {
            const [red, green, blue, alpha] = data.subarray(4 * at, 4 * at + 4);
            return alpha > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
        };
        if (!Array.from({ length: data.length / 4 }).some(isColored)) wrong.push(`${name} shows nothing`);
        if (plot.scrollWidth > plot.clientWidth) wrong.push(`${name} has a legend that is cut`);
    }
    return wrong;
}"""
"""What is wrong with the charts, each scrolled into view."""
_FIRST = {
    "trajectories": "table.rows tbody tr",
    "by many": "table.rows tbody tr",
    "trajectory": ".turn .said",
}
"""Page → what its first screen shows."""
_REFUSED = {"login": 401, "no run": 404, "no page": 404, "bad filter": 400}
"""Page → its status, which the browser writes to the console."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A screenshot of a page for the docs."""

    file: str
    page: str
    theme: str = "light"
    phone: bool = False
    height: int = 860


@dataclass(slots=True)
class Result:
    """What was found on one page."""

    name: str
    times: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def first(self) -> float:
        """The server time of the first request, in ms."""
        return self.times[0]

    @property
    def median(self) -> float:
        """The median server time, in ms."""
        return statistics.median(self.times)


SHOTS = (
    Shot("dashboard_run.webp", "overview", height=1040),
    Shot("dashboard_run_dark.webp", "overview", "dark", height=1040),
    Shot("dashboard_trajectories.webp", "of a step"),
    Shot("dashboard_trajectory.webp", "trajectory", height=1040),
    Shot("dashboard_tokens_dark.webp", "tokens", "dark"),
    Shot("dashboard_rewards.webp", "rewards", height=1040),
    Shot("dashboard_phone.webp", "trajectory", phone=True),
)


def addresses(run: str, ids: dict[str, str]) -> dict[str, str]:
    """Return name → address of every page, and of the filters and sorts that cost most."""
    base = f"/runs/{quote(run)}"
    trained, hostile, failed = (quote(ids[name]) for name in ("trained", "hostile", "failed"))
    sibling = quote(ids["trained"].rsplit("/", 2)[0])
    number = int(ids["step"])
    pair = f"a={quote(ids['trained'], safe='')}&b={quote(ids['sibling'], safe='')}"
    listed = f"{base}/trajectories"
    return {
        "runs": "/",
        "overview": base,
        "tasks": f"{base}/tasks",
        "tasks, most improved": f"{base}/tasks?sort=most+improved&kind=never+agree",
        "steps": f"{base}/steps",
        "step": f"{base}/steps/{number}",
        "trajectories": listed,
        "by score": f"{listed}?order=highest_score",
        "by tokens": f"{listed}?order=longest",
        "by turns": f"{listed}?order=most_turns",
        "by tokens, failed": f"{listed}?order=shortest&status=failed",
        "of a status": f"{listed}?status=abandoned",
        "of a step": f"{listed}?step={number}",
        "of a task": f"{listed}?task={sibling}",
        "of a version": f"{listed}?version={number // 2}",
        "of a score range": f"{listed}?min_score=0.5&max_score=1",
        "of a failure": f"{listed}?failure=timeout",
        "of a label": f"{listed}?label=cheats",
        "that called a tool": f"{listed}?tool=run_python",
        "by many": f"{listed}?split=train&min_turns=1&max_tokens=9999&label=cheats",
        "trajectory": f"{listed}/{trained}",
        "failed trajectory": f"{listed}/{failed}",
        "hostile trajectory": f"{listed}/{hostile}",
        "tokens": f"{base}/tokens/{trained}",
        "hostile tokens": f"{base}/tokens/{hostile}",
        "tokens by advantage": f"{base}/tokens/{trained}?colour=advantage",
        "pair": f"{base}/pair?{pair}",
        "versions": f"{base}/compare",
        "two versions": f"{base}/compare?a={number // 2}&b={number - 3}",
        "rewards": f"{base}/rewards",
        "manage": f"{base}/manage",
        "choice of runs": "/compare",
        "two runs": f"/compare?run={quote(run)}&run={quote(ids['small_run'])}",
        "login": "/?token=wrong",
        "no run": "/runs/none",
        "no page": f"{base}/none",
        "bad filter": f"{listed}?step=one",
    }


class Check:
    """Visits pages with one browser and collects what it finds."""

    def __init__(self, browser: Browser, url: str, axe: str) -> None:
        self._browser, self._url, self._axe = browser, url.rstrip("/"), axe

    def measure(self, result: Result, address: str) -> None:
        """Request a page without a browser; add the server's time, which it reports itself."""
        asked = urllib.request.Request(self._url + address, headers=LOGIN)
        try:
            answer = urllib.request.urlopen(asked, timeout=120)
        except urllib.error.HTTPError as error:
            if error.code != _REFUSED.get(result.name):
                result.problems.append(f"status {error.code}")
            answer = error
        with answer:
            answer.read()
            timing = answer.headers["Server-Timing"]
        result.times.append(float(timing.rsplit("dur=", 1)[1]))

    def inspect(self, result: Result, address: str, *, theme: str, phone: bool) -> None:
        """Open a page; add what the console, axe-core, its width and injected text say."""
        where = f"{theme}{', phone' if phone else ''}"
        with self._open(theme, phone) as opened:
            page, messages = opened.page, opened.messages
            self._visit(page, address)
            status = f"responded with a status of {_REFUSED.get(result.name)} "
            result.problems += [f"{where}: console: {each}" for each in messages if status not in each]
            result.problems += [f"{where}: axe: {finding}" for finding in self._findings(page)]
            if page.evaluate("window.injected !== undefined"):
                result.problems.append(f"{where}: text of a model was run as a script")
            if page.evaluate(_HIDES_LINKS):
                result.problems.append(f"{where}: the navigation scrolls, without a sign of it")
            if count := page.evaluate(_EMPTY_LEGENDS):
                result.problems.append(f"{where}: {count} values of legends are empty")
            if (first := _FIRST.get(result.name)) is not None:
                top = page.locator(first).first.bounding_box()
                if top is None or top["y"] > page.viewport_size["height"]:
                    result.problems.append(f"{where}: the first screen shows no {first}")
            wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if wide > 0:
                result.problems.append(f"{where}: {wide} pixels wider than the window")
            result.problems += [f"{where}: {problem}" for problem in page.evaluate(_CHARTS)]

    def shoot(self, shot: Shot, address: str, folder: Path) -> Path:
        """Write a screenshot as WebP of at most 200 kB."""
        with self._open(shot.theme, shot.phone, shot.height) as opened:
            self._visit(opened.page, address)
            png = folder / f"{shot.file}.png"
            opened.page.screenshot(path=png)
        path = folder / shot.file
        image = Image.open(png).convert("RGB")
        for quality in (88, 75, 60, 45):
            image.save(path, "WEBP", quality=quality, method=6)
            if path.stat().st_size <= _MAX_IMAGE_BYTES:
                break
        png.unlink()
        return path

    def _open(self, theme: str, phone: bool, height: int | None = None) -> Opened:
        size = dict(_PHONE if phone else _DESK)
        if height is not None:
            size["height"] = height
        return Opened(self._browser, theme, size)

    def _visit(self, page: Page, address: str) -> None:
        page.goto(self._url + address, wait_until="load", timeout=_TIMEOUT_MS)
        page.wait_for_function("document.fonts.status === 'loaded'", timeout=_TIMEOUT_MS)
        charts = page.locator("[data-chart]").count()
        if charts:
            page.locator(".uplot canvas").first.wait_for(timeout=_TIMEOUT_MS)
        page.wait_for_timeout(300)

    def _findings(self, page: Page) -> list[str]:
        page.evaluate(self._axe)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{item['impact']}: {item['id']}: {item['help']} ({len(item['nodes'])}×, such as"
            f" {item['nodes'][0]['html'][:160]} {item['nodes'][0].get('failureSummary', '')[:260]})"
            for item in found["violations"]
            if item["impact"] in _GRAVE
        ]


class Opened:
    """A page in a browser context of its own, with what it wrote to the console."""

    def __init__(self, browser: Browser, theme: str, size: dict[str, int]) -> None:
        self._context = browser.new_context(
            viewport=size,
            extra_http_headers=LOGIN,
            color_scheme=theme,
            reduced_motion="reduce",
            device_scale_factor=1,
            bypass_csp=False,
        )
        self.page = self._context.new_page()
        self.messages: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.messages.append(str(error)[:300]))
        self.page.on("requestfailed", self._on_failed_request)
        self.page.on("dialog", lambda dialog: (self.messages.append("a dialog opened"), dialog.dismiss()))

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(f"{message.type}: {message.text[:300]}")

    def _on_failed_request(self, request: Request) -> None:
        if not request.url.endswith("/events") and "ERR_ABORTED" not in str(request.failure):
            self.messages.append(f"request failed: {request.url[:200]}: {request.failure}")


def main() -> int:
    """Check all pages, print a table, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chromium", required=True, help="the browser's program")
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js")
    parser.add_argument("--images", type=Path, required=True, help="folder of the screenshots")
    parser.add_argument("--requests", type=int, default=5, help="requests per page")
    parser.add_argument("--limit_ms", type=float, default=LIMIT_MS, help="largest median server time")
    parser.add_argument("--times", action="store_true", help="measure the server's times, and no more")
    parser.add_argument("--only", default="", help="check the pages whose name contains this")
    arguments = parser.parse_args()
    ids = json.loads(os.environ["DASHBOARD_IDS"])
    pages = {
        name: address
        for name, address in addresses(os.environ["DASHBOARD_RUN"], ids).items()
        if arguments.only in name
    }
    results = {name: Result(name) for name in pages}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=arguments.chromium, args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        )
        check = Check(browser, os.environ["DASHBOARD_URL"], arguments.axe.read_text(encoding="utf-8"))
        _print_line(f"server time of {len(pages)} pages, {arguments.requests} requests each")
        for _ in range(arguments.requests):
            for name, address in pages.items():
                check.measure(results[name], address)
        if arguments.times:
            return _report(list(results.values()), arguments.limit_ms)
        for name, address in pages.items():
            _print_line(f"browser: {name}")
            for theme, phone in product(("light", "dark"), (False, True)):
                check.inspect(results[name], address, theme=theme, phone=phone)
            for problem in results[name].problems:
                _print_line(f"  {problem}")
        arguments.images.mkdir(parents=True, exist_ok=True)
        for shot in SHOTS:
            if shot.page in pages:
                path = check.shoot(shot, pages[shot.page], arguments.images)
                _print_line(f"{path}: {path.stat().st_size // 1000} kB")
        browser.close()
    return _report(list(results.values()), arguments.limit_ms)


def _report(results: list[Result], limit: float) -> int:
    load = os.getloadavg()[0]
    print(f"\nload {load:.1f}, {os.cpu_count()} cores\n\n| page | first ms | median ms |\n|---|---|---|")
    for result in results:
        print(f"| {result.name} | {result.first:.0f} | {result.median:.0f} |")
        if result.median > limit:
            result.problems.append(f"the server takes {result.median:.0f} ms; the limit is {limit:.0f} ms")
    problems = [f"{result.name}: {problem}" for result in results for problem in result.problems]
    print(f"\n{len(problems)} problems on {len(results)} pages")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _print_line(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
