"use strict";
// Draws the charts of a report anew for another x axis, scale, smoothing, zoom or width of the page;
// at first, what picture.py has drawn already. What it draws from is one JSON object in the page.
const data = JSON.parse(document.getElementById("data").textContent);
const {layout, glyphs} = data;
const state = {axis: 0, strength: data.strength, log: false, zoom: null, hidden: new Set()};
const figures = [...document.querySelectorAll("figure[data-chart]")];
const drawn = new Map(); // figure -> what its pointer needs: scales, series, marks

// ---- numbers

function short(value) {
  const size = Math.abs(value);
  if (size < 1e-14) return "0";
  if (size >= 1e4) {
    const [unit, suffix] = data.suffixes.find(([unit]) => size >= unit);
    return +(value / unit).toPrecision(4) + suffix;
  }
  if (size < 1e-3) return value.toExponential(3).replace(/\.?0*e/, "e").replace("e+", "e");
  return String(+value.toPrecision(4));
}

function exact(value) {
  return Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
}

function ticks(low, high, most, whole) {
  const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map(digit => digit * power).find(one => raw <= one * (1 + 1e-9));
  if (whole) step = Math.max(1, step);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({length: Math.max(0, last - first + 1)}, (_, k) => (first + k) * step);
}

// Of a logarithmic axis: 1, 2, 5 of every power; of a wide range fewer, of a narrow one round values.
function logTicks(low, high, most) {
  const powers = Math.log10(high / low), every = Math.ceil(powers / most), found = [];
  if (powers < 0.7) return ticks(low, high, most);
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
    for (const digit of powers * 3 <= most ? [1, 2, 5] : [1]) found.push(digit * 10 ** p);
  return found.filter(v => v >= low && v <= high && Math.floor(Math.log10(v) + 1e-9) % every === 0);
}

// ---- curves

// The exponential mean over iterations, as `smoothed` of curves.py.
function smoothed(curve, life) {
  const [xs, ys, counts] = curve.means || curve.points;
  let total = 0, weight = 0, before = 0;
  return [xs, ys.map((value, i) => {
    const kept = Math.exp((before - xs[i]) / life), count = counts ? counts[i] : 1;
    total = total * kept + value * count;
    weight = weight * kept + count;
    before = xs[i];
    return total / weight;
  })];
}

// Iteration of a run -> x on the chosen axis, between two known rows on a straight line.
function along(run, iteration) {
  const from = data.runs[run].x[0], to = data.runs[run].x[state.axis];
  let low = 0, high = from.length - 1;
  if (state.axis === 0) return iteration;
  if (iteration <= from[0]) return to[0];
  if (iteration >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= iteration) low = middle; else high = middle;
  }
  return to[low] + (iteration - from[low]) / (from[high] - from[low]) * (to[high] - to[low]);
}

function scale(low, high, start, end, log) {
  const of = log ? Math.log : value => value;
  const pixel = value => start + (of(value) - of(low)) / (of(high) - of(low)) * (end - start);
  return Object.assign(pixel, {low, high, value: at => low + (at - start) / (end - start) * (high - low)});
}

function xRange() {
  if (state.zoom) return state.zoom;
  const shown = data.runs.filter((_, i) => !state.hidden.has(i));
  const columns = (shown.length ? shown : data.runs).map(run => run.x[state.axis]);
  const low = Math.min(...columns.map(xs => xs[0])), high = Math.max(...columns.map(xs => xs.at(-1)));
  return [low, high > low ? high : low + 1];
}

function yRange(chart, values) {
  if (state.log) values = values.filter(value => value > 0);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length) [low, high] = state.log ? [1, 10] : [0, 1];
  if (state.log) return [low / (high / low) ** 0.04 / 1.02, high * (high / low) ** 0.04 * 1.02];
  const zero = chart.from_zero && !state.zoom;
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const room = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? low : low - room, high + room];
}

// ---- a chart

function draw(figure) {
  const chart = data.charts[figure.dataset.chart], svg = figure.querySelector(".picture");
  const width = Math.round(svg.getBoundingClientRect().width), life = data.lives[state.strength];
  if (!width || figure.closest("details:not([open])")) return; // drawn when it is opened
  const lanes = chart.lanes * layout.lane, height = (chart.wide ? layout.tall : layout.low) + lanes;
  const {left, top} = layout, right = width - layout.right, bottom = height - layout.bottom - lanes;
  const x = scale(...xRange(), left, right), inside = value => value >= x.low && value <= x.high;
  const series = chart.curves.filter(curve => !state.hidden.has(curve.run)).map(curve => {
    const onAxis = ([iterations, ys]) => ({xs: iterations.map(i => along(curve.run, i)), ys});
    return {curve, raw: onAxis(curve.points), smooth: life > 0 && curve.noisy && onAxis(smoothed(curve, life))};
  });
  const visible = series.flatMap(({raw}) => raw.ys.filter((_, i) => inside(raw.xs[i])));
  const y = scale(...yRange(chart, visible), bottom, top, state.log);
  const marks = data.runs.map((run, i) => state.hidden.has(i) ? [] : run.marks
    .map(([kind, iteration, text]) => ({kind, text, x: along(i, iteration)}))
    .filter(mark => inside(mark.x)).map(mark => ({...mark, at: x(mark.x)})));
  const clip = `clip${figure.dataset.chart}`;
  let out = frame(x, y, {left, right, top, bottom, lanes, height})
    + `<clipPath id=${clip}><path d="M${left - 4},0H${right + 4}V${height}H${left - 4}z"/></clipPath><g clip-path="url(#${clip})">`;
  marks.forEach((all, i) => {
    out += events(all, data.runs[i].mark_colour, chart.lanes ? bottom + (i + 0.5) * layout.lane : null, top, bottom);
  });
  for (const one of series) out += lines(one, x, y, bottom, inside);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = height + "px";
  svg.innerHTML = out + `</g><path class=pointer d=""/><path class=zone d=""/>`;
  drawn.set(figure, {x, series, marks: marks.flat(), top, bottom: bottom + lanes, left, right});
}

function frame(x, y, {left, right, top, bottom, lanes, height}) {
  let out = "";
  for (const v of (state.log ? logTicks : ticks)(y.low, y.high, Math.floor((bottom - top) / 36)))
    out += `<path class=grid d="M${left},${y(v).toFixed(1)}H${right}"/>`
      + `<text x="${left - 7}" y="${(y(v) + 4).toFixed(1)}" text-anchor=end>${short(v)}</text>`;
  for (const v of ticks(x.low, x.high, Math.floor((right - left) / 90), state.axis < 3))
    out += `<path class=tick d="M${x(v).toFixed(1)},${bottom + lanes}v5"/>`
      + `<text x="${x(v).toFixed(1)}" y="${bottom + lanes + 18}" text-anchor=middle>${short(v)}</text>`;
  return out + `<text class=axis x="${right}" y="${height - 5}" text-anchor=end>${data.axes[state.axis]}</text>`
    + `<path class=frame d="M${left},${top}V${bottom + lanes}H${right}"/>`;
}

function lines({curve, raw, smooth}, x, y, bottom, inside) {
  const style = `stroke="${curve.colour}" stroke-dasharray="${curve.dash}"`;
  const points = ({xs, ys}) => xs.flatMap((value, i) =>
    state.log && ys[i] <= 0 ? [] : [x(value).toFixed(1) + "," + y(ys[i]).toFixed(1)]);
  const path = of => of.length ? "M" + of.join("L") : "", found = points(raw);
  let out = `<path class="curve${smooth ? " faint" : ""}" ${style} d="${path(found)}"/>`;
  if (smooth) out += `<path class="curve smooth" ${style} d="${path(points(smooth))}"/>`;
  else if (raw.xs.length <= data.sparse)
    out += `<path class=dots stroke="${curve.colour}" d="${found.map(at => `M${at}h0`).join("")}"/>`;
  const crosses = curve.broken.map(i => along(curve.run, i)).filter(inside);
  if (!crosses.length) return out;
  const d = crosses.map(value => `M${x(value).toFixed(1)},${bottom - 8}${glyphs.skipped}`).join("");
  return out + `<path class=broken stroke="${data.broken_colour}" d="${d}"/>`;
}

function events(marks, colour, middle, top, bottom) {
  const restarts = marks.filter(mark => mark.kind === "restart").map(mark => `M${mark.at.toFixed(1)},${top}V${bottom}`);
  let out = restarts.length ? `<path class=restart stroke="${colour}" d="${restarts.join("")}"/>` : "";
  for (const kind of middle === null ? [] : Object.keys(glyphs)) {
    let d = "", before = -Infinity;
    for (const mark of marks)
      if (mark.kind === kind && mark.at - before >= layout.apart) {
        d += `M${mark.at.toFixed(1)},${middle}${glyphs[kind]}`;
        before = mark.at;
      }
    if (d) out += `<path class="mark ${kind}" stroke="${colour}" d="${d}"/>`;
  }
  return out;
}

const drawAll = () => figures.forEach(draw);

// ---- pointer: values, and zoom by dragging

const nearest = (xs, value) => xs.reduce((best, one, i) => Math.abs(one - value) < Math.abs(xs[best] - value) ? i : best, 0);

function show(figure, at) {
  const {x, series, marks, top, bottom} = drawn.get(figure), value = x.value(at), tip = figure.querySelector(".tip");
  const found = []; // [HTML, name]
  let where = null;
  for (const {curve, raw, smooth} of series) {
    const i = nearest(raw.xs, value);
    if (!raw.xs.length || Math.abs(x(raw.xs[i]) - at) > 30) continue;
    where ??= raw.xs[i];
    const mean = smooth ? ` <i>smoothed</i> ${exact(smooth.ys[nearest(smooth.xs, value)])}` : "";
    const line = `<svg width=18 height=8><path class=curve stroke="${curve.colour}" stroke-dasharray="${curve.dash}" d="M0,4H18"/></svg>`;
    const name = data.runs.length > 1 ? data.runs[curve.run].name + (curve.dash === "2 3" ? " " + curve.label : "") : curve.label;
    found.push([`<div>${line} <span class=name></span> <b>${exact(raw.ys[i])}</b>${mean}</div>`, name]);
  }
  for (const mark of marks)
    if (Math.abs(mark.at - at) < 4) found.push(["<div class=event><span class=name></span></div>", mark.text]);
  tip.innerHTML = `<div class=at>${data.axes[state.axis]} ${exact(where ?? value)}</div>` + found.map(([line]) => line).join("");
  tip.querySelectorAll(".name").forEach((span, i) => { span.textContent = found[i][1]; });
  tip.hidden = !found.length;
  const beside = at < figure.clientWidth / 2 ? at + 24 : at - tip.offsetWidth - 8;
  tip.style.left = Math.max(4, Math.min(figure.clientWidth - tip.offsetWidth - 4, beside)) + "px";
  figure.querySelector(".pointer").setAttribute("d", `M${at.toFixed(1)},${top}V${bottom}`);
}

for (const figure of figures) {
  const svg = figure.querySelector(".picture");
  let start = null;
  const at = event => {
    const {left, right} = drawn.get(figure);
    return Math.max(left, Math.min(right, event.clientX - svg.getBoundingClientRect().left));
  };
  svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") start = at(event); });
  svg.addEventListener("pointermove", event => {
    const {top, bottom} = drawn.get(figure), here = at(event);
    show(figure, here);
    if (start !== null) svg.querySelector(".zone").setAttribute("d", `M${start},${top}H${here}V${bottom}H${start}z`);
  });
  svg.addEventListener("pointerup", event => {
    const ends = [start, at(event)].sort((a, b) => a - b);
    if (start !== null && ends[1] - ends[0] >= 8) zoom(ends.map(drawn.get(figure).x.value));
    start = null;
  });
  svg.addEventListener("pointerleave", () => {
    start = null;
    figure.querySelector(".tip").hidden = true;
    for (const name of [".pointer", ".zone"]) svg.querySelector(name).setAttribute("d", "");
  });
  svg.addEventListener("dblclick", () => zoom(null));
}

function zoom(range) {
  state.zoom = range;
  document.getElementById("whole").hidden = range === null;
  drawAll();
}

// ---- switches

const on = (id, event, action) => document.getElementById(id).addEventListener(event, ({target}) => action(target));
on("axis", "change", list => { state.axis = +list.value; zoom(null); });
on("log", "change", box => { state.log = box.checked; drawAll(); });
on("whole", "click", () => zoom(null));
on("smoothing", "input", slider => {
  state.strength = +slider.value;
  document.getElementById("strength").textContent = data.strengths[state.strength];
  drawAll();
});
for (const box of document.querySelectorAll("[data-run]"))
  box.addEventListener("change", () => {
    state.hidden[box.checked ? "delete" : "add"](+box.dataset.run);
    drawAll();
  });
for (const section of document.querySelectorAll("details")) section.addEventListener("toggle", drawAll);
for (const one of document.querySelectorAll(".switches")) one.hidden = false;
addEventListener("resize", drawAll);
drawAll();
