// Renders the states that the daemon streams. Text from a state is always inserted as text, never as HTML.

import { Chart } from "./chart.js";
import { bytes, count, duration, endurance, perSecond, plain, rate, share, whole } from "./units.js";

const KEY = "infinity.token";
const SILENT_MS = 15000; // the daemon sends a message every 5 s; after 15 s without a message, the connection is considered dead
const RETRY_MS = [1000, 2000, 4000, 8000];

const PARTS = {
  compute: ["computation", "c1"],
  update: ["optimizer", "c2"],
  copy: ["copies", "c3"],
  collective: ["collectives", "c4"],
  read_stall: ["read stalls", "s1"],
  write_stall: ["write stalls", "s2"],
  host_cache_stall: ["host cache stalls", "s3"],
  python: ["training loop", "c5"],
};
const ROLES = {
  param: ["weights", "c1"],
  update: ["master weights and moments", "c4"],
  grad: ["gradients", "s2-plain"],
  activation: ["activations", "c3"],
};
const STATUSES = { live: ["running", "good"], ended: ["ended", ""], dead: ["died", "bad"] };

// Elements #

const byId = (id) => document.getElementById(id);

/** Create an element. For example, the kind "dl.figures" is a dl element with the class "figures". */
function make(kind, attributes = {}, ...children) {
  const [name, ...classes] = kind.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Set the text of an element only if it differs, so that selected text stays selected. */
function put(element, text) {
  const shown = String(text);
  if (element.textContent !== shown) element.textContent = shown;
}

function badge(element, text, kind) {
  put(element, text);
  element.className = kind ? `badge ${kind}` : "badge";
}

/**
 * Give the parent one child per item, in order, and update each child with its item. Children are reused if their items
 * remain, which preserves focus and scroll position.
 */
function keep(parent, items, keyOf, build) {
  parent.views ??= new Map();
  const seen = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let view = parent.views.get(key);
    if (!view) parent.views.set(key, (view = build(item)));
    if (view.element === at) at = at.nextElementSibling;
    else parent.insertBefore(view.element, at);
    view.show(item);
  }
  for (const [key, view] of parent.views) {
    if (!seen.has(key)) {
      view.element.remove();
      parent.views.delete(key);
    }
  }
}

/** List of figures; unknown ones are hidden. A field is [name, value formatter, detail formatter]. */
class Figures {
  constructor(fields) {
    this.fields = fields.map(([name, show, beside]) => {
      const value = make("dd");
      const more = make("dd.muted");
      return { show, beside, value, more, group: make("div", {}, make("dt", {}, name), value, more) };
    });
    this.element = make("dl.figures", {}, ...this.fields.map(({ group }) => group));
  }

  show(item) {
    for (const { show, beside, value, more, group } of this.fields) {
      const text = show(item);
      group.hidden = text === undefined;
      put(value, text ?? "");
      put(more, beside(item) ?? "");
    }
  }
}

/** Stacked bar with a legend that lists the values. */
class Shares {
  constructor(title, names) {
    this.names = names;
    this.bar = make("div.bar", { "aria-hidden": "true" });
    this.legend = make("dl.legend");
    this.element = make("div", {}, (this.title = make("h4", {}, title)), this.bar, this.legend);
    this.parts = {};
    for (const [key, [name, color]] of Object.entries(names)) {
      const piece = make(`i.${color}`);
      const value = make("dd");
      this.bar.append(piece);
      this.legend.append(
        make("div", {}, make("dt", {}, make(`span.swatch.${color}`, { "aria-hidden": "true" }), name), value),
      );
      this.parts[key] = { piece, value };
    }
  }

  /** Show values, formatted with `format`. The full width of the bar corresponds to `whole`. */
  show(values, whole, format) {
    this.element.hidden = !values;
    if (!values) return;
    for (const [key, { piece, value }] of Object.entries(this.parts)) {
      piece.style.width = width(values[key], whole);
      put(value, format(values[key]));
    }
  }
}

function width(value, whole) {
  const percent = whole > 0 ? (100 * value) / whole : 0;
  return `${Number.isFinite(percent) ? Math.min(100, Math.max(0, percent)).toFixed(2) : 0}%`;
}

/** Table with one row per item. A column is [name, formatter, class]; the first column is the row header. */
class Table {
  constructor(title, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.body = make("tbody");
    const names = columns.map(([name, , kind]) => make(kind ? `th.${kind}` : "th", { scope: "col" }, name));
    const table = make("table", {}, make("caption", {}, title), make("thead", {}, make("tr", {}, ...names)), this.body);
    // Focusable, so that it can be scrolled with the keyboard.
    this.element = make("div.scroll", { tabindex: "0", role: "region", "aria-label": title }, table);
  }

  show(items) {
    keep(this.body, items, this.keyOf, () => {
      const cells = this.columns.map(([, , kind], at) => {
        const name = at ? "td" : "th";
        return make(kind ? `${name}.${kind}` : name, at ? {} : { scope: "row" });
      });
      return {
        element: make("tr", {}, ...cells),
        show: (item) => this.columns.forEach(([, show], at) => put(cells[at], show(item) ?? "–")),
      };
    });
  }
}

const ifKnown = (value, format) => (value === undefined ? undefined : format(value));

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

let named = 0; // number of assigned ids

/** Assign a unique id to an element. Ids never contain names from a state. */
function identified(element) {
  named += 1;
  element.id = `title-${named}`;
  return element;
}

// A run #

class RunView {
  constructor(run) {
    this.name = identified(make("h3", {}, run.name));
    this.badge = make("span.badge");
    this.about = make("span.muted");
    this.nodes = make("ul.nodes", { "aria-label": `Other nodes of ${run.name}` });
    this.notices = make("ul.notices");
    this.now = 0; // Unix time of the current state
    const since = (time) => ifKnown(time, (then) => `${whole(this.now - then)} ago`);
    this.figures = new Figures([
      ["Tokens per second", (r) => ifKnown(r.tokens_per_second, perSecond),
        (r) => ifKnown(r.tokens, (tokens) => `${count(tokens)} in total`)],
      ["Loss", (r) => ifKnown(r.loss, plain),
        (r) => ifKnown(r.gradient_norm, (norm) => `gradient norm ${plain(norm, 3)}`)],
      ["Steps", (r) => (r.target_steps ? `${count(r.steps)} of ${count(r.target_steps)}` : count(r.steps)),
        (r) => ifKnown(since(r.last_step), (ago) => `last ended ${ago}`)],
      ["Remaining time", (r) => ifKnown(r.remaining_seconds, whole), () => "at the current step time"],
      ["Step time", (r) => ifKnown(r.step_seconds, duration),
        (r) => ifKnown(r.stalled, (stalled) => `${share(stalled)} stalled on storage`)],
      ["Read", (r) => ifKnown(r.io.read, rate),
        (r) => ifKnown(r.io.read_per_step, (size) => `${bytes(size)} per step`)],
      ["Written", (r) => ifKnown(r.io.write, rate),
        (r) => ifKnown(r.io.written_per_step, (size) => `${bytes(size)} per step`)],
      ["Last checkpoint", (r) => since(r.checkpoint.last) ?? "none yet",
        (r) => (r.checkpoint.count ? `${count(r.checkpoint.count)} in total, ${duration(r.checkpoint.seconds)} each` : undefined)],
      ["Learning rate", (r) => ifKnown(r.learning_rate, (value) => plain(value, 3)),
        (r) => (r.steps_skipped ? `${plural(r.steps_skipped, "step")} skipped` : undefined)],
    ]);
    this.loss = new Chart("Loss by step", (value) => String(Number(value.toPrecision(4))));
    this.speed = new Chart("Tokens per second by step", (value) => short(value), { zero: true });
    this.parts = new Shares("Step time by activity", PARTS);
    this.hostCache = new Shares("Host cache", ROLES);
    this.ready = make("p.aside");
    this.parts.element.append(this.ready);
    this.stored = make("p.aside");
    this.hostCache.element.append(this.stored);
    this.ranks = new Table(
      `Ranks of ${run.name}`,
      [
        ["Rank", (rank) => rank.rank, "words"],
        ["Status", (rank) => STATUSES[rank.status][0], "words"],
        ["Steps", (rank) => count(rank.steps)],
        ["Step time", (rank) => ifKnown(rank.step_seconds, duration)],
        ["Tokens/s", (rank) => ifKnown(rank.tokens_per_second, perSecond)],
        ["Stalled", (rank) => ifKnown(rank.stalled, share)],
        ["Read", (rank) => ifKnown(rank.read, rate)],
        ["Written", (rank) => ifKnown(rank.write, rate)],
        ["Host cache", (rank) => ifKnown(rank.host_cache_used, (used) => `${bytes(used)} of ${bytes(rank.host_cache_capacity)}`)],
        ["Errors", (rank) => count(rank.errors)],
        ["PID", (rank) => rank.pid],
      ],
      (rank) => rank.rank,
    );
    this.element = make(
      "article.card",
      { "aria-labelledby": this.name.id },
      make("div.head", {}, this.name, this.badge, this.about),
      this.nodes,
      this.notices,
      this.figures.element,
      make("div.halves", {}, this.loss.figure, this.speed.figure),
      make("div.halves", {}, this.parts.element, this.hostCache.element),
      this.ranks.element,
    );
    this.drawn = "";
  }

  show({ run, now }) {
    this.now = now;
    const [word, kind] = run.idle ? ["idle", "warning"] : STATUSES[run.status];
    badge(this.badge, word, kind);
    const begun = run.status === "live" ? `started ${whole(now - run.started)} ago` : undefined;
    put(this.about, [run.name === run.id ? "" : run.id, run.user, ranksOf(run), begun, run.io_engine, run.version].filter(Boolean).join(" · "));
    // A link exists only if the daemon considers the host safe to link to.
    const nodes = (run.other_hosts ?? []).map((host) => ({ host, page: run.pages?.[host] }));
    keep(this.nodes, nodes, ({ host, page }) => `${host} ${page}`, ({ host, page }) => {
      return { element: make("li", {}, page ? make("a", { href: page }, host) : host), show: () => {} };
    });
    this.nodes.hidden = !nodes.length;
    keep(this.notices, noticesOf(run, now), (notice) => notice, (notice) => {
      return { element: make("li", {}, notice), show: () => {} };
    });
    this.notices.hidden = !this.notices.childElementCount;
    this.figures.show(run);
    this.parts.show(run.parts, 1, share);
    put(this.ready, run.fetches ? `${share(run.fetches.hit)} of page requests found the page ready.` : "");
    this.hostCache.show(run.host_cache?.roles, run.host_cache?.capacity, bytes);
    if (run.host_cache) {
      const used = Object.values(run.host_cache.roles).reduce((sum, size) => sum + size, 0);
      put(this.hostCache.title, `Host cache: ${bytes(used)} of ${bytes(run.host_cache.capacity)} in use`);
      const { param, update, grad } = run.nvme?.roles ?? {};
      const stored = run.nvme && `${bytes(param + update + grad)} of state stored on NVMe (capacity: ${bytes(run.nvme.capacity)}).`;
      const cost = run.tokens && `${bytes(run.io.written_total / run.tokens)} written per token.`;
      put(this.stored, [stored, cost].filter(Boolean).join(" "));
    }
    this.ranks.show(run.ranks);
    const drawn = JSON.stringify(run.history.rows);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      const column = (name) => {
        const at = run.history.columns.indexOf(name);
        return run.history.rows.map((row) => [row[0], row[at] ?? NaN]);
      };
      this.loss.show(column("loss"));
      this.speed.show(column("tokens_per_second"));
    }
  }
}

function short(value) {
  return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
}

function ranksOf(run) {
  if (run.ranks.length === run.world_size) return plural(run.world_size, "rank");
  return `ranks ${spans(run.ranks.map(({ rank }) => rank))} of ${run.world_size} on this node`;
}

/** Format increasing numbers, such as "0–3, 8". */
function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && number === last.at(-1) + 1) last.splice(1, 1, number);
    else found.push([number]);
  }
  return found.map((span) => span.join("–")).join(", ");
}

/** Return the notices to show for a run. */
function noticesOf(run, now) {
  const dead = run.ranks.filter((rank) => rank.status === "dead").map((rank) => rank.rank);
  const slowed = Object.entries(run.limits ?? {}).map(([drive, limit]) => `${drive}: ${rate(limit)} per rank`);
  return [
    dead.length && `${dead.length === 1 ? "Rank" : "Ranks"} ${dead.join(", ")} exited unexpectedly. See the log of the run.`,
    run.idle && "No step has been completed for much longer than the average step time.",
    typeof run.loss === "string" && "The loss is not finite.",
    run.io.errors && `${plural(run.io.errors, "page transfer")} failed after all retries.`,
    run.io.retries && `${plural(run.io.retries, "I/O request")} retried.`,
    run.steps_skipped && `${plural(run.steps_skipped, "step")} skipped because the gradient norm was not finite.`,
    run.plan.divergences && `${plural(run.plan.divergences, "page use")} differed from the plan.`,
    slowed.length && `Bandwidth limited in favor of other runs: ${slowed.join(", ")}.`,
  ].filter(Boolean);
}

// A drive #

class DriveView {
  constructor(drive) {
    const name = identified(make("h3", {}, drive.name));
    this.badge = make("span.badge");
    this.paths = make("span.muted");
    this.facts = make("dl.facts");
    this.lines = {};
    for (const [key, name, color] of [
      ["read", "Reads", "c1"], ["write", "Writes", "c4"], ["runs", "Runs"], ["busy", "Busy"], ["space", "Space", "c5"],
      ["wear", "Wear"], ["pace", "Writes in the last hour"],
    ]) {
      const value = make("dd");
      const line = make("div.line", {}, make("dt", {}, name), value);
      const piece = make(`i.${color}`);
      const held = make("i.c2.held");
      const bar = make("div.bar", { "aria-hidden": "true" }, piece, held);
      const group = make("div", {}, line, ...(color ? [bar] : []));
      this.facts.append(group);
      this.lines[key] = { value, piece, held, bar, group };
    }
    this.element = make(
      "article.card",
      { "aria-labelledby": name.id },
      make("div.head", {}, name, this.badge, this.paths),
      this.facts,
    );
  }

  show({ drive, now }) {
    this.badge.hidden = !drive.error;
    badge(this.badge, drive.error ?? "", "bad");
    put(this.paths, drive.paths.join(", "));
    for (const [op, past] of [["read", "read"], ["write", "write"]]) {
      const best = drive.profile?.[past];
      this.line(op, drive[op], (value) =>
        best === undefined ? `${rate(value)}, not profiled` : `${rate(value)} of ${rate(best)} (${share(value / best)})`);
      const { piece, bar } = this.lines[op];
      bar.hidden = best === undefined;
      piece.style.width = width(drive[op], best);
    }
    const latency = (seconds, what) => ifKnown(seconds, (value) => `${duration(value)} per ${what}`);
    this.line("busy", drive.busy, (busy) =>
      [share(Math.min(1, busy)), latency(drive.read_latency, "read"), latency(drive.write_latency, "write")]
        .filter(Boolean).join(", "));
    this.line("space", drive.capacity, (capacity) => {
      const reserved = drive.reserved ? `, ${bytes(drive.reserved)} reserved` : "";
      return `${bytes(drive.free)} free of ${bytes(capacity)}${reserved}`;
    });
    this.lines.space.piece.style.width = width(drive.capacity - drive.free, drive.capacity);
    this.lines.space.held.style.width = width(drive.reserved, drive.capacity);
    const moved = Object.values(drive.runs);
    const sum = (op) => moved.reduce((all, of) => all + of[op], 0);
    this.line("runs", moved.length || undefined, () => `read ${rate(sum("read"))}, write ${rate(sum("write"))}`);
    const wear = drive.wear ?? {};
    const worn = [
      ifKnown(wear.ratio, (ratio) => `${share(ratio)} of rated life used`),
      ifKnown(wear.days, (days) => `${days < 10 ? whole(86400 * days) : `${count(days)} days`} left at the current write rate`),
      ifKnown(wear.rated, (rated) => `rated for ${endurance(rated)}`),
    ].filter(Boolean);
    this.line("wear", worn.length ? worn : "unknown", (texts) => [texts].flat().join(", "));
    this.line("pace", wear.bytes_per_second, (value) => `${rate(value)}, ${endurance(86400 * value)} per day`);
  }

  line(key, value, format) {
    this.lines[key].group.hidden = value === undefined;
    if (value !== undefined) put(this.lines[key].value, format(value));
  }
}

// The node #

const space = new Table(
  "Space reserved by runs and not yet allocated",
  [
    ["Run", (entry) => entry.run_id, "words"],
    ["User", (entry) => entry.user, "words"],
    ["Drive", (entry) => entry.device, "words"],
    ["Path", (entry) => entry.path, "words"],
    ["Reserved", (entry) => bytes(entry.bytes)],
    ["PID", (entry) => entry.pid || "in another container"],
  ],
  (entry) => JSON.stringify([entry.run_id, entry.path, entry.pid]),
);
byId("space").append(space.element);

let linked = location.hash; // "#" and the id of the run that a link on another node's dashboard refers to

function show(state) {
  const now = state.time;
  const { node } = state;
  byId("state").hidden = false;
  put(byId("host"), node.host);
  document.title = `${node.host} · infinity`;
  put(byId("clock"), new Date(1000 * now).toLocaleTimeString([], { hourCycle: "h23" }));
  byId("no-runs").hidden = state.runs.length > 0;
  keep(byId("runs"), state.runs.map((run) => ({ run, now })), ({ run }) => run.id, ({ run }) => new RunView(run));
  const chosen = state.runs.find((run) => `#${run.id}` === linked);
  if (chosen) {
    byId("runs").views.get(chosen.id).element.scrollIntoView();
    linked = "";
  }
  byId("no-drives").hidden = state.drives.length > 0;
  const late = now - state.drives_time;
  byId("late-drives").hidden = !(late > 5);
  put(byId("late-drives"), "The drives are not responding. Their last known figures are shown.");
  keep(
    byId("drives"),
    state.drives.map((drive) => ({ drive, now })),
    ({ drive }) => drive.name,
    ({ drive }) => new DriveView(drive),
  );
  byId("no-space").hidden = state.reservations.length > 0;
  byId("space").hidden = state.reservations.length === 0;
  space.show(state.reservations);
  const failed = Object.entries(node.collectors).filter(([, well]) => !well).map(([name]) => name);
  const about = [`infinityd ${node.version}`, `up ${whole(now - node.started)}`];
  if (node.broken_stats_files) about.push(`${plural(node.broken_stats_files, "unreadable stats file")} in the runtime folder`);
  if (failed.length) about.push(`failed collectors: ${failed.join(", ")}`);
  put(byId("daemon"), `${about.join(" · ")} · `);
}

// The connection #

const status = byId("status");
let token = sessionStorage.getItem(KEY) ?? "";
let connection = null; // abort controller of the current stream
let failures = 0;
let paused = false;

class NotShown extends Error {}

function ask(wrong) {
  byId("ask").hidden = false;
  byId("ask-wrong").hidden = !wrong;
  byId("state").hidden = true;
  badge(status, "token required", "warning");
  byId("token").focus();
}

/** Read events until the stream ends or no message arrives in time, and show each state. */
async function read(body, abort) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let timer;
  try {
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENT_MS);
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      const states = events.filter((event) => event.startsWith("data: "));
      if (states.length) {
        try {
          show(JSON.parse(states[states.length - 1].slice(6)));
        } catch (error) {
          throw new NotShown("cannot show a state", { cause: error });
        }
        badge(status, "live", "good");
        failures = 0;
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

async function connect() {
  const abort = new AbortController();
  connection = abort;
  byId("links").hidden = Boolean(token);
  byId("forget").hidden = !token;
  let reason = "not connected";
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("api/events", { headers, signal: abort.signal, cache: "no-store" });
    if (answer.status === 401) {
      ask(Boolean(token));
      return;
    }
    byId("ask").hidden = true;
    if (answer.ok) await read(answer.body, abort);
    else if (answer.status === 503) reason = "too many open dashboards";
  } catch (error) {
    if (error instanceof NotShown) {
      badge(status, "display error; reload the page", "bad"); // the daemon has a different version, or this page has a bug
      throw error.cause;
    }
  }
  if (paused || connection !== abort) return;
  badge(status, `${reason}, retrying`, "bad");
  setTimeout(() => connection === abort && connect(), RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  failures += 1;
}

function leave() {
  connection?.abort();
  connection = null;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  connect();
});

byId("forget").addEventListener("click", () => {
  leave();
  token = "";
  sessionStorage.removeItem(KEY);
  connect();
});

byId("pause").addEventListener("click", ({ currentTarget }) => {
  paused = !paused;
  currentTarget.setAttribute("aria-pressed", String(paused));
  leave();
  if (paused) badge(status, "paused", "warning");
  else connect();
});

connect();
