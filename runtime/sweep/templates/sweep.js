"use strict";
// The page of a sweep, 1 of 4: its data, the formats and colours of values, the tip beside the pointer, the tables.

const SVG = "http://www.w3.org/2000/svg";
const ROWS = 100; // shown of a table at first
const data = JSON.parse(document.getElementById("sweep").textContent);
const byId = (id) => document.getElementById(id);

const points = data.points.index.map((index, at) => ({
  at, index, // `at`: the place in the order, the best first
  values: data.points.values.map((column) => column[at]),
  status: data.points.status[at],
  isDone: data.points.status[at] === "done",
  why: data.reasons[data.points.why[at]],
  link: data.points.link[at],
  basis: data.points.basis[at],
  figures: data.points.figures.map((column) => column[at]),
  limit: data.points.limit[at],
}));
const figureNames = data.figures.map((figure) => figure.name);
const numberOf = (name) => figureNames.indexOf(name);
const objective = numberOf(data.objective);
const best = points.length && points[0].isDone && objective >= 0 && points[0].figures[objective] !== null ? points[0] : null;
const nameOf = (point) => data.keys.map((key, k) => `${key.name}=${key.values[point.values[k]]}`).join(" ");

function make(name, attributes = {}, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- values

function digits(value) { // three significant ones: 1234 -> 1,234
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded))));
  return rounded.toLocaleString("en-US", { minimumFractionDigits: Math.min(places, 20), maximumFractionDigits: Math.min(places, 20) });
}

function scaled(value, scales) {
  const [unit, scale] = scales.find(([, scale]) => Math.abs(value) >= 0.9995 * scale) ?? scales[scales.length - 1];
  return `${digits(value / scale)} ${unit}`.trim();
}

const WRITE = {
  seconds: (v) => (v === 0 ? "0 s" : v >= 2 * 86400 ? scaled(v, [["days", 86400]]) : v >= 2 * 3600 ? scaled(v, [["h", 3600]]) : scaled(v, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]])),
  count: (v) => scaled(v, [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]]),
  bytes: (v) => scaled(v, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]]),
  share: (v) => `${(100 * v).toFixed(1)} %`,
  cost: digits,
  loss: (v) => v.toFixed(4),
};
// Writes a tick with as many digits as distinguish it from the next one, `every` further.
function writeTick(figure, value, every) {
  const { kind } = data.figures[figure];
  const units = { seconds: [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]], count: [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]],
    bytes: [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]], share: [["%", 0.01]] }[kind] ?? [["", 1]];
  const [unit, scale] = units.find(([, scale]) => Math.abs(value) >= 0.9995 * scale) ?? units[units.length - 1];
  const places = Math.max(0, Math.min(12, -Math.floor(Math.log10(every / scale) + 1e-9)));
  return `${(value / scale).toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places })} ${unit}`.trim();
}
const write = (figure, value) => (value === null ? "" : WRITE[data.figures[figure].kind](value));

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// ---- colours: from the worst of a figure to its best; on a logarithmic scale if it spreads widely

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let stops = [];
function readColours() {
  stops = css("--scale").split(",").map((hex) => [1, 3, 5].map((at) => parseInt(hex.trim().slice(at, at + 2), 16)));
}
readColours();

function mix(share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return stops[low].map((part, i) => Math.round(part + (at - low) * (stops[low + 1][i] - part)));
}
const rgb = (parts) => `rgb(${parts.join(" ")})`;
const isLight = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b > 110;

function goodness(figure, group) { // a function: value -> 0 (worst of the group) to 1 (best)
  const range = extent(group.map((point) => point.figures[figure]));
  if (!range) return () => 0;
  const [low, high] = range;
  const isLog = low > 0 && high / low > 3;
  const place = isLog ? Math.log : (value) => value;
  const width = place(high) - place(low);
  const isLess = data.figures[figure].better === "less";
  const share = (value) => (width ? (place(value) - place(low)) / width : 1);
  const rate = (value) => (width && isLess ? 1 - share(value) : share(value));
  rate.range = isLess ? [high, low] : [low, high];
  rate.middle = isLog ? Math.sqrt(low * high) : (low + high) / 2;
  return rate;
}

// ---- the tip

const tip = byId("tip");
function showTip(at, title, rows, why) {
  const lines = title.map((text) => element("p", {}, element("b", {}, text)));
  if (why) lines.push(element("p", { class: "why" }, why));
  const table = element("table");
  for (const [name, value] of rows) {
    table.append(element("tr", {}, element("td", { class: "dim" }, name), element("td", { class: "num" }, value)));
  }
  tip.replaceChildren(...lines, table);
  tip.hidden = false;
  const left = Math.min(at.pageX + 14, window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
  const isBelow = at.clientY + tip.offsetHeight + 24 < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${isBelow ? at.pageY + 16 : at.pageY - tip.offsetHeight - 12}px`;
}
const hideTip = () => { tip.hidden = true; };

function pointRows(point) {
  const rows = data.figures.map((figure, f) => [figure.heading, write(f, point.figures[f])]).filter(([, value]) => value);
  return point.basis ? [...rows, ["known by", point.basis]] : rows;
}

function tipOf(point, at, more) {
  const status = point.isDone ? "" : `${data.statuses[point.status]}${point.why ? `: ${point.why}` : ""}`;
  showTip(at, [nameOf(point) || "the only point", ...(more ? [more] : [])], pointRows(point), status);
}

function open(point) {
  if (point.link) window.location.assign(point.link);
}

function listen(node, point, more) { // the tip and the link of a mark
  node.addEventListener("pointermove", (move) => tipOf(point, move, more));
  node.addEventListener("pointerleave", hideTip);
  if (point.link) {
    node.classList.add("is-link");
    node.addEventListener("click", () => open(point));
  }
}

// ---- tables: a click on a heading sorts, figures the best first; unknown values stay last

const linked = (point, ...children) => (point.link ? element("a", { href: point.link }, ...children) : element("span", {}, ...children));

class Table {
  // columns: {heading, isNumber, better, value(row), cell(row) -> Node or text, kind}
  constructor(table, columns, rows, { more, shown, rowOf }) {
    Object.assign(this, { table, columns, all: rows, more, shown, rowOf, rows, isWhole: false, sorted: null });
    const head = columns.map((column, c) => {
      const button = element("button", { type: "button" }, column.heading);
      button.addEventListener("click", () => this.sort(c));
      return element("th", { scope: "col", class: column.isNumber ? "num" : "text" }, button);
    });
    this.body = element("tbody");
    table.replaceChildren(element("thead", {}, element("tr", {}, ...head)), this.body);
    more.addEventListener("click", () => { this.isWhole = true; this.draw(); });
    this.draw();
  }

  filter(isKept) { this.rows = this.all.filter(isKept); this.draw(); }

  sort(c) {
    const column = this.columns[c];
    const first = column.better === "more" ? -1 : 1;
    const sign = this.sorted && this.sorted.c === c ? -this.sorted.sign : first;
    this.sorted = { c, sign };
    const heads = this.table.tHead.rows[0].cells;
    for (const th of heads) th.removeAttribute("aria-sort");
    heads[c].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const order = (a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (Number(x > y) - Number(x < y));
    };
    this.all = [...this.all].sort(order);
    this.rows = [...this.rows].sort(order);
    this.draw();
  }

  draw() {
    const drawn = this.isWhole ? this.rows : this.rows.slice(0, ROWS);
    this.body.replaceChildren(...drawn.map((row) => this.rowOf(row, this.columns.map((column) => {
      const cell = column.cell(row);
      return element("td", { class: column.kind ?? (column.isNumber ? "num" : "text") }, ...(cell === "" ? [] : [cell]));
    }))));
    this.more.hidden = drawn.length === this.rows.length;
    this.more.textContent = `show all ${this.rows.length.toLocaleString("en-US")}`;
    if (this.shown) {
      this.shown.textContent = `${this.rows.length.toLocaleString("en-US")} of ${this.all.length.toLocaleString("en-US")}`;
    }
  }
}

const isNumeric = (key) => key.values.every((value) => value !== "" && Number.isFinite(Number(value)));
function keyColumns() {
  return data.keys.map((key, k) => ({
    heading: key.name, isNumber: isNumeric(key), value: (point) => point.values[k],
    cell: (point) => (k ? key.values[point.values[k]] : linked(point, key.values[point.values[k]])),
  }));
}
function figureColumn(name, heading) {
  const f = numberOf(name);
  return { heading: heading ?? data.figures[f].heading, isNumber: true, better: data.figures[f].better,
    value: (point) => point.figures[f], cell: (point) => write(f, point.figures[f]) };
}

let brushed = () => true; // the selection in the parallel coordinates
let table = null;
function selectRows() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter((word) => word);
  table.filter((point) => {
    const text = `${nameOf(point)} ${data.statuses[point.status]} ${point.why}`.toLowerCase();
    return brushed(point) && words.every((word) => text.includes(word));
  });
}

function buildTable() {
  const status = { heading: "status", value: (p) => p.status, cell: (p) => data.statuses[p.status], kind: "kind" };
  const why = { heading: "why", value: (p) => p.why || null, cell: (p) => p.why, kind: "why" };
  const first = data.keys.length ? [] : [{ heading: "point", value: (p) => p.index, cell: (p) => linked(p, `point ${p.index}`) }];
  const isMixed = new Set(points.map((point) => point.basis).filter((basis) => basis)).size > 1;
  const by = { heading: "by", value: (p) => p.basis, cell: (p) => p.basis ?? "" };
  const states = [...(points.every((point) => point.isDone) ? [] : [status]), ...(isMixed ? [by] : [])];
  const whys = points.some((point) => point.why) ? [why] : [];
  const columns = [...first, ...keyColumns(), ...states, ...figureNames.map((name) => figureColumn(name)), ...whys];
  const rowOf = (point, cells) => element("tr", { class: point === best ? "is-best" : point.isDone ? "" : "not-done" }, ...cells);
  table = new Table(byId("table"), columns, points, { more: byId("more-points"), shown: byId("shown"), rowOf });
  byId("filter").addEventListener("input", selectRows);
}
buildTable();

function fill(select, options, chosen) { // options: [value, text]
  for (const [value, text] of options) select.append(element("option", { value }, text));
  select.value = chosen;
}
