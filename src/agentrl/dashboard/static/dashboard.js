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

/* Charts: plotly.js draws the figure that the script element next to a plot holds. */

const COLORS = {
  light: ["#1a55b0", "#b3541e", "#1a7a4a", "#8a3ea8", "#9a7400", "#b0264f", "#3f6b7a", "#5b5f66"],
  dark: ["#86b6ff", "#f2a36b", "#6fd08c", "#d19ae8", "#e5c45c", "#ff92ac", "#8fc4d6", "#b5bac4"],
};

function layoutOf(figure) {
  const style = getComputedStyle(document.body);
  const dark = isDark();
  const line = dark ? "#363c47" : "#d5dae1";
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    ...figure.layout,
    xaxis: { ...axis, ...figure.layout.xaxis },
    yaxis: { ...axis, ...figure.layout.yaxis },
    colorway: COLORS[dark ? "dark" : "light"],
    font: { color: style.color, family: style.fontFamily, size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 50, r: 12, t: figure.layout.showlegend ? 30 : 10, b: 40 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
    hovermode: figure.data.some((trace) => trace.mode === "markers") ? "closest" : "x unified",
    hoverlabel: { bgcolor: dark ? "#262b34" : "#ffffff", font: { color: style.color } },
  };
}

async function drawChart(plot) {
  const source = document.querySelector(`script[data-chart="${CSS.escape(plot.dataset.liveChart)}"]`);
  if (!source || !globalThis.Plotly) return;
  const theme = isDark() ? "dark" : "light";
  if (plot.drawn === source.textContent && plot.theme === theme) return;
  plot.drawn = source.textContent;
  plot.theme = theme;
  const figure = JSON.parse(source.textContent);
  const config = { responsive: true, displayModeBar: false };
  const first = !plot.classList.contains("js-plotly-plot");
  if (first) plot.textContent = ""; // the text that stands here while the chart loads
  await globalThis.Plotly.react(plot, figure.data, layoutOf(figure), config);
  if (first) {
    plot.on("plotly_click", (event) => {
      const point = event.points[0];
      const linkOfX = plot.layout.meta?.linkOfX;
      if (point && linkOfX?.startsWith("/")) location.assign(`${linkOfX}${point.x}`);
    });
  }
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

// Changes `old` into `fresh` node by node: what is equal stays, with its focus, scroll place and open details.
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
  after.forEach((node, place) => {
    if (place < before.length) merge(before[place], node);
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
  const place = rows.indexOf(current);
  select(rows[place < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, place + by))]);
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
