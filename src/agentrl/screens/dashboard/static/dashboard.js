// Live updates, keys, theme and charts. Pages work without it; it is the dashboard's only script of its own.

const REST_MS = 1000; // shortest time between two updates of the page
const status = document.getElementById("connection");

/* Theme: a cookie, so that the server's next page has it from the start. */

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  document.cookie = `agentrl_theme=${theme}; path=/; max-age=31536000; samesite=strict`;
  drawCharts(document);
}

/* Charts: uPlot draws the figure that the script element next to a plot holds. A drag zooms, a double click resets. */

const COLORS = {
  light: ["#1a55b0", "#b3541e", "#1a7a4a", "#8a3ea8", "#9a7400", "#b0264f", "#3f6b7a", "#5b5f66"],
  dark: ["#86b6ff", "#f2a36b", "#6fd08c", "#d19ae8", "#e5c45c", "#ff92ac", "#8fc4d6", "#b5bac4"],
};
const WHOLE = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const MAX_MARKED = 60; // points up to which each is marked
const PLOT_HEIGHT = 232; // without the legend, which takes the lines that it needs

function shownNumber(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size >= 1e6 || (size && size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// What a legend shows while no pointer is over the chart: each line's last value, or the sum of the bars.
function atRest(figure, values) {
  const known = values.filter((value) => value != null);
  if (figure.kind === "line" || figure.kind === "stack") return shownNumber(known.at(-1));
  return `${shownNumber(known.reduce((sum, value) => sum + value, 0))} in all`;
}

// Rows of the values between two gaps: no line goes through them, so that each needs a point.
function aloneIn(values) {
  return values.flatMap((value, row) => (value != null && values[row - 1] == null && values[row + 1] == null ? [row] : []));
}

// Adds the shown series up from the last to the first, so that each covers the lower part of the one before it.
function stacked(columns, isShown) {
  const sums = new Array(columns[0].length).fill(0);
  const tops = columns.slice(1).map(() => null);
  for (let index = tops.length - 1; index >= 0; index -= 1) {
    tops[index] = columns[index + 1].map((value, row) => (isShown(index + 1) ? (sums[row] += value ?? 0) : null));
  }
  return [columns[0], ...tops];
}

function chartOf(plot, figure) {
  const columns = uPlot.join(figure.data);
  const style = getComputedStyle(document.body);
  const colors = COLORS[isDark() ? "dark" : "light"];
  const isBars = figure.kind !== "line";
  const isStack = figure.kind === "stack";
  const xs = columns[0];
  const gaps = xs.slice(1).map((x, index) => x - xs[index]).filter((gap) => gap > 0);
  const isAlone = xs.length === 1; // a chart would scale it from 0 to its double, with a bar over all of it
  const gap = gaps.length ? Math.min(...gaps) : Number.isInteger(xs[0]) ? 1 : Math.abs(xs[0]) / 4;
  const half = isAlone ? 1.5 * gap : isBars ? gap / 2 : 0;
  const width = isAlone ? 0.33 : figure.kind === "bar" ? 0.8 : 0.98;
  const restOfX = !isBars || isStack ? "last" : isAlone ? shownNumber(xs[0]) : `${shownNumber(xs[0])} to ${shownNumber(xs.at(-1))}`;
  const line = isDark() ? "#363c47" : "#d5dae1";
  const axis = {
    stroke: style.color, font: `12px ${style.fontFamily}`, labelFont: `12px ${style.fontFamily}`, labelGap: 0,
    grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 },
  };
  const scaleY = { distr: figure.log_y ? 3 : 1 };
  if (figure.y_range) scaleY.range = figure.y_range;
  else if (isBars) scaleY.range = (chart, low, high) => [Math.min(0, low), Math.max(0, high * 1.05) || 1];
  else if (!figure.log_y) scaleY.range = (chart, low, high) => (low || high ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1]);
  const rangeX = isAlone ? [xs[0] - half, xs[0] + half] : isBars ? (chart, low, high) => [low - half, high + half] : undefined;
  const options = {
    width: plot.clientWidth,
    height: PLOT_HEIGHT,
    scales: { x: { time: false, range: rangeX }, y: scaleY },
    axes: [
      { ...axis, label: figure.x_title, labelSize: 18, size: 28, ...(xs.every(Number.isInteger) ? { incrs: WHOLE } : {}) },
      {
        ...axis, size: (chart, values) => 16 + 7 * Math.max(0, ...(values ?? []).map((value) => (value ?? "").length)),
        ...(figure.y_title ? { label: figure.y_title, labelSize: 18 } : {}),
        values: (chart, splits) => splits.map((value) => (value == null ? null : shownNumber(value))),
      },
    ],
    series: [
      { label: figure.x_title, value: (chart, value) => (value == null ? restOfX : shownNumber(value)) },
      ...figure.series.map((series, index) => ({
        label: series.name,
        stroke: colors[index % colors.length],
        fill: isBars ? colors[index % colors.length] : undefined,
        width: isBars ? 0 : 2,
        dash: series.dash,
        points: {
          show: !isBars && xs.length <= MAX_MARKED, size: 5, fill: colors[index % colors.length],
          filter: (chart, at, isShown) => (isBars || isShown ? null : aloneIn(columns[at])),
        },
        paths: isBars ? uPlot.paths.bars({ size: [width, Infinity] }) : undefined,
        value: (chart, value, at, row) => (row == null ? atRest(figure, columns[at]) : shownNumber(columns[at][row])),
      })),
    ],
    cursor: { drag: { x: true, y: !figure.y_range, uni: 30 }, points: { show: !isBars } },
    hooks: {
      draw: [(chart) => {
        const { ctx, bbox } = chart;
        const scale = devicePixelRatio;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = style.color;
        ctx.font = `${11 * scale}px ${style.fontFamily}`;
        ctx.setLineDash([4 * scale, 4 * scale]);
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        figure.marks.forEach(([step, text], index) => { // a flag changed between two steps
          const x = Math.round(chart.valToPos(step - 0.5, "x", true));
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          const isRight = x > bbox.left + bbox.width / 2;
          ctx.textAlign = isRight ? "right" : "left";
          ctx.fillText(text, x + (isRight ? -4 : 4) * scale, bbox.top + (12 + 13 * (index % 4)) * scale);
        });
        ctx.restore();
      }],
      ready: [(chart) => {
        let opening; // waits for a second click, which resets the zoom
        chart.over.addEventListener("click", () => {
          const row = chart.cursor.idx;
          if (row == null || !figure.link_of_x?.startsWith("/")) return;
          clearTimeout(opening);
          opening = setTimeout(() => location.assign(`${figure.link_of_x}${xs[row]}`), 300);
        });
        chart.over.addEventListener("dblclick", () => clearTimeout(opening));
      }],
      setSeries: [(chart, at, changed) => {
        if (isStack && changed.show != null) chart.setData(stacked(columns, (each) => chart.series[each].show));
      }],
    },
  };
  const chart = new uPlot(options, isStack ? stacked(columns, () => true) : columns, plot);
  plot.sizes?.disconnect();
  plot.sizes = new ResizeObserver(() => chart.setSize({ width: plot.clientWidth, height: PLOT_HEIGHT }));
  plot.sizes.observe(plot);
  return chart;
}

function drawChart(plot) {
  const source = document.querySelector(`script[data-chart="${CSS.escape(plot.dataset.liveChart)}"]`);
  if (!source || !globalThis.uPlot) return;
  const theme = isDark() ? "dark" : "light";
  if (plot.drawn === source.textContent && plot.theme === theme) return;
  const figure = JSON.parse(source.textContent);
  const before = plot.chart;
  plot.drawn = source.textContent;
  plot.theme = theme;
  plot.replaceChildren(); // the text that stands here while the chart loads, or the chart with older values
  plot.chart = chartOf(plot, figure);
  if (before?.series.length === plot.chart.series.length) {
    before.series.forEach((series, at) => { // what the legend hides stays hidden
      if (!series.show) plot.chart.setSeries(at, { show: false });
    });
  }
  before?.destroy();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    entry.target.inView = true;
    drawChart(entry.target);
  }
}, { rootMargin: "300px" });

function drawCharts(root) {
  for (const plot of root.querySelectorAll("[data-live-chart]")) {
    if (plot.inView) drawChart(plot);
    else seen.observe(plot);
  }
}

/* Live updates: the page is fetched again, and its elements with id and data-live are replaced. */

let updating = false;
let missed = false;
let lastUpdate = 0;

function showStatus(text, away) {
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("away", away);
}

async function update() {
  if (document.hidden || updating) {
    missed = true;
    return;
  }
  updating = true;
  missed = false;
  try {
    await new Promise((done) => setTimeout(done, Math.max(0, lastUpdate + REST_MS - Date.now())));
    lastUpdate = Date.now();
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(30000) });
    if (answer.status === 401) showStatus("the token has changed: open the printed address again", true);
    else if (answer.status === 503) showStatus("the database does not answer; trying again", true);
    else if (!answer.ok) showStatus(`the page cannot be updated: status ${answer.status}`, true);
    else {
      replaceLive(new DOMParser().parseFromString(await answer.text(), "text/html"));
      showStatus("live", false);
    }
  } catch {
    showStatus("the dashboard does not answer; trying again", true);
  } finally {
    updating = false;
    if (missed && !document.hidden) update();
  }
}

function replaceLive(page) {
  for (const old of document.querySelectorAll("[data-live][id]")) {
    const fresh = page.getElementById(old.id);
    if (fresh) merge(old, fresh);
  }
  document.title = page.title;
  drawCharts(document);
}

// Changes `old` into `fresh` node by node: what is equal stays, with its focus, scroll position and open details.
function merge(old, fresh) {
  if (old.isEqualNode(fresh) || old.hasAttribute("data-live-chart")) return;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(document.importNode(fresh, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.nodeValue = fresh.nodeValue;
    return;
  }
  mergeAttributes(old, fresh);
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, index) => {
    if (index < before.length) merge(before[index], node);
    else old.append(document.importNode(node, true));
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function mergeAttributes(old, fresh) {
  const kept = old.nodeName === "DETAILS" || old.nodeName === "DIALOG" ? ["open"] : [];
  if (old === current) kept.push("class");
  for (const name of old.getAttributeNames()) {
    if (!fresh.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
  }
  for (const name of fresh.getAttributeNames()) {
    if (old.getAttribute(name) !== fresh.getAttribute(name) && !kept.includes(name)) {
      old.setAttribute(name, fresh.getAttribute(name));
    }
  }
}

let source = null;
let polling = null;

function poll(on) {
  if (!on) {
    clearInterval(polling);
    polling = null;
  } else if (polling === null) {
    polling = setInterval(update, 1000 * Number(document.body.dataset.pollSeconds));
  }
}

function listen() {
  if (document.hidden) return;
  const events = document.body.dataset.events;
  if (events === undefined) return;
  if (events === "") {
    poll(true);
    showStatus("live", false);
    return;
  }
  source = new EventSource(events);
  source.addEventListener("open", () => {
    poll(false);
    if (status.classList.contains("away")) update();
    else showStatus("live", false);
  });
  source.addEventListener("change", update);
  source.addEventListener("tick", update);
  source.addEventListener("away", () => showStatus("the database does not answer; trying again", true));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) {
      poll(true); // refused, as by a dashboard with too many open pages
      update();
    } else {
      const broken = source; // wait: a short break is not worth a message
      setTimeout(() => {
        if (broken === source && broken.readyState !== EventSource.OPEN && !document.hidden) {
          showStatus("the dashboard does not answer; trying again", true);
        }
      }, 4000);
    }
  });
}

// A hidden page holds no connection: a browser opens only six to one server.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    poll(false);
  } else {
    listen();
    if (document.body.dataset.events !== undefined) update();
  }
});

/* Navigation: on a phone it scrolls; the current page's link is in sight from the start. */

const here = document.querySelector(".top nav [aria-current]");
if (here) {
  const nav = here.closest("nav");
  const [link, frame] = [here.getBoundingClientRect(), nav.getBoundingClientRect()];
  nav.scrollLeft += link.left - frame.left - (frame.width - link.width) / 2;
}

/* Keys */

let current = null;

function select(row) {
  current?.classList.remove("current");
  current = row;
  row.classList.add("current");
  row.querySelector("a")?.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
}

function move(by) {
  const rows = [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  if (!rows.length) return;
  const index = rows.indexOf(current);
  select(rows[index < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, index + by))]);
}

function help() {
  const dialog = document.getElementById("help");
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  "/": () => document.querySelector("[data-search]")?.focus(),
  "?": help,
  d: switchTheme,
  Enter: (event) => {
    if (event.target === document.body && current) current.querySelector("a")?.click();
    else return false;
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const action = KEYS[event.key];
  if (action && action(event) !== false) event.preventDefault();
});

document.getElementById("theme-switch").addEventListener("click", switchTheme);
document.getElementById("help-button").addEventListener("click", help);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(document));

drawCharts(document);
listen();
