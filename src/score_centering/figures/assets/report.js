"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(data.arms.keys());
const tooltip = document.getElementById("tooltip");
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent?.append(node);
  return node;
}

const number = (value) =>
  value === 0 ? "0" : Math.abs(value) >= 0.01 && Math.abs(value) < 1e5 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);

/* Round tick values: 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function linearAxis(values, count) {
  let low = Math.min(...values), high = Math.max(...values);
  const pad = 0.06 * (high - low) || Math.abs(high) * 0.05 || 0.05;
  [low, high] = [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  return { low, high, ticks: linearTicks(low, high, count), name: number, place: (v) => (v - low) / (high - low) };
}

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => "10" + [...String(exponent)].map((c) => SUPERSCRIPT[c]).join("");

/* Zeros, and values more than ten decades below the largest, lie on the floor, whose tick says "≤". */
function logAxis(values, count) {
  const positive = values.filter((v) => v > 0);
  const largest = positive.length ? Math.max(...positive) : 1e-11;
  const smallest = positive.length ? Math.min(...positive) : 1e-11;
  const deepest = Math.max(Math.floor(Math.log10(smallest) + 1e-9), Math.ceil(Math.log10(largest)) - 10);
  const clipped = values.some((v) => v < 10 ** deepest);
  const low = clipped ? 10 ** (deepest - 1) : smallest / 1.4;
  const high = Math.max(largest * 1.6, low * 4);
  const [from, to] = [Math.log10(low), Math.log10(high)];
  let ticks = [];
  if (to - from < 2.3) {
    for (let e = Math.floor(from); e <= to; e++) for (const d of [1, 2, 5]) ticks.push(d * 10 ** e);
  } else {
    const every = Math.ceil((to - from) / count);
    for (let e = Math.ceil(from - 1e-9); e <= to; e += every) ticks.push(10 ** e);
  }
  ticks = ticks.filter((t) => t >= low * 0.999 && t <= high);
  const name = (v) => {
    const exponent = Math.floor(Math.log10(v) + 1e-9), digit = Math.round(v / 10 ** exponent);
    return (clipped && v < low * 1.01 ? "≤" : "") + (digit === 1 ? power(exponent) : `${digit}×${power(exponent)}`);
  };
  return { low, high, ticks, name, place: (v) => (Math.log10(Math.max(v, low)) - from) / (to - from) };
}

/* Least-squares shifts that keep the order and a gap (pool adjacent violators). */
function spread(positions, gap, low, high) {
  const order = positions.map((_, i) => i).sort((a, b) => positions[a] - positions[b]);
  if (order.length > 1) gap = Math.min(gap, (high - low) / (order.length - 1));
  const blocks = [];
  order.forEach((index, rank) => {
    blocks.push([positions[index] - gap * rank, 1]);
    while (blocks.length > 1 && blocks.at(-2)[0] > blocks.at(-1)[0]) {
      const [mean, size] = blocks.pop(), last = blocks.at(-1);
      last[0] = (last[0] * last[1] + mean * size) / (last[1] + size);
      last[1] += size;
    }
  });
  const result = [];
  let rank = 0;
  for (const [mean, size] of blocks) {
    for (let i = 0; i < size; i++, rank++) {
      result[order[rank]] = Math.min(Math.max(mean, low), high - gap * (order.length - 1)) + gap * rank;
    }
  }
  return result;
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

const unit = (id) => data.charts.find((chart) => chart.id === id).unit;
const charts = [
  ...data.charts,
  { id: "reward_vs_k3", title: "Reward against K3", unit: unit("reward"), xUnit: unit("k3_kl"), kind: "path", series: data.paths },
];

function draw(chart) {
  const host = document.getElementById(`chart-${chart.id}`);
  host.replaceChildren();
  const series = chart.series.filter((s) => shown.has(s.arm));
  if (!series.length) {
    host.innerHTML = `<p class="empty">${chart.series.length ? "No arm is switched on." : "Not measured in these runs."}</p>`;
    return;
  }
  const isPath = chart.kind === "path";
  const width = Math.max(280, host.clientWidth), height = Math.round(Math.min(340, Math.max(230, width * 0.6)));
  const labels = width >= 440;
  const values = isPath ? series.flatMap((s) => s.points.map((p) => p[2])) : series.flatMap((s) => [...s.mean, ...s.raw[1], ...(s.low ?? []), ...(s.high ?? [])]);
  const y = (chart.kind === "log" ? logAxis : linearAxis)(values, 5);
  const margin = { left: 26 + 7 * Math.max(...y.ticks.map((tick) => y.name(tick).length)), right: labels ? 20 + 7.1 * Math.max(...series.map((s) => data.arms[s.arm].label.length)) : 12, top: 10, bottom: 42 };
  const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
  const x = isPath
    ? logAxis(series.flatMap((s) => s.points.map((p) => p[1])), Math.max(2, inner.width / 70))
    : (() => {
        const steps = chart.series.flatMap((s) => s.raw[0]);
        let low = Math.min(...steps), high = Math.max(...steps);
        if (low === high) [low, high] = [low - 0.5, high + 0.5];
        const ticks = linearTicks(low, high, Math.max(2, inner.width / 70)).filter(Number.isInteger);
        return { low, high, ticks, name: String, place: (v) => (v - low) / (high - low) };
      })();
  const px = (v) => margin.left + x.place(v) * inner.width;
  const py = (v) => margin.top + (1 - y.place(v)) * inner.height;

  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": `${chart.title}: ${series.map((s) => data.arms[s.arm].label).join(", ")}` }, host);
  for (const tick of y.ticks) {
    element("line", { class: "gridline", x1: margin.left, x2: margin.left + inner.width, y1: py(tick), y2: py(tick) }, svg);
    element("text", { x: margin.left - 6, y: py(tick) + 4, "text-anchor": "end" }, svg, y.name(tick));
  }
  let freeFrom = -Infinity;
  for (const tick of x.ticks) {
    element("line", { class: "axis", x1: px(tick), x2: px(tick), y1: margin.top + inner.height, y2: margin.top + inner.height + 4 }, svg);
    const half = x.name(tick).length * 3.6;
    if (px(tick) - half < freeFrom) continue;
    element("text", { x: px(tick), y: margin.top + inner.height + 17, "text-anchor": "middle" }, svg, x.name(tick));
    freeFrom = px(tick) + half + 6;
  }
  element("line", { class: "axis", x1: margin.left, x2: margin.left + inner.width, y1: margin.top + inner.height, y2: margin.top + inner.height }, svg);
  element("text", { x: margin.left + inner.width / 2, y: height - 6, "text-anchor": "middle" }, svg, isPath ? chart.xUnit : "Step (optimiser updates)");
  element("text", { x: 12, y: margin.top + inner.height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${margin.top + inner.height / 2})` }, svg, chart.unit);

  const ends = [];
  for (const s of series) {
    const arm = data.arms[s.arm], stroke = `stroke:var(--arm-${s.arm})`;
    const points = isPath ? s.points.map((p) => [px(p[1]), py(p[2])]) : s.steps.map((step, i) => [px(step), py(s.mean[i])]);
    if (s.low) {
      const back = s.steps.map((step, i) => [px(step), py(s.low[i])]).reverse();
      element("path", { d: path([...s.steps.map((step, i) => [px(step), py(s.high[i])]), ...back]) + "Z", style: `fill:var(--arm-${s.arm});opacity:.15` }, svg);
    }
    if (!isPath && chart.kind !== "sparse") element("path", { d: path(s.raw[0].map((step, i) => [px(step), py(s.raw[1][i])])), fill: "none", style: stroke, "stroke-width": 1, opacity: 0.18 }, svg);
    element("path", { class: "curve", "data-arm": s.arm, d: path(points), fill: "none", style: stroke, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": isPath ? "none" : arm.dashes.map((d) => d * 1.5).join(" ") || "none" }, svg);
    const circle = (point, fill, r = 3.5) => element("circle", { cx: point[0], cy: point[1], r, style: `fill:${fill};${stroke}`, "stroke-width": 1.5 }, svg);
    if (chart.kind === "sparse") points.forEach((point) => circle(point, `var(--arm-${s.arm})`, 2.5));
    if (isPath) {
      arrows(points).forEach((d) => element("path", { d, style: `fill:var(--arm-${s.arm})` }, svg));
      circle(points[0], "var(--card)");
      circle(points.at(-1), `var(--arm-${s.arm})`);
    }
    ends.push({ arm: s.arm, x: points.at(-1)[0], y: points.at(-1)[1] });
  }
  if (labels) {
    const right = margin.left + inner.width;
    const lonely = ends.filter((end) => right - end.x > 170);
    for (const end of lonely) element("text", { class: "end", x: end.x + 9, y: end.y + 4, style: `fill:var(--ink-${end.arm})` }, svg, data.arms[end.arm].label);
    const near = ends.filter((end) => !lonely.includes(end));
    const heights = spread(near.map((end) => end.y), 15, margin.top + 4, margin.top + inner.height);
    near.forEach((end, i) => {
      element("line", { x1: end.x + 4, y1: end.y, x2: right + 12, y2: heights[i], style: `stroke:var(--arm-${end.arm})`, "stroke-width": 0.8, opacity: 0.8 }, svg);
      element("text", { class: "end", x: right + 15, y: heights[i] + 4, style: `fill:var(--ink-${end.arm})` }, svg, data.arms[end.arm].label);
    });
  }
  hover(chart, svg, series, { px, py, x, width, height, margin, inner, isPath });
}

/* Small triangles every 70 pixels along a path. */
function arrows(points) {
  const found = [];
  let since = 30;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    since += Math.hypot(x1 - x0, y1 - y0);
    if (since < 70 || i === points.length - 1) continue;
    since = 0;
    const from = points[Math.max(0, i - 3)], angle = Math.atan2(y1 - from[1], x1 - from[0]);
    const corner = (turn, size) => `${(x1 + size * Math.cos(angle + turn)).toFixed(1)} ${(y1 + size * Math.sin(angle + turn)).toFixed(1)}`;
    found.push(`M${corner(0, 6)}L${corner(2.5, 5)}L${corner(-2.5, 5)}Z`);
  }
  return found;
}

function hover(chart, svg, series, { px, py, x, width, margin, inner, isPath }) {
  const cursor = element("line", { class: "cursor", y1: margin.top, y2: margin.top + inner.height, visibility: "hidden" }, svg);
  const dot = element("circle", { r: 5, fill: "none", "stroke-width": 2, visibility: "hidden" }, svg);
  const steps = isPath ? [] : [...new Set(series.flatMap((s) => s.steps))].sort((a, b) => a - b);
  let position = -1;

  const hide = () => {
    tooltip.hidden = true;
    for (const node of [cursor, dot]) node.setAttribute("visibility", "hidden");
  };
  const place = (left, top) => {
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = `${Math.max(6, left + 16 + box.width > innerWidth - 6 ? left - 16 - box.width : left + 16)}px`;
    tooltip.style.top = `${Math.max(6, Math.min(innerHeight - box.height - 6, top - box.height / 2))}px`;
  };
  const swatch = (arm) => `<span class="swatch" style="--c:var(--arm-${arm})"></span>`;
  const showStep = (index, top) => {
    position = index;
    const step = steps[index], box = svg.getBoundingClientRect();
    const rows = series
      .map((s) => [s, s.steps.indexOf(step)])
      .filter(([, i]) => i >= 0)
      .sort(([a, i], [b, j]) => b.mean[j] - a.mean[i])
      .map(([s, i]) => `<tr><th>${swatch(s.arm)}${escapeText(data.arms[s.arm].label)}</th><td>${number(s.mean[i])}</td></tr>`);
    tooltip.innerHTML = `<strong>Step ${step}</strong><table>${rows.join("")}</table>`;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(step));
    cursor.setAttribute("visibility", "visible");
    place(box.left + (px(step) / width) * box.width, top ?? box.top + box.height / 2);
  };
  const showPoint = (s, i, top) => {
    const [step, k3, reward] = s.points[i], box = svg.getBoundingClientRect();
    tooltip.innerHTML = `<strong>${swatch(s.arm)}${escapeText(data.arms[s.arm].label)}, step ${step}</strong><table><tr><th>K3</th><td>${number(k3)}</td></tr><tr><th>Reward</th><td>${number(reward)}</td></tr></table>`;
    dot.setAttribute("cx", px(k3));
    dot.setAttribute("cy", py(reward));
    dot.setAttribute("style", `stroke:var(--arm-${s.arm})`);
    dot.setAttribute("visibility", "visible");
    place(box.left + (px(k3) / width) * box.width, top ?? box.top + box.height / 2);
  };
  const allPoints = isPath ? series.flatMap((s) => s.points.map((p, i) => ({ s, i, x: px(p[1]), y: py(p[2]) }))) : [];

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const at = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    if (isPath) {
      const distance = (p) => Math.hypot(p.x - at[0], p.y - at[1]);
      const near = allPoints.reduce((best, p) => (distance(p) < distance(best) ? p : best));
      position = allPoints.indexOf(near);
      distance(near) < 60 ? showPoint(near.s, near.i, event.clientY) : hide();
    } else {
      const step = x.low + ((at[0] - margin.left) / inner.width) * (x.high - x.low);
      const nearest = steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(steps[best] - step) ? i : best), 0);
      showStep(nearest, event.clientY);
    }
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const count = isPath ? allPoints.length : steps.length;
    const moves = { ArrowLeft: position - 1, ArrowRight: position + 1, Home: 0, End: count - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    position = Math.min(count - 1, Math.max(0, moves[event.key]));
    isPath ? showPoint(allPoints[position].s, allPoints[position].i) : showStep(position);
  });
}

function escapeText(text) {
  const node = document.createElement("span");
  node.textContent = text;
  return node.innerHTML;
}

function drawBars() {
  const host = document.getElementById("chart-timing");
  const { names, colours, seconds } = data.phases;
  const totals = seconds.map((row) => row.reduce((a, b) => a + b, 0));
  const longest = Math.max(...totals.filter((_, arm) => shown.has(arm)), 1e-9);
  const used = names.map((_, i) => i).filter((i) => seconds.some((row) => row[i] > 0));
  const key = used.map((i) => `<span><span class="swatch" style="--c:${colours[i]}"></span>${names[i]}</span>`).join("");
  const rows = data.arms.map((arm, a) => {
    if (!shown.has(a)) return "";
    const parts = used.map((i) => `<i style="width:${((100 * seconds[a][i]) / longest).toFixed(2)}%;background:${colours[i]}" title="${names[i]}: ${number(seconds[a][i])} s"></i>`).join("");
    return `<div class="bar-row"><span>${escapeText(arm.label)}</span><span class="bar">${parts}</span><span>${number(totals[a])} s</span></div>`;
  });
  host.innerHTML = `<div class="bar-key">${key}</div>${rows.join("")}`;
}

function drawAll() {
  tooltip.hidden = true;
  charts.forEach(draw);
  drawBars();
}

for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    const arm = Number(chip.dataset.arm);
    shown.has(arm) ? shown.delete(arm) : shown.add(arm);
    chip.setAttribute("aria-pressed", String(shown.has(arm)));
    for (const row of document.querySelectorAll(`tr[data-arm="${arm}"]`)) row.classList.toggle("off", !shown.has(arm));
    drawAll();
  });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], original = [...body.rows];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const order = { none: "descending", descending: "ascending", ascending: "none" }[head.getAttribute("aria-sort")];
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? order : "none"));
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [one, other] = [value(a), value(b)];
        if (one === "" || other === "") return (one === "") - (other === "");
        return sign * (isNaN(one) ? one.localeCompare(other) : one - other);
      };
      body.append(...(order === "none" ? original : [...original].sort(compare)));
    });
  });
}

let lastWidth = 0;
new ResizeObserver(() => {
  const width = document.documentElement.clientWidth;
  if (width !== lastWidth) {
    lastWidth = width;
    drawAll();
  }
}).observe(document.documentElement);
