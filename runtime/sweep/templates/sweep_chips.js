// 3 of 4: figures over the number of chips, with bars for the range of the prediction. SVG.

const CHIP_COLOURS = ["--blue", "--vermilion", "--green", "--pink", "--orange", "--sky", "--grey"];
const chipNames = [...new Set(data.chips.flatMap((panel) => panel.marks.map((mark) => mark.chip)))];
const colourOfChip = (chip) => `var(${CHIP_COLOURS[chipNames.indexOf(chip) % CHIP_COLOURS.length]})`;

function drawChips(panel, chart) {
  const width = Math.max(300, chart.clientWidth), height = 300, left = 70, right = 20, top = 30, bottom = 44;
  const numbers = [...new Set(panel.marks.map((mark) => mark.chips))].sort((a, b) => a - b);
  const [first, last] = [numbers[0], numbers[numbers.length - 1]].map(Math.log2);
  const across = (chips) => left + 24 + ((Math.log2(chips) - first) / (last - first || 1)) * (width - left - right - 48);
  const ends = panel.marks.map((mark) => mark.range ?? [mark.value, mark.value]);
  const most = 1.05 * Math.max(...ends.map(([, high]) => high)) || 1; // the axis begins at 0, so that heights are in proportion
  const up = (value) => height - bottom - (value / most) * (height - top - bottom);
  const shown = numbers.filter((n, at) => at === 0 || across(n) - across(numbers[at - 1]) > 30);
  const svg = frame({ width, height, left, right, top, bottom }, {
    across: shown.map((n) => [across(n), n.toLocaleString("en-US")]),
    up: ticksOf(0, most, 5).map((tick) => [up(tick), WRITE[panel.kind](tick)]),
    names: ["chips, logarithmic", panel.heading],
  });
  for (const chip of chipNames) {
    const line = panel.marks.filter((mark) => mark.chip === chip), stroke = colourOfChip(chip);
    if (line.length > 1) svg.append(make("path", { fill: "none", stroke, opacity: 0.5, d: line.map((mark, n) => `${n ? "L" : "M"}${across(mark.chips)} ${up(mark.value)}`).join("") }));
    const shift = 5 * (chipNames.indexOf(chip) - (chipNames.length - 1) / 2); // bars at the same number of chips lie side by side
    for (const mark of line) drawMark(svg, panel, mark, across(mark.chips) + shift, up, stroke);
  }
  chart.replaceChildren(svg);
}

function drawMark(svg, panel, mark, x, up, colour) {
  if (mark.range) {
    const [low, high] = mark.range.map(up);
    svg.append(make("path", { class: "whisker", stroke: colour, d: `M${x - 4} ${low}h8M${x} ${low}V${high}M${x - 4} ${high}h8` }));
  }
  if (mark.isTied) svg.append(make("circle", { class: "tied", cx: x, cy: up(mark.value), r: 9 }));
  const dot = make("circle", { class: "dot", cx: x, cy: up(mark.value), r: 4.5, fill: colour });
  const point = points.find((one) => one.index === mark.index);
  const between = mark.range ? `, ${mark.range.map(WRITE[panel.kind]).join(" to ")}` : "";
  listen(dot, point, `${mark.target}: ${panel.heading} ${WRITE[panel.kind](mark.value)}${between}`);
  svg.append(dot);
}

if (byId("chips")) {
  const tied = data.chips[0].marks.filter((mark) => mark.isTied).map((mark) => mark.target);
  byId("chips-tie").textContent = tied.length > 1 ? `A tie by ${data.figures[objective].heading}, ringed: ${tied.join(", ")}; none of them is surely the best.` : "";
  byId("chips-keys").replaceChildren(...chipNames.map((chip) => {
    const mark = element("span", { class: "swatch" });
    mark.style.background = colourOfChip(chip);
    return element("li", {}, mark, chip);
  }));
  for (const panel of data.chips) {
    const chart = element("div", { class: "chart", role: "img", "aria-label": `${panel.heading} over the number of chips; the table of points has it` });
    byId("chips-charts").append(element("figure", {}, chart));
    drawn(chart, () => drawChips(panel, chart));
  }
}
