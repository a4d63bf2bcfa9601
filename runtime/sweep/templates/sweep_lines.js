// 4 of 4: parallel coordinates and loss curves, which may have thousands of lines. They are drawn on canvases.

function prepare(canvas, width, height) { // sharp on any screen
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  canvas.style.width = `${width}px`;
  const paper = canvas.getContext("2d");
  paper.setTransform(ratio, 0, 0, ratio, 0, 0);
  paper.clearRect(0, 0, width, height);
  paper.font = '12px system-ui, "Liberation Sans", sans-serif';
  return paper;
}

// ---- parallel coordinates: an axis for each key, then figures

const LEAST_AXIS = 104;

class Parallel {
  constructor(canvas) {
    this.canvas = canvas;
    this.axes = [...this.keyAxes(), ...this.figureAxes()];
    this.brushes = this.axes.map(() => null);
    this.lit = null;
    this.listen();
    drawn(canvas.parentNode, () => this.draw());
  }

  keyAxes() {
    return data.keys.map((key, k) => ({
      name: key.name, of: (point) => (key.values.length > 1 ? point.values[k] / (key.values.length - 1) : 0.5),
      ticks: this.thin(key.values).map(([value, n]) => [key.values.length > 1 ? n / (key.values.length - 1) : 0.5, value]),
    }));
  }

  thin(values) {
    const every = Math.ceil(values.length / 14);
    return values.map((value, n) => [value, n]).filter(([, n]) => n % every === 0);
  }

  figureAxes() {
    const wanted = [data.objective, "step_seconds", "exposed_fraction", "peak_bytes", "mfu", "final_loss", "evaluation_loss"];
    const names = [...new Set(wanted)].filter((name) => numberOf(name) >= 0);
    return names.filter((_, n) => n < 4).reverse().flatMap((name) => {
      const f = numberOf(name), range = extent(points.filter((point) => point.isDone).map((point) => point.figures[f]));
      if (!range) return [];
      const [low, high] = range, width = high - low || 1;
      const share = (value) => Math.max(-0.02, Math.min(1.02, (value - low) / width));
      const ticks = high === low ? [[0.5, write(f, low)]] : figureTicks(f, low, high, 6).map(([tick, text]) => [share(tick), text]);
      return [{ name: data.figures[f].heading, of: (point) => (point.figures[f] === null ? null : high === low ? 0.5 : share(point.figures[f])), ticks }];
    });
  }

  get shown() {
    const others = byId("with-others").checked ? points.filter((point) => !point.isDone) : [];
    return [...others, ...points.filter((point) => point.isDone).reverse()]; // the best is drawn last
  }

  isSelected(point) {
    return this.axes.every((axis, a) => {
      const brush = this.brushes[a], at = brush && axis.of(point);
      return !brush || (at !== null && at >= brush[0] - 1e-9 && at <= brush[1] + 1e-9);
    });
  }

  x(a) { return this.axes.length > 1 ? this.left + (a * (this.width - this.left - this.right)) / (this.axes.length - 1) : this.width / 2; }
  y(share) { return this.bottom - share * (this.bottom - this.top); }
  share(y) { return Math.max(0, Math.min(1, (this.bottom - y) / (this.bottom - this.top))); }

  draw() {
    this.width = Math.max(this.canvas.parentNode.clientWidth, 60 + LEAST_AXIS * this.axes.length);
    Object.assign(this, { left: 60, right: 70, top: 40, bottom: 372 });
    const paper = prepare(this.canvas, this.width, 396);
    const rate = objective < 0 ? () => 0 : goodness(objective, points.filter((point) => point.isDone));
    const shown = this.shown, selected = shown.filter((point) => this.isSelected(point)), isIn = new Set(selected);
    const isBrushed = this.brushes.some((brush) => brush);
    if (isBrushed) for (const point of shown) if (!isIn.has(point)) this.line(paper, point, css("--line"), 0.25, 1);
    const opacity = Math.max(0.12, Math.min(0.9, 90 / Math.max(1, selected.length)));
    const grey = css("--grey");
    for (const [n, point] of selected.entries()) {
      const value = objective < 0 ? null : point.figures[objective];
      const isTop = selected.length - n <= 10;
      if (!point.isDone || value === null) this.line(paper, point, grey, opacity * 0.6, 1);
      else this.line(paper, point, rgb(mix(rate(value))), isTop ? 0.95 : opacity, isTop ? 2 : 1.2);
    }
    if (this.lit) this.line(paper, this.lit, css("--vermilion"), 1, 3);
    this.drawAxes(paper);
    byId("selected").textContent = `${selected.length.toLocaleString("en-US")} of ${points.length.toLocaleString("en-US")} ${points.length === 1 ? "point" : "points"}, the ten best in bold`;
  }

  line(paper, point, colour, opacity, thickness) {
    paper.globalAlpha = opacity;
    paper.strokeStyle = colour;
    paper.lineWidth = thickness;
    paper.beginPath();
    let isDown = false;
    this.axes.forEach((axis, a) => {
      const share = axis.of(point);
      if (share !== null) paper[isDown ? "lineTo" : "moveTo"](this.x(a), this.y(share));
      isDown = share !== null;
    });
    paper.stroke();
    paper.globalAlpha = 1;
  }

  drawAxes(paper) {
    const [ink, dim, card, accent] = ["--ink", "--dim", "--card", "--accent"].map(css);
    this.axes.forEach((axis, a) => {
      const x = this.x(a), brush = this.brushes[a];
      paper.strokeStyle = dim;
      paper.lineWidth = 1;
      paper.beginPath();
      paper.moveTo(x, this.top);
      paper.lineTo(x, this.bottom);
      paper.stroke();
      if (brush) {
        paper.fillStyle = accent;
        paper.globalAlpha = 0.35;
        paper.fillRect(x - 7, this.y(brush[1]), 14, Math.max(2, this.y(brush[0]) - this.y(brush[1])));
        paper.globalAlpha = 1;
      }
      paper.textAlign = a === 0 ? "left" : a === this.axes.length - 1 ? "right" : "center";
      const room = Math.floor((this.width - this.left - this.right) / Math.max(1, this.axes.length - 1) / 7);
      paper.fillStyle = ink;
      paper.fillText(cut(axis.name, Math.max(10, room)), a === 0 ? 4 : a === this.axes.length - 1 ? this.width - 4 : x, 18 + 0 * a);
      paper.textAlign = "left";
      paper.lineWidth = 4;
      paper.strokeStyle = card;
      paper.fillStyle = dim;
      for (const [share, text] of axis.ticks) {
        paper.strokeText(cut(text, 16), x + 6, this.y(share) + 4);
        paper.fillText(cut(text, 16), x + 6, this.y(share) + 4);
      }
    });
  }

  nearest(x, y) {
    const a = this.axes.findIndex((_, n) => n + 1 < this.axes.length && x >= this.x(n) && x <= this.x(n + 1));
    if (a < 0) return null;
    const along = (x - this.x(a)) / (this.x(a + 1) - this.x(a));
    let [found, distance] = [null, 9];
    for (const point of this.shown) {
      const [from, to] = [this.axes[a].of(point), this.axes[a + 1].of(point)];
      if (from === null || to === null || !this.isSelected(point)) continue;
      const off = Math.abs(this.y(from + along * (to - from)) - y);
      if (off <= distance) [found, distance] = [point, off];
    }
    return found;
  }

  listen() {
    const { canvas } = this;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let held = null;
    canvas.addEventListener("pointerdown", (press) => {
      const [x, y] = at(press), a = this.axes.findIndex((_, n) => Math.abs(this.x(n) - x) < 14);
      if (a < 0) return;
      held = { a, from: this.share(y) };
      canvas.setPointerCapture(press.pointerId);
      this.brush(a, null);
    });
    canvas.addEventListener("pointermove", (move) => {
      const [x, y] = at(move);
      if (held) {
        const to = this.share(y);
        if (Math.abs(to - held.from) > 0.01) this.brush(held.a, [Math.min(held.from, to), Math.max(held.from, to)]);
        return;
      }
      canvas.style.cursor = this.axes.some((_, n) => Math.abs(this.x(n) - x) < 14) ? "ns-resize" : "default";
      const found = this.nearest(x, y);
      if (found) tipOf(found, move);
      else hideTip();
      if (found !== this.lit) { this.lit = found; this.redraw(); }
    });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointerleave", () => { hideTip(); if (this.lit) { this.lit = null; this.redraw(); } });
    canvas.addEventListener("click", (click) => {
      const [x, y] = at(click), isAxis = this.axes.some((_, n) => Math.abs(this.x(n) - x) < 14);
      const found = isAxis ? null : this.nearest(x, y);
      if (found) open(found);
    });
    byId("clear").addEventListener("click", () => { this.brushes.fill(null); this.selectionChanged(); });
    byId("with-others").addEventListener("change", () => this.redraw());
  }

  brush(a, range) {
    this.brushes[a] = range;
    this.selectionChanged();
  }

  selectionChanged() {
    brushed = this.brushes.some((one) => one) ? (point) => this.isSelected(point) : () => true;
    this.redraw(true);
  }

  redraw(isSelection = false) {
    this.isSelection = this.isSelection || isSelection;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      if (this.isSelection) selectRows();
      this.isSelection = false;
      this.draw();
    });
  }
}

// ---- loss curves

const LINES = ["--blue", "--vermilion", "--green", "--pink", "--orange", "--sky", "--yellow", "--grey"];
const curves = data.curves.map((curve) => ({ ...curve, point: points[curve.point] })).sort((a, b) => a.point.at - b.point.at);
const colourOf = (curve) => { // few runs have a colour each; many share a scale by rank
  const n = curves.indexOf(curve);
  return curves.length <= LINES.length ? css(LINES[n]) : rgb(mix(1 - n / (curves.length - 1)));
};
const lastLoss = (curve) => curve.losses.findLast((loss) => loss !== null) ?? null;

class Curves {
  constructor(canvas) {
    this.canvas = canvas;
    this.isTokens = canvas.dataset.over === "tokens";
    this.curves = curves.filter((curve) => !this.isTokens || curve.tokens !== null);
    canvas.addEventListener("pointermove", (move) => this.point(move));
    canvas.addEventListener("pointerleave", () => { hideTip(); light(null); });
    canvas.addEventListener("click", (click) => { const near = this.nearest(click); if (near) open(near.curve.point); });
    drawn(canvas.parentNode, () => this.draw());
  }

  scale(curve) { return this.isTokens ? curve.tokens : 1; }

  setRanges() {
    const all = this.curves.flatMap((curve) => curve.losses.filter((loss) => loss !== null));
    const held = this.curves.flatMap((curve) => curve.heldOut.map(([, loss]) => loss));
    const sorted = [...all, ...held].sort((a, b) => a - b);
    const isLog = byId("log-loss").checked;
    this.place = isLog ? (loss) => Math.log(Math.max(loss, 1e-6)) : (loss) => loss;
    const low = sorted[0] ?? 0, most = sorted[sorted.length - 1] ?? 1;
    const usual = sorted[Math.floor(0.995 * (sorted.length - 1))] ?? 1; // a run that diverged must not squeeze the others
    const high = most > 4 * usual ? 1.3 * usual : most;
    this.losses = [low, high > low ? high : low + 1];
    this.last = Math.max(1, ...this.curves.map((curve) => this.scale(curve) * curve.steps[curve.steps.length - 1]));
  }

  x(at) { return 52 + (at / this.last) * (this.width - 52 - 12); }
  y(loss) {
    const [low, high] = this.losses.map(this.place);
    return 300 - Math.max(-0.02, Math.min(1.03, (this.place(loss) - low) / (high - low))) * 286;
  }

  draw() {
    this.width = Math.max(280, this.canvas.parentNode.clientWidth);
    const paper = prepare(this.canvas, this.width, 326);
    this.setRanges();
    const [dim, line] = [css("--dim"), css("--line")];
    paper.lineWidth = 1;
    paper.strokeStyle = line;
    paper.fillStyle = dim;
    paper.textAlign = "right";
    for (const tick of ticksOf(...this.losses, 6)) {
      paper.beginPath();
      paper.moveTo(52, this.y(tick));
      paper.lineTo(this.width - 12, this.y(tick));
      paper.stroke();
      paper.fillText(String(Number(tick.toPrecision(4))), 46, this.y(tick) + 4);
    }
    paper.textAlign = "center";
    for (const tick of ticksOf(0, this.last, Math.max(2, Math.floor(this.width / 110)))) {
      if (tick <= this.last) paper.fillText(WRITE.count(tick).replace(/\.0+(?= |$)/, ""), this.x(tick), 320);
    }
    if (!this.curves.length) paper.fillText("the tokens of a step are not known", this.width / 2, 160);
    for (const curve of [...this.curves].reverse()) this.line(paper, curve, lit && lit !== curve ? 0.18 : curves.length > 40 ? 0.6 : 0.95, 1.4);
    if (lit && this.curves.includes(lit)) this.line(paper, lit, 1, 2.6);
  }

  line(paper, curve, opacity, thickness) {
    paper.globalAlpha = opacity;
    paper.strokeStyle = paper.fillStyle = colourOf(curve);
    paper.lineWidth = thickness;
    paper.beginPath();
    let isDown = false;
    curve.steps.forEach((step, n) => {
      const loss = curve.losses[n];
      if (loss !== null) paper[isDown ? "lineTo" : "moveTo"](this.x(this.scale(curve) * step), this.y(loss));
      isDown = loss !== null; // a gap where it was not finite
    });
    paper.stroke();
    for (const [step, loss] of curve.heldOut) {
      paper.beginPath();
      paper.arc(this.x(this.scale(curve) * step), this.y(loss), thickness + 1.4, 0, 7);
      paper.fill();
    }
    paper.globalAlpha = 1;
  }

  nearest(event) {
    const box = this.canvas.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let near = null, distance = 14;
    for (const curve of this.curves) {
      const at = ((x - 52) / (this.width - 52 - 12)) * (this.last / this.scale(curve));
      let n = curve.steps.findIndex((step) => step >= at);
      if (n < 0) continue;
      if (n > 0 && at - curve.steps[n - 1] < curve.steps[n] - at) n -= 1;
      const loss = curve.losses[n];
      if (loss === null) continue;
      const off = Math.hypot(this.x(this.scale(curve) * curve.steps[n]) - x, this.y(loss) - y);
      if (off < distance) [near, distance] = [{ curve, n }, off];
    }
    return near;
  }

  point(move) {
    const near = this.nearest(move);
    light(near && near.curve);
    if (!near) { hideTip(); return; }
    const { curve, n } = near;
    const rows = [["step", curve.steps[n].toLocaleString("en-US")], ["loss", WRITE.loss(curve.losses[n])]];
    if (curve.tokens !== null) rows.push(["tokens", WRITE.count(curve.steps[n] * curve.tokens)]);
    showTip(move, [nameOf(curve.point) || "the only run"], rows, curve.point.isDone ? "" : `${data.statuses[curve.point.status]}: ${curve.point.why}`);
  }
}

let lit = null, charts = [], runRows = new Map();
function light(curve) {
  if (curve === lit) return;
  lit = curve;
  for (const [one, row] of runRows) row.classList.toggle("is-lit", one === curve);
  for (const chart of charts) chart.draw();
}

function buildRuns() {
  const name = { heading: "run", value: (c) => nameOf(c.point), cell: (c) => {
    const mark = element("span", { class: "swatch" });
    mark.style.background = colourOf(c);
    return element("span", {}, mark, linked(c.point, nameOf(c.point) || "the only run"));
  } };
  const steps = { heading: "steps", isNumber: true, better: "more", value: (c) => c.steps[c.steps.length - 1], cell: (c) => c.steps[c.steps.length - 1].toLocaleString("en-US") };
  const last = { heading: "last loss", isNumber: true, value: lastLoss, cell: (c) => (lastLoss(c) === null ? "" : WRITE.loss(lastLoss(c))) };
  const held = (c) => (c.heldOut.length ? c.heldOut[c.heldOut.length - 1][1] : null);
  const evaluated = { heading: "held-out loss", isNumber: true, value: held, cell: (c) => (held(c) === null ? "" : WRITE.loss(held(c))) };
  const speeds = ["tokens_per_second_per_chip", "step_seconds", "mfu"].filter((one) => numberOf(one) >= 0).map((one) => {
    const column = figureColumn(one);
    return { ...column, value: (c) => column.value(c.point), cell: (c) => column.cell(c.point) };
  });
  const status = { heading: "status", value: (c) => c.point.status, cell: (c) => data.statuses[c.point.status] };
  const rowOf = (c, cells) => {
    const row = element("tr", { class: c.point === best ? "is-best" : "" }, ...cells);
    row.addEventListener("pointerenter", () => light(c));
    row.addEventListener("pointerleave", () => light(null));
    runRows.set(c, row);
    return row;
  };
  const made = new Table(byId("runs"), [name, steps, last, evaluated, ...speeds, status], curves, { more: byId("more-runs"), rowOf });
  drawings.push(() => made.draw());
}

if (byId("parallel")) {
  const parallel = new Parallel(byId("parallel-chart"));
  drawings.push(() => parallel.draw());
}
if (byId("curves")) {
  buildRuns();
  charts = [...document.querySelectorAll("canvas.curves")].map((canvas) => new Curves(canvas));
  byId("log-loss").addEventListener("change", () => { for (const chart of charts) chart.draw(); });
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  for (const draw of drawings) draw();
});
