// Shows the state of a context: live from a stream of server-sent events, or once from a report's own data.
// Texts become text nodes only, so none of them can be markup. Nothing here grows with time: the list of events has a
// bound, and every other element is updated in its place.

const MOST_EVENTS = 200;
const STALE_MS = 2500; // a stream that ends by itself is back after half a second
const GRADES = { ready: "good", running: "good", degraded: "warn", starting: "warn", restarting: "warn", draining: "warn",
  stalled: "bad", failed: "bad", stopped: "bad" };
const RANKS = { "": 0, good: 0, warn: 1, bad: 2 };
const SPAN = 300; // seconds, of the plots
const TOLERATED = 0.01; // the share of misses from which on it is amber
const CHARTS = [["latency", "Latency"], ["queue", "Time in the queue"], ["launch", "From launch to answer"],
  ["batch", "Requests a launch"]];

const at = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("data-") || name.startsWith("aria-") || name === "role" || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const count = (number) => Number(number).toLocaleString("en");
const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function duration(seconds) {
  if (seconds < 1e-3) return `${+(seconds * 1e6).toPrecision(3)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  return seconds < 120 ? `${+seconds.toPrecision(3)} s` : `${Math.round(seconds / 60)} min`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (bytes >= 1024 && step < units.length - 1) { bytes /= 1024; step += 1; }
  return `${+bytes.toPrecision(3)} ${units[step]}`;
}

// The state. Of a pool it has a part for each worker; of one context it is that part itself.

let state = null;
const parts = () => state.workers ?? [state];
let drawing = false;

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; if (state) show(); });
}

function show() {
  const devices = parts().map(({ device }) => `${device.name} · ${device.arch}${device.memory ? ` · ${size(device.memory)}` : ""}`);
  say(at("version"), state.version);
  say(at("device"), [...new Set(devices), state.workers ? workersReady() : `generation ${state.generation}`].join(" · "));
  showVerdict();
  showClients();
  showNumbers();
  showTree();
  showCharts();
  showCaches();
  showKernels();
}

const workersReady = () => `${state.workers.filter(({ verdict }) => verdict.ready).length} of ${state.workers.length} workers ready`;

// Where nothing is taken that is red, unless the server begins or ends as it should.
function gradeOf(verdict) {
  const planned = ["starting", "draining"].includes(verdict.state);
  return verdict.ready || planned ? GRADES[verdict.state] ?? "unknown" : "bad";
}

let broken = false;
let age = 0;

function showVerdict() {
  const { verdict } = state;
  const health = gradeOf(verdict);
  const clients = state.clients?.state ?? { grade: "", title: "", reason: "" };
  const worse = !broken && RANKS[clients.grade] > RANKS[health];
  const grade = broken ? "unknown" : worse ? clients.grade : health;
  const title = broken ? "Unknown" : worse ? clients.title : capital(verdict.state);
  let reason = verdict.reason || (grade === "good" ? "Requests are answered." : "");
  if (!verdict.ready) reason = `No requests are taken: ${reason}`;
  if (verdict.state === "draining") reason = `What was accepted is answered: ${verdict.reason}`;
  if (broken) reason = `The stream is broken. The last state was ${verdict.state}, ${age} s ago${verdict.reason ? `: ${verdict.reason}` : "."}`;
  mark(at("verdict"), "data-state", grade);
  say(at("state"), title);
  say(at("reason"), reason);
  say(at("shares"), clients.reason);
  at("shares").hidden = broken || !clients.reason;
  document.title = `${title} · gpu_actors`;
  mark(at("root-state"), "data-state", broken ? "unknown" : health);
  say(at("root-state"), broken ? "unknown" : verdict.state);
  say(at("root-name"), state.workers ? "pool" : "context");
  say(at("root-text"), state.workers ? workersReady() : `generation ${state.generation}${oldest(state)}`);
}

const oldest = ({ oldest_launch: seconds }) => (seconds ? ` · oldest launch ${duration(seconds)}` : "");
const sum = (items, field) => items.reduce((total, item) => total + item[field], 0);

// Clients

const within = (bound) => (bound === null ? "–" : bound < 0 ? `> ${duration(-bound)}` : `≤ ${duration(bound)}`);
const percent = (share) => `${share && share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)}%`;
const askedOf = ({ answered, refused, deadline, failed }) => answered + refused + deadline + failed;

function showClients() {
  const { clients } = state;
  at("clients").hidden = !clients;
  if (!clients) return;
  const { recent, minute, slots, timed } = clients;
  const asked = askedOf(minute.outcomes);
  const { gone, invalid } = minute.outcomes;
  const aside = [gone ? `${count(gone)} hung up` : "", invalid ? `${count(invalid)} at fault` : ""].filter(Boolean).join(", ");
  const rate = ({ outcomes, seconds }) => outcomes.answered / Math.max(seconds, 1);
  const tiles = [{ title: "Answers a second", value: count(+rate(recent).toPrecision(3)), values: slots.map(rate), least: 1,
    note: `${count(minute.outcomes.answered)} in the last minute${aside && `; ${aside}`}`, show: (most) => count(+most.toPrecision(3)) }];
  for (const [outcome, title] of [["refused", "Refused with 429"], ["deadline", "Deadlines missed"], ["failed", "Failed"]]) {
    const number = minute.outcomes[outcome];
    const share = asked ? number / asked : 0;
    const cut = number > minute.late ? `, ${count(number - minute.late)} cut` : "";
    const how = outcome === "deadline" && number ? `; ${count(minute.late)} got 504${cut}` : "";
    const none = "no request in the last minute";
    tiles.push({ title, value: asked ? percent(share) : "–", grade: share >= 0.5 ? "bad" : share > TOLERATED ? "warn" : "", note: asked ? `${count(number)} of ${count(asked)}${how}` : none,
      values: slots.map(({ outcomes }) => outcomes[outcome] / Math.max(1, askedOf(outcomes))), least: TOLERATED, show: percent });
  }
  for (const [name, { count: number, half, most }] of Object.entries(timed)) {
    tiles.push({ title: capital(name), value: within(most), values: slots.map((slot) => slot.timed[name]), least: 0, show: duration,
      note: number ? `99% of ${count(number)}; median ${within(half)}` : "none in the last minute" });
  }
  keyed(at("tiles"), tiles.map(({ title }) => title), () => at("tile").content.firstElementChild.cloneNode(true), (node, _, index) => showTile(node, tiles[index], slots));
  showRoutes(clients.routes);
}

// A bar a slot, at its time. Where nothing was measured there is none.
function showTile(node, { title, value, note, grade, values, least, show }, slots) {
  const [caption, figure, text, plot] = node.children;
  say(caption, title);
  say(figure, value);
  say(text, note);
  mark(figure, "data-state", grade ?? "");
  mark(node, "data-state", grade ?? "");
  const sizes = values.map((each) => Math.abs(each ?? 0));
  const most = Math.max(least, ...sizes);
  const [scale, svg] = plot.children;
  say(scale.firstChild, most ? show(most) : "");
  const x = (ago) => (SPAN - ago).toFixed(1);
  const bars = slots.map(({ ago, seconds }, index) => (sizes[index] && most ? `M${x(ago + seconds)} 100V${(100 - 97 * sizes[index] / most).toFixed(1)}H${x(ago)}V100Z` : ""));
  mark(svg.firstChild, "d", bars.join(""));
  mark(svg, "aria-label", `${title} over the last 5 minutes: now ${value}${sizes.some(Boolean) ? `, at most ${show(most)}` : ""}`);
}

function showRoutes(routes) {
  at("routes-table").hidden = at("tiles").hidden = !routes.length;
  at("unasked").hidden = Boolean(routes.length);
  const titles = ["", "Answered", "Invalid", "429", "Late", "Failed", "Gone", "99% take"];
  keyed(at("routes"), routes.map(({ route }) => route), () => make("tr", {}, ...titles.map((title, index) => make("td", index ? { className: "n", "data-name": title } : {}))), (node, _, index) => {
    const { route, outcomes, seconds } = routes[index];
    const { answered, invalid, refused, deadline, failed, gone } = outcomes;
    const cells = [route, ...[answered, invalid, refused, deadline, failed, gone].map(count), within(seconds.most)];
    cells.forEach((text, place) => say(node.children[place], text));
  });
}

function showNumbers() {
  const actors = parts().flatMap((part) => part.actors);
  const all = (field) => sum(actors, field);
  const rate = sum(parts().map(({ history }) => history), "rate");
  const entries = [
    ...Object.entries(state.numbers).map(([name, value]) => [name, count(value)]),
    ["up", duration(state.time - state.since)],
    ["answers of actors a second", String(+rate.toPrecision(3))],
    ["waiting for actors", count(all("queued"))], ["launches in flight", count(all("in_flight"))],
    ["completed", count(all("completed"))], ["failed", count(all("failed"))], ["cancelled", count(all("cancelled"))],
    ["restarts", count(all("restarts") + (state.workers ? sum(state.workers, "restarts") : 0))],
  ];
  keyed(at("numbers"), entries.map(([name]) => name), () => make("div", {}, make("dt"), make("dd")), (node, name, index) => {
    say(node.firstChild, name);
    say(node.lastChild, entries[index][1]);
  });
}

// Keeps one child a key, in order, and updates it, so that focus and opened details stay.
function keyed(parent, keys, create, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, index) => {
    let node = kept.get(key);
    if (node) kept.delete(key);
    else { node = create(key); node.dataset.key = key; }
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    update(node, key, index);
  });
  for (const node of kept.values()) node.remove();
}

function showTree() {
  if (state.workers) keyed(at("actors"), state.workers.map(({ name }) => name), makeWorker, (node, _, index) => showWorker(node, state.workers[index]));
  else showActors(at("actors"), state);
}

function makeRow(...inside) {
  const meter = make("span", { className: "meter" }, make("i"));
  meter.setAttribute("aria-hidden", "true");
  return make("li", {}, make("details", {}, make("summary", {}, make("span", { className: "name" }),
    make("span", { className: "badge" }), meter, make("span", { className: "dim" })), ...inside));
}

const makeWorker = () => makeRow(make("p", { className: "why" }), make("dl", { className: "facts" }), make("ul", { className: "branch" }));

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function showWorker(node, worker) {
  const [summary, why, facts, actors] = node.firstChild.children;
  const { verdict, caches } = worker;
  const [flying, room, queued] = ["in_flight", "max_in_flight", "queued"].map((field) => sum(worker.actors, field));
  const pages = caches?.length ? `${count(sum(caches, "pages") - sum(caches, "free"))} of ${count(sum(caches, "pages"))} pages` : "";
  const told = [`generation ${worker.generation}`, worker.restarts ? plural(worker.restarts, "restart") : "",
    `${flying}/${room} in flight`, `${count(queued)} waiting`, pages];
  showRow(summary, worker.name, gradeOf(verdict), verdict.state, flying / room, told.filter(Boolean).join(" · "));
  say(why, verdict.reason);
  why.hidden = !verdict.reason;
  showFacts(facts, [["Process", worker.pid === null ? "none now" : String(worker.pid)],
    ["Requests", account(["submitted", "completed", "failed", "cancelled"].map((field) => sum(worker.actors, field)))],
    ["Answers a second", String(+worker.history.rate.toPrecision(3))]]);
  showActors(actors, worker);
}

function showRow(summary, title, grade, state, full, told) {
  const [name, badge, meter, text] = summary.children;
  say(name, title);
  mark(badge, "data-state", grade);
  say(badge, state);
  meter.firstChild.style.width = `${Math.min(100, 100 * full)}%`;
  mark(meter, "data-full", String(full >= 1));
  say(text, told);
}

function showFacts(list, facts) {
  keyed(list, facts.flatMap(([fact]) => [`t ${fact}`, `d ${fact}`]),
    (key) => make(key.startsWith("t") ? "dt" : "dd"),
    (cell, key, place) => say(cell, facts[place >> 1][key.startsWith("t") ? 0 : 1]));
}

const account = ([taken, ...rest]) => `${count(taken)} taken in, ${count(rest[0])} completed, ${count(rest[1])} failed, ${count(rest[2])} cancelled`;

function showActors(list, part) {
  keyed(list, part.actors.map((actor) => actor.name), () => makeRow(make("dl", { className: "facts" })), (node, _, index) => {
    const actor = part.actors[index];
    let grade = GRADES[actor.state] ?? "unknown";
    if (grade === "bad" && !actor.vital) grade = "warn";
    if (grade === "good" && actor.failures) grade = "warn";
    const refuses = grade === "good" && ["failed", "stopped"].includes(part.verdict.state);
    if (refuses) grade = "unknown"; // its thread runs, but the context answers nothing
    const parts = [`${actor.in_flight}/${actor.max_in_flight} in flight`, `${count(actor.queued)} waiting`];
    if (actor.restarts) parts.push(plural(actor.restarts, "restart"));
    if (actor.busy_seconds > 1) parts.push(`busy for ${duration(actor.busy_seconds)}`);
    const badge = refuses ? "refuses requests" : actor.failures && actor.state === "running" ? `running, ${actor.failures} failed in a row` : actor.state;
    const [summary, facts] = node.firstChild.children;
    showRow(summary, actor.name, grade, badge, actor.in_flight / actor.max_in_flight, parts.join(" · "));
    showFacts(facts, [["Requests", account([actor.submitted, actor.completed, actor.failed, actor.cancelled])],
      ["Launches", `${count(actor.launched)}, ${actor.requests_per_launch} requests each`],
      ["Queue", `${count(actor.queued)} of ${count(actor.capacity)}`], ["Restarts", String(actor.restarts)],
      ["Without it", actor.vital ? "the context fails" : "the context goes on"],
      ...Object.entries(actor.errors).map(([error, number]) => [error, count(number)])]);
  });
}

// Histograms

function choices(picker, names) {
  keyed(picker, ["", ...names], (key) => make("option", { value: key }), (node, key) => say(node, key || "all"));
}

function showCharts() {
  const chosen = document.querySelector("input[name=window]:checked").value;
  const [home, picker] = [at("worker"), at("actor")];
  at("workers").hidden = !state.workers;
  choices(home, (state.workers ?? []).map(({ name }) => name));
  choices(picker, parts()[0].actors.map(({ name }) => name));
  const shown = parts().filter(({ name }) => !home.value || name === home.value);
  const { bounds } = shown[0].history;
  const windows = shown.map(({ history }) => history.windows[chosen]);
  const seconds = Math.max(...windows.map((window) => window.seconds));
  say(at("window-note"), seconds + 1 < Number(chosen) ? `${duration(seconds)} so far` : "");
  keyed(at("charts"), CHARTS.map(([kind]) => kind), () => make("figure", {}, make("figcaption", {}, make("b"), make("span", { className: "dim" })),
    make("div", { className: "bars", role: "img" }), make("div", { className: "axis", "aria-hidden": "true" })), (node, kind, index) => {
    const edges = bounds[kind];
    const sums = new Array(edges.length + 1).fill(0);
    for (const [name, kinds] of windows.flatMap(({ actors }) => Object.entries(actors))) {
      if (picker.value && picker.value !== name) continue;
      kinds[kind].forEach((number, bucket) => { sums[bucket] += number; });
    }
    const unit = kind === "batch" ? String : duration;
    const total = sums.reduce((sum, number) => sum + number, 0);
    const bound = (bucket) => (bucket < edges.length ? `≤ ${unit(edges[bucket])}` : `> ${unit(edges[edges.length - 1])}`);
    const boundOf = (share) => {
      let seen = 0;
      return bound(sums.findIndex((number) => (seen += number) >= share * total));
    };
    const [title, summary] = node.firstChild.children;
    const name = CHARTS[index][1];
    const text = total ? `${count(total)} · median ${boundOf(0.5)} · 99% ${boundOf(0.99)}` : "none";
    say(title, name);
    say(summary, text);
    const bars = node.children[1];
    mark(bars, "aria-label", `${name}: ${text}`);
    const most = Math.max(1, ...sums);
    keyed(bars, sums.map((_, bucket) => String(bucket)), () => make("i"), (bar, _, bucket) => {
      bar.style.height = sums[bucket] ? `${Math.max(2, 100 * sums[bucket] / most)}%` : "0";
      bar.title = `${bound(bucket)}: ${count(sums[bucket])}`;
    });
    const ticks = [0, Math.floor(edges.length / 2), edges.length - 1];
    keyed(node.lastChild, ticks.map(String), () => make("span"), (tick, _, place) => say(tick, bound(ticks[place])));
  });
}

// Pages

function showCaches() {
  const found = parts().flatMap(({ name, caches }) => caches?.map((cache) => ({ cache, named: name ? `${name}, cache` : "Cache", key: `${name} ${cache.number}` }))
    ?? [{ key: `${name} none`, why: name ? `The process of ${name} does not answer.` : "The context's process does not answer." }]);
  at("kv-legend").hidden = !found.some(({ cache }) => cache);
  const list = found.length ? found : [{ key: "none", why: "No cache is open." }];
  keyed(at("caches"), list.map(({ key }) => key), () => make("div", {}, make("p", { className: "dim" }), make("canvas", { role: "img" })),
    (node, _, index) => {
      const [text, canvas] = node.children;
      const { cache, named, why } = list[index];
      canvas.hidden = !cache;
      if (!cache) { say(text, why); return; }
      const read = cache.pages - cache.free - cache.kept - cache.shared;
      const cells = cache.map.per_cell > 1 ? ` · a cell is ${cache.map.per_cell} pages` : "";
      const told = `${named} ${cache.number}: ${count(cache.pages)} pages of ${cache.page_size} tokens, ${cache.dtype}, ${cache.kv_heads} × ${cache.head_dim} · ${count(read)} used, ${count(cache.shared)} shared, ${count(cache.kept)} kept, ${count(cache.free)} free · ${count(cache.sequences)} sequences${cells}`;
      say(text, told);
      mark(canvas, "aria-label", told);
      paint(canvas, cache.map);
    });
}

function paint(canvas, map) {
  const width = canvas.clientWidth;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const drawn = [width, dark, map.used, map.shared, map.kept].join();
  if (!width || canvas.drawn === drawn) return;
  canvas.drawn = drawn;
  const cells = map.used.length;
  const step = cells > 256 ? 11 : 15;
  const columns = Math.max(1, Math.floor(width / step));
  const ratio = devicePixelRatio || 1;
  const height = Math.ceil(cells / columns) * step;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colours = ["kept", "used", "shared"].map((kind) => [style.getPropertyValue(`--${kind}`), map[kind]]);
  const ground = style.getPropertyValue("--free");
  for (let cell = 0; cell < cells; cell += 1) {
    const x = (cell % columns) * step;
    let y = Math.floor(cell / columns) * step;
    const side = step - 2;
    brush.fillStyle = ground;
    brush.fillRect(x, y, side, side);
    for (const [colour, digits] of colours) { // stacked, so that a cell of several pages shows each kind by its share
      const part = Math.min(1, Number(digits[cell]) / 9) * side;
      brush.fillStyle = colour;
      brush.fillRect(x, y, side, part);
      y += part;
    }
  }
}

// Kernels

let kernelsShown = "";

// Workers run the same kernels: one row says how often all of them asked. Null where no process answers.
function allKernels() {
  const known = parts().map(({ kernels }) => kernels).filter(Boolean);
  if (!known.length) return null;
  const merged = new Map();
  for (const kernel of known.flat()) {
    const key = JSON.stringify([kernel.name, kernel.arch, kernel.digest]);
    const same = merged.get(key);
    if (!same) { merged.set(key, { ...kernel }); continue; }
    same.asked += kernel.asked;
    if (!same.source.includes(kernel.source)) same.source += `, ${kernel.source}`;
  }
  return [...merged.values()];
}

// Each process counts for itself, and all have one folder.
function allCubins() {
  const known = parts().map(({ cubins }) => cubins).filter(({ hits }) => hits !== undefined);
  if (!known.length) return {};
  const counts = ["hits", "misses", "compiles", "corrupt"].map((field) => [field, sum(known, field)]);
  const folder = ["entries", "bytes"].map((field) => [field, Math.max(...known.map((one) => one[field]))]);
  return Object.fromEntries([...counts, ...folder]);
}

function showKernels() {
  const kernels = allKernels();
  const cubins = allCubins();
  say(at("cubins"), cubins.hits === undefined ? "" : `Cubin cache: ${count(cubins.hits)} hits, ${count(cubins.misses)} misses, ${count(cubins.compiles)} compiled, ${count(cubins.corrupt)} damaged · ${count(cubins.entries)} entries, ${size(cubins.bytes)}`);
  const key = JSON.stringify(kernels);
  if (key === kernelsShown) return;
  kernelsShown = key;
  const cell = (name, text, number) => make("td", { className: number ? "n" : "", "data-name": name, textContent: text ?? "–" });
  const rows = (kernels ?? []).map((kernel) => {
    const macros = Object.entries(kernel.macros).map(([name, value]) => `${name}=${value}`).join(" ");
    const name = make("td", {}, make("details", {}, make("summary", { textContent: `${kernel.name} ${kernel.digest}` }),
      make("span", { className: "dim", textContent: macros || "no macros" })));
    return make("tr", {}, name, cell("Arch", kernel.arch), cell("Registers", kernel.registers, true),
      cell("Shared", kernel.shared_bytes === null ? null : size(kernel.shared_bytes), true),
      cell("Spills", kernel.spill_bytes === null ? null : size(kernel.spill_bytes), true), cell("From", kernel.source), cell("Asked", count(kernel.asked), true));
  });
  if (!rows.length) {
    const why = kernels === null ? "The context's process does not answer."
      : parts()[0].runs_kernels ? "No kernel was asked for yet." : "This device computes without kernels.";
    const only = make("td", { textContent: why, colSpan: 7, className: "dim" });
    rows.push(make("tr", {}, only));
  }
  at("kernels").replaceChildren(...rows);
}

// Events

let boot = "";
let newest = 0;
let missed = 0;
let paused = false;
let held = [];

function happened(told) {
  if (told.boot !== boot) { // another process
    boot = told.boot;
    newest = 0;
  }
  missed += told.missed;
  const items = told.items.filter((item) => item.number > newest);
  if (items.length) newest = items[items.length - 1].number;
  held = [...held, ...items].slice(-MOST_EVENTS);
  if (paused) say(at("pause"), `Resume (${held.length})`);
  else showEvents();
}

function showEvents() {
  const list = at("events");
  for (const { time, name, level, fields } of held) {
    const { worker, actor, error, reason, ...rest } = fields;
    const others = Object.entries(rest).map(([field, value]) => `${field} ${value}`).join(", ");
    const text = [worker, actor, others, reason, error].filter(Boolean).join(" · ");
    const stamp = make("time", { dateTime: new Date(time * 1000).toISOString(), textContent: clockTime(time) });
    list.prepend(make("li", { "data-level": level }, stamp, " ", make("b", { textContent: name }), ` ${text}`));
  }
  held = [];
  while (list.children.length > MOST_EVENTS) list.lastChild.remove();
  const more = missed ? ` ${count(missed)} others came too fast to be shown.` : "";
  say(at("events-note"), list.children.length ? `The latest ${list.children.length}, newest first.${more}` : "None yet.");
}

// The stream

let arrived = performance.now();
let source = null;

function listen() {
  source = new EventSource(`status/events?last=${encodeURIComponent(boot ? `${boot}.${newest}` : "")}`);
  source.addEventListener("state", (event) => {
    arrived = performance.now();
    state = JSON.parse(event.data);
    watch();
    draw();
  });
  source.addEventListener("happened", (event) => happened(JSON.parse(event.data)));
}

function watch() {
  const waited = performance.now() - arrived;
  const was = broken;
  broken = waited > STALE_MS;
  age = Math.round(waited / 1000);
  document.body.dataset.stream = broken ? "broken" : state ? "live" : "opening";
  say(at("stream-text"), broken ? `stream broken, no news for ${age} s` : state ? "live" : "connecting");
  if (broken && source.readyState === EventSource.CLOSED) listen(); // a refusal ends a stream for good
  if (state && (broken || was)) showVerdict();
  if (!state && broken) say(at("reason"), "The server does not answer.");
}

function control() {
  at("pause").addEventListener("click", () => {
    paused = !paused;
    mark(at("pause"), "aria-pressed", String(paused));
    say(at("pause"), paused ? "Resume" : "Pause");
    if (!paused) showEvents();
  });
  at("window").addEventListener("change", draw);
  at("actor").addEventListener("change", draw);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

control();
const given = at("snapshot");
if (given) {
  state = JSON.parse(given.textContent);
  document.body.dataset.stream = "report";
  say(at("stream-text"), `a report of ${new Date(state.time * 1000).toLocaleString("en-GB")}, not live`);
  at("pause").hidden = true;
  happened({ boot: "report", items: state.events ?? [], missed: 0 });
  show();
} else {
  listen();
  setInterval(watch, 250);
}
