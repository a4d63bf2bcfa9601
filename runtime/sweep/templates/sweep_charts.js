// 2 of 4: heat map, Pareto front, parts of the step. They are SVG, and drawn again when their width or the colours change.

const drawings = []; // functions that draw a chart again
function drawn(container, draw) {
  let width = 0;
  drawings.push(draw);
  new ResizeObserver(() => {
    if (Math.abs(container.clientWidth - width) < 2) return;
    width = container.clientWidth;
    requestAnimationFrame(draw);
  }).observe(container);
}

const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

// ---- heat map

const MOST_CELLS = 40; // along an axis; more values are grouped in their order

function groupsOf(k) { // groups of a key's values: [{label, from, to}]
  const { values } = data.keys[k];
  const count = Math.min(values.length, MOST_CELLS);
  return [...Array(count).keys()].map((n) => {
    const from = Math.floor((n * values.length) / count), to = Math.floor(((n + 1) * values.length) / count) - 1;
    return { from, to, label: from === to ? values[from] : `${values[from]} … ${values[to]}` };
  });
}

function cellsOf(x, y, f) { // the points of each cell: the best done one, else the first with its reason
  const across = groupsOf(x), down = y < 0 ? [{ from: 0, to: 0, label: "" }] : groupsOf(y);
  const groupOf = (groups) => groups.flatMap((group, g) => Array(group.to - group.from + 1).fill(g));
  const [columnOf, rowOf] = [groupOf(across), y < 0 ? null : groupOf(down)];
  const cells = new Map();
  for (const point of points) {
    const at = columnOf[point.values[x]] + across.length * (y < 0 ? 0 : rowOf[point.values[y]]);
    if (!cells.has(at)) cells.set(at, []);
    cells.get(at).push(point);
  }
  const sign = data.figures[f]?.better === "more" ? -1 : 1;
  const isKnown = (point) => point.isDone && f >= 0 && point.figures[f] !== null;
  for (const [at, group] of cells) {
    const known = group.filter(isKnown);
    const one = known.reduce((a, b) => (sign * (b.figures[f] - a.figures[f]) < 0 ? b : a), known[0]);
    cells.set(at, { group, one: one ?? group.find((point) => point.isDone) ?? group[0], isKnown: one !== undefined });
  }
  return { across, down, cells };
}

function tellOfCell(cell) {
  const others = cell.group.length - 1;
  if (!others) return "";
  const done = cell.group.filter((point) => point.isDone).length;
  return cell.isKnown ? `the best of ${cell.group.length} points here, ${done} of them done` : `none of ${cell.group.length} points here is done`;
}

function drawHeat() {
  const chart = byId("heat-chart"), x = Number(byId("heat-x").value), y = Number(byId("heat-y").value);
  const f = Number(byId("heat-colour").value);
  const { across, down, cells } = cellsOf(x, y, f);
  const rate = f < 0 ? () => 0 : goodness(f, points.filter((point) => point.isDone));
  const left = y < 0 ? 12 : Math.min(190, 22 + 7 * Math.max(...down.map((group) => group.label.length), 3));
  const room = Math.max(280, chart.clientWidth) - left - 4;
  const w = Math.max(15, Math.min(116, room / across.length)), h = Math.max(18, Math.min(44, 560 / down.length));
  const width = left + w * across.length + 2, height = 24 + h * down.length + 40;
  const svg = make("svg", { width, height });
  if (y >= 0) svg.append(make("text", { x: 0, y: 13 }, `${data.keys[y].name} ↓`));
  for (const [n, group] of down.entries()) {
    const label = make("text", { x: left - 8, y: 24 + h * n + h / 2 + 4, "text-anchor": "end" }, cut(group.label, Math.floor((left - 12) / 7)));
    label.append(make("title", {}, group.label));
    svg.append(label);
  }
  const longest = Math.max(...across.map((group) => group.label.length));
  const every = Math.max(1, Math.ceil((Math.min(longest, 16) * 7 + 6) / w));
  for (const [n, group] of across.entries()) {
    if (n % every) continue;
    const label = make("text", { x: left + w * (n + 0.5), y: 24 + h * down.length + 16, "text-anchor": "middle" }, cut(group.label, Math.max(16, Math.floor(w / 7))));
    label.append(make("title", {}, group.label));
    svg.append(label);
  }
  svg.append(make("text", { x: left, y: height - 4 }, `${data.keys[x].name} →`));
  for (let at = 0; at < across.length * down.length; at++) {
    const place = { x: left + w * (at % across.length), y: 24 + h * Math.floor(at / across.length), width: w, height: h, rx: 3 };
    drawCell(svg, place, cells.get(at), f, rate);
  }
  chart.replaceChildren(svg);
  drawLegend(byId("heat-legend"), f, rate, [...cells.values()].some((cell) => !cell.isKnown));
}

function drawCell(svg, place, cell, f, rate) {
  if (!cell) {
    svg.append(make("rect", { ...place, class: "cell none" }));
    return;
  }
  const { one, isKnown } = cell;
  const parts = isKnown ? mix(rate(one.figures[f])) : null;
  const isBest = best !== null && cell.group.includes(best);
  const rect = make("rect", { ...place, class: `cell${isKnown ? "" : " no"}${isBest ? " is-best" : ""}`, fill: isKnown ? rgb(parts) : "url(#no)" });
  listen(rect, one, tellOfCell(cell));
  svg.append(rect);
  if (!isKnown) return;
  const text = write(f, one.figures[f]), fill = isLight(parts) ? "#101214" : "#fff";
  const middle = { x: place.x + place.width / 2, y: place.y + place.height / 2 + 4, "text-anchor": "middle" };
  if (place.width > 6.2 * text.length + 6 + (isBest ? 12 : 0)) {
    const label = make("text", { ...middle, class: "value" }, isBest ? `★ ${text}` : text);
    label.style.fill = fill;
    svg.append(label);
  } else if (isBest) {
    const star = make("text", { ...middle, class: "star" }, "★");
    star.style.fill = fill;
    svg.append(star);
  }
}

function drawLegend(container, f, rate, hasOthers) {
  const svg = make("svg", { width: 640, height: 34 });
  if (f >= 0 && rate.range) {
    for (let n = 0; n < 100; n++) svg.append(make("rect", { x: 2 * n, y: 2, width: 2.5, height: 12, fill: rgb(mix(n / 99)) }));
    const texts = [[0, "start", rate.range[0]], [100, "middle", rate.middle], [200, "end", rate.range[1]]];
    for (const [x, anchor, value] of texts) svg.append(make("text", { x, y: 29, "text-anchor": anchor }, write(f, value)));
    svg.append(make("text", { x: 208, y: 13 }, "best"));
  }
  if (hasOthers) {
    svg.append(make("rect", { x: 262, y: 2, width: 22, height: 12, fill: "url(#no)", rx: 2 }));
    svg.append(make("text", { x: 290, y: 13 }, "does not fit, or is not done: the reason is on hover"));
  }
  container.replaceChildren(svg);
}

function buildHeat() {
  const shareOf = (key) => (key.influence >= 0.001 ? ` (${(100 * key.influence).toFixed(0)} %)` : "");
  const options = data.keys.map((key, k) => [k, `${key.name}${shareOf(key)}`]);
  const order = data.keys.map((key, k) => ({ k, key })).filter(({ key }) => key.values.length > 1)
    .sort((a, b) => b.key.influence - a.key.influence || b.key.values.length - a.key.values.length);
  const [x, y] = [order[0]?.k ?? 0, order[1]?.k ?? -1];
  const isWider = y >= 0 && data.keys[y].values.length > data.keys[x].values.length; // the longer axis goes across
  fill(byId("heat-x"), options, isWider ? y : x);
  fill(byId("heat-y"), [[-1, "nothing"], ...options], isWider ? x : y);
  fill(byId("heat-colour"), data.figures.map((figure, f) => [f, figure.heading]), Math.max(0, objective));
  if (!data.figures.length) fill(byId("heat-colour"), [[-1, "no figure is known"]], -1);
  for (const id of ["heat-x", "heat-y", "heat-colour"]) byId(id).addEventListener("change", drawHeat);
  drawn(byId("heat-chart"), drawHeat);
}

// ---- Pareto front

function ticksOf(low, high, most) {
  const step = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(step));
  const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= step);
  const ticks = [];
  for (let at = Math.ceil(low / every) * every; at <= high + 1e-9 * every; at += every) ticks.push(at);
  return ticks;
}

function figureTicks(figure, low, high, most) { // [value, text]; bytes in whole GiB or similar
  const unit = data.figures[figure].kind === "bytes" ? 2 ** (10 * Math.floor(Math.log2(Math.max(high, 2)) / 10)) : 1;
  const ticks = ticksOf(low / unit, high / unit, most).map((tick) => tick * unit);
  const every = ticks.length > 1 ? ticks[1] - ticks[0] : high - low || 1;
  return ticks.map((tick) => [tick, writeTick(figure, tick, every)]);
}

// An SVG with a grid, ticks ([place, text], from the left and from the top) and the names of both axes.
function frame({ width, height, left, right, top, bottom }, { across, up, names }) {
  const svg = make("svg", { width, height });
  for (const [x, text] of across) {
    svg.append(make("line", { class: "grid", x1: x, x2: x, y1: top, y2: height - bottom }));
    svg.append(make("text", { x, y: height - bottom + 17, "text-anchor": "middle" }, text));
  }
  for (const [y, text] of up) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
    svg.append(make("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, text));
  }
  svg.append(make("text", { x: width - right, y: height - 6, "text-anchor": "end" }, `${names[0]} →`));
  svg.append(make("text", { x: left, y: 14 }, `${names[1]} ↑`));
  return svg;
}

function frontOf(x, y) { // the points that no other point beats in both figures
  const sign = (f) => (data.figures[f].better === "less" ? 1 : -1);
  const known = points.filter((p) => p.isDone && p.figures[x] !== null && p.figures[y] !== null);
  const worth = (point, f) => sign(f) * point.figures[f];
  known.sort((a, b) => worth(a, x) - worth(b, x) || worth(a, y) - worth(b, y));
  const front = [];
  for (const point of known) if (!front.length || worth(point, y) < worth(front[front.length - 1], y)) front.push(point);
  return front;
}

function drawPareto() {
  const chart = byId("pareto-chart"), x = Number(byId("pareto-x").value), y = Number(byId("pareto-y").value);
  const width = Math.max(300, chart.clientWidth), height = 400, left = 74, right = 16, top = 30, bottom = 44;
  const isKnown = (point) => point.figures[x] !== null && point.figures[y] !== null;
  const known = points.filter(isKnown), done = known.filter((point) => point.isDone);
  const shown = done.length ? done : known;
  const limits = new Set(known.map((point) => point.limit));
  const isNear = limits.size === 1 && [...limits][0] < 1.7 * (extent(shown.map((point) => point.figures[y])) ?? [0, 0])[1];
  const limit = figureNames[y] === "peak_bytes" && isNear ? [...limits][0] : null; // a distant limit would squeeze the points
  const range = (f, more = []) => {
    const [low, high] = extent([...shown.map((point) => point.figures[f]), ...more]) ?? [0, 1];
    const space = 0.06 * (high - low || high || 1);
    return [Math.max(0, low - space), high + space];
  };
  const [x0, x1] = range(x), [y0, y1] = range(y, limit === null ? [] : [limit]);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const across = (value) => clamp(left + ((value - x0) / (x1 - x0)) * (width - left - right), left, width - right);
  const up = (value) => clamp(height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom), top, height - bottom);
  const svg = frame({ width, height, left, right, top, bottom }, {
    across: figureTicks(x, x0, x1, Math.max(2, width / 110)).map(([tick, text]) => [across(tick), text]),
    up: figureTicks(y, y0, y1, 7).map(([tick, text]) => [up(tick), text]),
    names: [data.figures[x].heading, data.figures[y].heading],
  });
  if (limit !== null) {
    svg.append(make("line", { class: "limit", x1: left, x2: width - right, y1: up(limit), y2: up(limit) }));
    svg.append(make("text", { class: "limit-text", x: width - right - 4, y: up(limit) - 5, "text-anchor": "end" }, `limit ${write(y, limit)}`));
  }
  const front = frontOf(x, y), isOnFront = new Set(front);
  const rate = objective < 0 ? () => 0 : goodness(objective, points.filter((point) => point.isDone));
  const size = known.length > 400 ? 3 : 4.5;
  for (const point of known.filter((one) => !one.isDone)) {
    const [cx, cy] = [across(point.figures[x]), up(point.figures[y])];
    const cross = make("path", { class: "out", d: `M${cx - 3} ${cy - 3}l6 6m0 -6l-6 6` });
    listen(cross, point);
    svg.append(cross);
  }
  const line = front.map((point, n) => `${n ? `H${across(point.figures[x])}V` : `M${across(point.figures[x])} `}${up(point.figures[y])}`).join("");
  if (front.length > 1) svg.append(make("path", { class: "front", d: line }));
  for (const point of [...done].sort((a, b) => isOnFront.has(a) - isOnFront.has(b) || b.at - a.at)) {
    const value = objective < 0 ? null : point.figures[objective];
    const dot = make("circle", { class: `dot${isOnFront.has(point) ? " on-front" : ""}`, cx: across(point.figures[x]), cy: up(point.figures[y]), r: isOnFront.has(point) ? 5.5 : size,
      fill: value === null ? "var(--slate)" : rgb(mix(rate(value))) });
    listen(dot, point, isOnFront.has(point) ? "on the front" : "");
    svg.append(dot);
  }
  chart.replaceChildren(svg);
  listFront(front, x, y);
}

function listFront(front, x, y) {
  const head = ["on the front", data.figures[x].heading, data.figures[y].heading].map((text, n) => element("th", { scope: "col", class: n ? "num" : "text" }, text));
  const most = 100;
  const rows = front.slice(0, most).map((point) => element("tr", {},
    element("td", {}, linked(point, nameOf(point) || `point ${point.index}`)),
    element("td", { class: "num" }, write(x, point.figures[x])), element("td", { class: "num" }, write(y, point.figures[y]))));
  if (front.length > most) rows.push(element("tr", {}, element("td", { colspan: 3, class: "dim" }, `and ${front.length - most} more`)));
  byId("front").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function buildPareto() {
  const options = data.figures.map((figure, f) => [f, figure.heading]);
  fill(byId("pareto-x"), options, numberOf("step_seconds"));
  fill(byId("pareto-y"), options, numberOf("peak_bytes"));
  for (const id of ["pareto-x", "pareto-y"]) byId(id).addEventListener("change", drawPareto);
  drawn(byId("pareto-chart"), drawPareto);
}

// ---- a figure over a key of numbers, such as the final loss over the learning rate

const isNumber = (text) => text !== "" && Number.isFinite(Number(text));
const numberKeys = data.keys.flatMap((key, k) => (key.values.length > 1 && key.values.every(isNumber) ? [k] : []));

function drawOver() {
  const chart = byId("over-chart"), k = Number(byId("over-x").value), y = Number(byId("over-y").value);
  const width = Math.max(300, chart.clientWidth), height = 320, left = 74, right = 24, top = 30, bottom = 44;
  const values = data.keys[k].values.map(Number), [low, high] = extent(values);
  const isLog = low > 0 && high / low >= 8; // learning rates are swept like this; the axis says so
  const place = isLog ? Math.log : (value) => value;
  const across = (value) => left + 20 + ((place(value) - place(low)) / (place(high) - place(low))) * (width - left - right - 40);
  const shown = points.filter((point) => point.isDone && point.figures[y] !== null);
  const [y0, y1] = extent(shown.map((point) => point.figures[y])) ?? [0, 1], space = 0.06 * (y1 - y0 || Math.abs(y1) || 1);
  const up = (value) => height - bottom - ((value - y0 + space) / (y1 - y0 + 2 * space)) * (height - top - bottom);
  const every = Math.ceil(values.length / Math.max(2, width / 80));
  const svg = frame({ width, height, left, right, top, bottom }, {
    across: data.keys[k].values.map((text, n) => [across(values[n]), text]).filter((_, n) => n % every === 0),
    up: figureTicks(y, y0 - space, y1 + space, 6).map(([tick, text]) => [up(tick), text]),
    names: [`${data.keys[k].name}${isLog ? ", logarithmic" : ""}`, data.figures[y].heading],
  });
  const isLess = data.figures[y].better === "less", bests = new Map();
  for (const point of shown) {
    const at = point.values[k], value = point.figures[y];
    if (at !== null && (!bests.has(at) || (isLess ? value < bests.get(at) : value > bests.get(at)))) bests.set(at, value);
  }
  const joined = [...bests].sort((a, b) => values[a[0]] - values[b[0]]);
  if (joined.length > 1) svg.append(make("path", { class: "front", d: joined.map(([at, value], n) => `${n ? "L" : "M"}${across(values[at])} ${up(value)}`).join("") }));
  for (const point of shown) {
    if (point.values[k] === null) continue;
    const dot = make("circle", { class: "dot", cx: across(values[point.values[k]]), cy: up(point.figures[y]), r: 4.5, fill: "var(--slate)" });
    listen(dot, point);
    svg.append(dot);
  }
  chart.replaceChildren(svg);
}

function buildOver() {
  fill(byId("over-x"), numberKeys.map((k) => [k, data.keys[k].name]), numberKeys[0]);
  fill(byId("over-y"), data.figures.map((figure, f) => [f, figure.heading]), Math.max(0, objective));
  for (const id of ["over-x", "over-y"]) byId(id).addEventListener("change", drawOver);
  drawn(byId("over-chart"), drawOver);
}

// ---- parts of the step

const PARTS = [["compute_seconds", "compute", "compute"], ["exposed_seconds", "exposed", "exposed communication"],
  ["bubble_seconds", "bubble", "bubble of the pipeline"], [null, "rest", "the rest of the step"]];
const MORE_BARS = 25;
let numBars = MORE_BARS;

function partsOf(point) {
  const seconds = PARTS.slice(0, 3).map(([name]) => (numberOf(name) < 0 ? 0 : point.figures[numberOf(name)] ?? 0));
  const step = numberOf("step_seconds") < 0 ? null : point.figures[numberOf("step_seconds")];
  const rest = step === null ? 0 : step - seconds.reduce((a, b) => a + b, 0);
  return [...seconds, rest > 0.005 * (step ?? 0) ? rest : 0];
}

function swatch(part) {
  const box = make("svg", { width: 12, height: 12, "aria-hidden": "true" });
  box.append(make("rect", { class: part, width: 12, height: 12, rx: 2 }));
  if (part === "exposed") box.append(make("rect", { width: 12, height: 12, fill: "url(#hatch)" }));
  return box;
}

function drawBars() {
  const known = points.filter((point) => point.isDone && partsOf(point).some((seconds) => seconds > 0));
  const shown = known.slice(0, numBars);
  const longest = Math.max(...shown.map((point) => partsOf(point).reduce((a, b) => a + b, 0)), 1e-12);
  const used = new Set();
  byId("bar-chart").replaceChildren(...shown.map((point) => {
    const svg = make("svg", { width: "100%", height: 18 });
    let start = 0;
    for (const [n, seconds] of partsOf(point).entries()) {
      if (!seconds) continue;
      used.add(n);
      const place = { x: `${(100 * start) / longest}%`, width: `${(100 * seconds) / longest}%`, y: 1, height: 16 };
      svg.append(make("rect", { ...place, class: PARTS[n][1] }));
      if (PARTS[n][1] === "exposed") svg.append(make("rect", { ...place, fill: "url(#hatch)" }));
      start += seconds;
    }
    const row = element("div", { class: `bar-row${point === best ? " is-best" : ""}` },
      element("span", { class: "label" }, linked(point, nameOf(point) || `point ${point.index}`)), svg, element("span", { class: "num" }, WRITE.seconds(start)));
    row.addEventListener("pointermove", (move) => tipOf(point, move));
    row.addEventListener("pointerleave", hideTip);
    return row;
  }));
  byId("bar-keys").replaceChildren(...PARTS.flatMap(([, part, text], n) => (used.has(n) ? [element("li", {}, swatch(part), ` ${text}`)] : [])),
    element("li", {}, `the best first, ${shown.length.toLocaleString("en-US")} of ${known.length.toLocaleString("en-US")}`));
  byId("more-bars").hidden = shown.length === known.length;
}

if (byId("heat")) buildHeat();
if (byId("over")) buildOver();
if (byId("pareto")) buildPareto();
if (byId("bars")) {
  byId("more-bars").addEventListener("click", () => { numBars *= 4; drawBars(); });
  drawBars();
}
