"use strict";
// Sorting and filtering of tables, and the timeline. The rest of the page needs no script.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// ---- tables: a click on a heading sorts, numbers largest first; unknown values stay last

function sortBy(table, heading) {
  const column = [...heading.parentNode.children].indexOf(heading);
  const isNumber = heading.classList.contains("num");
  const first = isNumber ? "descending" : "ascending";
  const other = isNumber ? "ascending" : "descending";
  const order = heading.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  for (const th of heading.parentNode.children) th.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const inOrder = (parts, rowOf) => {
    const keyed = parts.map((part) => {
      const value = rowOf(part).cells[column].dataset.value;
      return { part, value: isNumber && value !== undefined ? Number(value) : value };
    });
    keyed.sort((a, b) => {
      if (a.value === undefined || b.value === undefined) return (a.value === undefined) - (b.value === undefined);
      return sign * (Number(a.value > b.value) - Number(a.value < b.value));
    });
    return keyed.map((one) => one.part);
  };
  const groups = [...table.tBodies]; // each led by its first row, the sum of the others
  table.append(...inOrder(groups, (group) => group.rows[0]));
  for (const group of groups) {
    group.append(...inOrder([...group.rows].filter((row) => !row.classList.contains("sum")), (row) => row));
  }
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortBy(table, button.parentNode));
  }
}

// Groups are folded until they are opened, or a filter finds something in them.
function showCollectives() {
  const words = document.getElementById("filter").value.toLowerCase().trim();
  const onlyExposed = document.getElementById("only-exposed").checked;
  const isWanted = (row) => words.split(/\s+/).every((word) => row.dataset.search.includes(word)) &&
    (!onlyExposed || row.classList.contains("is-exposed"));
  const counts = { found: 0, all: 0 };
  for (const group of document.getElementById("collectives-table").tBodies) {
    const sum = group.querySelector(".sum"), places = [...group.querySelectorAll(".place")];
    const found = places.filter(isWanted);
    const isOpen = words !== "" || onlyExposed || !sum || sum.querySelector("button").ariaExpanded === "true";
    for (const row of places) row.hidden = !isOpen || !found.includes(row);
    if (sum) sum.hidden = found.length === 0;
    counts.found += found.length;
    counts.all += places.length;
  }
  document.getElementById("shown").textContent = `${counts.found} of ${counts.all}`;
}

if (document.getElementById("filter")) {
  document.getElementById("filter").addEventListener("input", showCollectives);
  document.getElementById("only-exposed").addEventListener("change", showCollectives);
  for (const button of document.querySelectorAll("#collectives-table .sum button")) {
    button.addEventListener("click", () => {
      button.ariaExpanded = String(button.ariaExpanded !== "true");
      showCollectives();
    });
  }
}

// ---- timeline

const GAP = 6, TOP = 24, LEAST_LABEL = 96, LEAST_NS = 50, MEMORY = 64, MANY_LANES = 12;
const MEANINGS = { exposed: "exposed: compute waits", bubble: "bubble: a stage waits for others" };

function readableTime(ns) {
  if (ns === 0) return "0";
  for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (ns >= 0.9995 * scale) return `${Number((ns / scale).toPrecision(4))} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

function readableBytes(bytes) {
  const [unit, scale] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024], ["B", 1]].find(([, least]) => bytes >= least);
  return `${(bytes / scale).toFixed(1)} ${unit}`;
}

// Writes a time on the axis with as many digits as distinguish it from its neighbours.
function tickTime(ns, every, end) {
  if (ns === 0) return "0";
  const [unit, scale] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, least]) => end >= least) || ["ns", 1];
  return `${(ns / scale).toFixed(Math.max(0, Math.round(Math.log10(scale)) - Math.floor(Math.log10(every))))} ${unit}`;
}

// Shortens a name to the letters that a bar has room for: first by the role, which its colour shows.
function shortened(name, most) {
  if (name.length <= most) return name;
  const short = name.slice(name.indexOf(" ") + 1);
  return short.length <= most ? short : `${short.slice(0, most - 1)}…`;
}

// Returns the stage of a pipeline that a lane is of: "stage 3 ICI x" -> "3".
function stageOf(lane) { return (/^stage (\d+) /.exec(lane) || [])[1]; }

// The state that panes share: the events, the selected one, and the pane that buttons act on.
class Step {
  constructor(data) {
    this.lanes = data.lanes;
    this.height = data.lanes.length > MANY_LANES ? 20 : 34; // of a lane
    this.tops = [];
    this.foot = TOP; // below the last lane
    data.lanes.forEach((name, lane) => {
      if (lane && stageOf(name) !== stageOf(data.lanes[lane - 1])) this.foot += GAP;
      this.tops.push(this.foot);
      this.foot += this.height + GAP;
    });
    this.events = data.rows.map(([lane, start, length, name, hlo, kind, told, hidden, bytes], index) => ({
      index, lane, start, end: start + length, name: data.names[name], hlo: data.hlo[hlo], kind: data.kinds[kind],
      told: data.arguments[told], hidden, bytes,
    }));
    this.holding = this.events.filter((event) => event.bytes >= 0).sort((a, b) => a.start - b.start);
    this.mostBytes = Math.max(0, ...this.holding.map((event) => event.bytes));
    this.byLane = this.lanes.map((_, lane) => this.events.filter((event) => event.lane === lane));
    this.end = Math.max(1, ...this.events.map((event) => event.end));
    this.selected = null;
    this.isByHlo = false;
    this.panes = [];
    this.active = null;
  }

  title(event) { return this.isByHlo ? event.hlo : event.name; }
  redraw() { for (const pane of this.panes) pane.redraw(); }

  showWhole() {
    for (const pane of this.panes) pane.box.hidden = pane !== this.panes[0];
    this.active = this.panes[0];
    this.active.show(0, this.end);
  }

  showViews() {
    for (const pane of this.panes) { pane.box.hidden = false; pane.show(pane.view.from, pane.view.to); }
  }
}

// A stretch of the step. view: the range that it shows at first, with its name. The first pane names the lanes.
class Pane {
  constructor(step, view, detail) {
    this.step = step;
    this.view = view;
    this.detail = detail;
    this.box = document.createElement("div");
    this.box.className = "pane";
    this.box.style.flexGrow = String(view.to - view.from);
    this.chart = document.createElement("div");
    this.chart.className = "lanes";
    this.chart.tabIndex = 0;
    this.chart.setAttribute("role", "group");
    this.chart.setAttribute("aria-label", `Timeline${view.name ? ` of ${view.name}` : ""}: arrow keys move, plus and ` +
      "minus zoom, n and p step through events, e goes to the longest exposed one, then to the next");
    this.caption = document.createElement("p");
    this.caption.className = "dim";
    this.box.append(this.caption, this.chart);
    const isFirst = step.panes.length === 0;
    this.label = isFirst ? Math.max(LEAST_LABEL, ...step.lanes.map((name) => 7 * name.length + 6)) : 0;
    [this.from, this.to] = [view.from, view.to];
    step.panes.push(this);
    this.isDue = false;
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.chart);
  }

  redraw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => { this.isDue = false; this.draw(); });
  }

  get width() { return Math.max(this.label ? 240 : 120, this.chart.clientWidth || 1000); }
  x(ns) { return this.label + ((ns - this.from) / (this.to - this.from)) * (this.width - this.label); }
  ns(x) { return this.from + ((x - this.label) / (this.width - this.label)) * (this.to - this.from); }

  show(from, to) {
    const length = Math.min(this.step.end, Math.max(LEAST_NS, to - from));
    this.from = Math.max(0, Math.min(from, this.step.end - length));
    this.to = this.from + length;
    this.redraw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  select(event, isInView) {
    this.step.selected = event;
    const hidden = event.hidden < 0 ? "" : `, ${readableTime(event.hidden)} of it hidden`;
    const text = `${event.kind} on ${this.step.lanes[event.lane]}, from ${readableTime(event.start)}, for ` +
      `${readableTime(event.end - event.start)}${hidden}` +
      `${event.bytes < 0 ? "" : ` · ${readableBytes(event.bytes)} of memory in use`}${event.told ? ` · ${event.told}` : ""}` +
      `${event.hlo === event.name ? "" : ` · HLO ${event.hlo}`}`;
    const name = document.createElement("b");
    name.textContent = event.name;
    this.detail.replaceChildren(name, ` ${text}`);
    if (isInView) {
      const length = Math.min(this.to - this.from, Math.max(40 * (event.end - event.start), LEAST_NS));
      const middle = (event.start + event.end) / 2;
      const isSeen = event.start >= this.from && event.end <= this.to && this.x(event.end) - this.x(event.start) >= 3;
      if (!isSeen) this.show(middle - length / 2, middle + length / 2);
    }
    this.step.redraw();
  }

  walk(by) {
    const { selected, byLane } = this.step;
    const lane = byLane[selected ? selected.lane : 0];
    const first = lane.findIndex((event) => event.end > this.from);
    const at = selected ? lane.indexOf(selected) + by : first;
    if (lane[at]) this.select(lane[at], true);
  }

  nextExposed() {
    const length = (event) => event.end - event.start;
    const exposed = this.step.events.filter((event) => event.kind === "exposed").sort((a, b) => length(b) - length(a));
    const next = exposed[exposed.indexOf(this.step.selected) + 1] || exposed[0];
    if (next) this.select(next, true);
    else this.detail.textContent = "No event of this step is exposed.";
  }

  listen() {
    const keys = {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.step.showWhole(),
      Home: () => this.step.showWhole(), n: () => this.walk(1), p: () => this.walk(-1), e: () => this.nextExposed(),
    };
    this.chart.addEventListener("keydown", (press) => {
      if (!keys[press.key] || press.ctrlKey || press.metaKey || press.altKey) return;
      press.preventDefault();
      keys[press.key]();
    });
    for (const kind of ["focusin", "pointerdown"]) {
      this.chart.addEventListener(kind, () => { this.step.active = this; });
    }
    const left = () => this.chart.getBoundingClientRect().left;
    this.chart.addEventListener("wheel", (turn) => {
      const isAcross = Math.abs(turn.deltaX) > Math.abs(turn.deltaY);
      if (!turn.ctrlKey && !isAcross) return; // the page scrolls
      turn.preventDefault();
      if (isAcross) this.move(turn.deltaX / this.width);
      else this.zoom(Math.exp(turn.deltaY / 200), this.ns(turn.clientX - left()));
    }, { passive: false });
    this.chart.addEventListener("dblclick", (click) => this.zoom(0.4, this.ns(click.clientX - left())));
    this.listenToDrags();
  }

  listenToDrags() {
    let held = null;
    this.chart.addEventListener("pointerdown", (press) => { held = { x: press.clientX, from: this.from, to: this.to }; });
    window.addEventListener("pointermove", (move) => {
      if (!held || Math.abs(move.clientX - held.x) < 3) return;
      this.chart.classList.add("is-dragged");
      const by = ((held.x - move.clientX) / (this.width - this.label)) * (held.to - held.from);
      this.show(held.from + by, held.to + by);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      window.addEventListener(end, () => { held = null; this.chart.classList.remove("is-dragged"); });
    }
    for (const kind of ["pointerover", "click"]) {
      this.chart.addEventListener(kind, (over) => {
        const index = over.target.dataset && over.target.dataset.index;
        if (index !== undefined && !held) this.select(this.step.events[Number(index)], false);
      });
    }
  }

  draw() {
    const { lanes, tops, foot } = this.step;
    const height = foot + (this.step.mostBytes ? MEMORY + GAP : 0);
    const svg = make("svg", { viewBox: `0 0 ${this.width} ${height}`, height, "aria-hidden": "true" });
    this.drawTicks(svg, height);
    lanes.forEach((_, lane) => this.drawLane(svg, lane));
    if (this.step.mostBytes) this.drawMemory(svg, foot);
    if (this.label) {
      svg.append(make("rect", { class: "margin", x: 0, y: 0, width: this.label - 2, height, fill: "var(--card)" }));
      lanes.forEach((name, lane) => {
        svg.append(make("text", { x: 0, y: tops[lane] + this.step.height / 2 + 4 }, name));
      });
      if (this.step.mostBytes) {
        svg.append(make("text", { x: 0, y: foot + MEMORY / 2 }, "memory"));
        svg.append(make("text", { x: 0, y: foot + MEMORY / 2 + 15 }, `to ${readableBytes(this.step.mostBytes)}`));
      }
    }
    this.chart.replaceChildren(svg);
    const isMoved = this.from !== this.view.from || this.to !== this.view.to;
    this.caption.textContent = `${isMoved || !this.view.name ? "" : `${this.view.name}: `}${readableTime(this.to - this.from)}`;
  }

  drawTicks(svg, height) {
    const target = (this.to - this.from) / Math.max(2, (this.width - this.label) / 130);
    const power = 10 ** Math.floor(Math.log10(target));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= target);
    for (let at = Math.ceil(this.from / every) * every; at <= this.to; at += every) {
      svg.append(make("line", { class: "grid", x1: this.x(at), x2: this.x(at), y1: TOP - 6, y2: height }));
      svg.append(make("text", { x: this.x(at) + 3, y: 13 }, tickTime(at, every, this.to)));
    }
  }

  // Draws the live bytes, from 0 to the most of the step.
  drawMemory(svg, top) {
    svg.append(make("rect", { class: "lane", x: this.label, y: top, width: this.width - this.label, height: MEMORY }));
    const height = (event) => top + MEMORY * (1 - event.bytes / this.step.mostBytes);
    let path = "", last = this.label, drawnTo = -1;
    for (const event of this.step.holding) {
      if (event.end < this.from) { path = `M${this.label} ${top + MEMORY}V${height(event).toFixed(1)}`; continue; }
      if (event.start > this.to) break;
      const left = Math.max(this.label, this.x(event.start)), right = Math.min(this.width, this.x(event.end));
      last = Math.max(last, right);
      if (right - drawnTo < 0.3) continue;
      drawnTo = right;
      path += `${path ? `H${left.toFixed(1)}` : `M${left.toFixed(1)} ${top + MEMORY}`}V${height(event).toFixed(1)}`;
    }
    if (path) svg.append(make("path", { class: "memory", d: `${path}H${last.toFixed(1)}V${top + MEMORY}Z` }));
  }

  drawLane(svg, lane) {
    const { height } = this.step, y = this.step.tops[lane];
    svg.append(make("rect", { class: "lane", x: this.label, y, width: this.width - this.label, height }));
    const drawnTo = new Map(); // by kind: events on the same pixel are drawn once
    const isExposed = (event) => Number(event.kind === "exposed"); // drawn last, on top: readers look for it
    for (const event of [...this.step.byLane[lane]].sort((a, b) => isExposed(a) - isExposed(b))) {
      if (event.end < this.from || event.start > this.to) continue;
      const right = this.x(event.end);
      if (event !== this.step.selected && right - (drawnTo.get(event.kind) ?? -1) < 0.4) continue;
      drawnTo.set(event.kind, right);
      this.drawEvent(svg, event, y, Math.max(this.label, this.x(event.start)), Math.min(right, this.width));
    }
  }

  drawEvent(svg, event, y, left, right) {
    const width = Math.max(event.kind === "exposed" ? 1 : 0.6, right - left - (right - left > 4 ? 1 : 0));
    const { height } = this.step, place = { x: left, y, width, height };
    const selected = event === this.step.selected ? " selected" : "";
    svg.append(make("rect", { ...place, class: event.kind + selected, "data-index": event.index }));
    if (event.kind === "exposed" && width > 3) {
      svg.append(make("rect", { ...place, fill: "url(#hatch)", "pointer-events": "none" }));
    }
    const fits = Math.floor((width - 8) / 6.4);
    const title = this.step.title(event);
    if (fits < (event.kind === "bubble" ? title.length : 4) || event.kind === "exposed") return;
    const text = shortened(title, fits);
    const tone = event.kind === "matmul" ? "inside" : "inside on-light";
    svg.append(make("text", { class: tone, x: left + 4, y: y + height / 2 + 4 }, text));
  }
}

function listKinds(list, events) {
  for (const kind of new Set(events.map((event) => event.kind))) {
    const item = document.createElement("li");
    const box = make("svg", { width: 12, height: 12, "aria-hidden": "true" });
    box.append(make("rect", { class: kind, width: 12, height: 12, rx: 2 }));
    if (kind === "exposed") box.append(make("rect", { width: 12, height: 12, fill: "url(#hatch)" }));
    item.append(box, ` ${MEANINGS[kind] || kind}`);
    list.append(item);
  }
}

function showTimeline(data) {
  const step = new Step(data), box = document.getElementById("chart"), detail = document.getElementById("detail");
  const views = data.views.length ? data.views : [{ name: "", from: 0, to: step.end }];
  box.append(...views.map((view) => new Pane(step, view, detail).box));
  for (const pane of step.panes) pane.draw(); // at once; later changes wait for the next frame
  step.active = step.panes[0];
  const buttons = {
    "zoom-in": () => step.active.zoom(0.5), "zoom-out": () => step.active.zoom(2), "zoom-all": () => step.showWhole(),
    "zoom-views": () => step.showViews(), "next-exposed": () => step.active.nextExposed(),
    "by-hlo": () => { step.isByHlo = document.getElementById("by-hlo").checked; step.redraw(); },
  };
  for (const [id, act] of Object.entries(buttons)) {
    const button = document.getElementById(id);
    if (button) button.addEventListener("click", act);
  }
  listKinds(document.getElementById("keys"), step.events);
}

const data = JSON.parse(document.getElementById("events").textContent);
if (data.rows.length) showTimeline(data);

let opened = []; // everything is open on paper
window.addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
window.addEventListener("afterprint", () => { for (const part of opened) part.open = false; });
