const SMALL = [290, 128], LEFT = 50, RIGHT = 6, TOP = 8, BOTTOM = 18;
const SVG = "http://www.w3.org/2000/svg";

// ---- series --------------------------------------------------------------------------------------------------------

function column(run, mode, name) {
  return run.metrics[mode].columns[name];
}

function axisOf(run, mode) { // the x value of every row of a mode
  const { steps, columns } = run.metrics[mode];
  if (whet.view.x === "step" || mode === "eval" && whet.view.x !== "step" && !run.metrics.train.steps.length) return steps;
  const train = run.metrics.train, at = new Map();
  let hours = 0;
  train.steps.forEach((step, i) => {
    hours += ((train.columns["time/step"] || [])[i] || 0) / 3600;
    at.set(step, whet.view.x === "hours" ? hours : (train.columns.num_tokens || [])[i]);
  });
  return steps.map(step => at.has(step) ? at.get(step) : 0);
}

function series(run, mode, name) { // [[x, value, step], ...], without missing values
  const values = column(run, mode, name);
  if (!values) return [];
  const xs = axisOf(run, mode), steps = run.metrics[mode].steps, points = [];
  values.forEach((value, i) => { if (value !== null) points.push([xs[i], value, steps[i]]); });
  return points;
}

function smoothed(points, factor) { // an exponential mean, corrected for its start
  let mean = 0, weight = 0;
  return points.map(([x, value, step]) => {
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return [x, mean / weight, step];
  });
}

function thinned(points, most = 500) { // of each bucket its first, least, greatest and last point
  if (points.length <= most) return points;
  const size = Math.ceil(points.length / (most / 4)), kept = [];
  for (let i = 0; i < points.length; i += size) {
    const bucket = points.slice(i, i + size);
    const low = bucket.reduce((a, b) => b[1] < a[1] ? b : a), high = bucket.reduce((a, b) => b[1] > a[1] ? b : a);
    kept.push(...new Set([bucket[0], ...(low[0] < high[0] ? [low, high] : [high, low]), last(bucket)]));
  }
  return kept;
}

function evalError(run, step) {
  const file = run.completions.find(f => f.mode === "eval" && f.step === step);
  return file ? file.se : null;
}

function appendRows(metrics, found) { // whether there are any
  const before = found.replace ? 0 : metrics.steps.length, count = found.steps.length;
  if (found.replace) { metrics.steps = []; metrics.columns = {}; }
  for (const name of new Set([...Object.keys(metrics.columns), ...Object.keys(found.columns)])) {
    const old = metrics.columns[name] || Array(before).fill(null);
    metrics.columns[name] = old.concat(found.columns[name] || Array(count).fill(null));
  }
  metrics.steps = metrics.steps.concat(found.steps);
  return count > 0 || found.replace;
}

// ---- one chart -----------------------------------------------------------------------------------------------------

function chart(title, names, help, floor) {
  const lines = [], v = whet.view, large = v.large.has(title), from = v.from === "" ? -Infinity : Number(v.from), to = v.to === "" ? Infinity : Number(v.to);
  const [W, H] = large ? [Math.max(SMALL[0], document.getElementById("main").clientWidth - 70), 400] : SMALL;
  const seen = points => points.filter(([x]) => x >= from && x <= to);
  whet.runs.forEach((run, i) => {
    if (v.hidden.has(i)) return;
    for (const mode of ["train", "eval"]) {
      if (names[0] === "loss" && column(run, mode, "reward") || names[0] === "frac_reward_zero_std" && mode === "eval") continue;
      const name = names.find(n => seen(series(run, mode, n)).length);
      if (!name) continue;
      const points = series(run, mode, name), smooth = mode === "train" && v.smooth > 0 ? smoothed(points, v.smooth) : points;
      lines.push({ run, i, mode, name, points: seen(points), smooth: seen(smooth) });
    }
  });
  if (!lines.length) return null;
  const box = el("div", { class: large ? "plot large" : "plot" }), value = el("span"), smooth = v.smooth;
  const heading = el("button", { text: title, title: [help, lines[0].name, large ? "a click makes it small" : "a click makes it large"].filter(Boolean).join("\n"), "aria-label": `${title}, ${large ? "small" : "large"}`, "aria-pressed": String(large) });
  heading.onclick = () => {
    if (large) v.large.delete(title); else v.large.add(title);
    const other = chart(title, names, help, floor);
    box.replaceWith(other);
    other.querySelector("button").focus();
  };
  box.append(el("header", {}, heading, value));
  const unit = /^memory\/|^perf\/peak_memory$/.test(lines[0].name) ? "B" : "", number = value => short(value) + unit;
  const errorAt = (line, step) => line.mode === "eval" && ["reward", "accuracy"].includes(line.name) && evalError(line.run, step) || 0;
  const xs = lines.flatMap(l => [l.points[0][0], last(l.points)[0]]);
  const ys = lines.flatMap(l => l.points.flatMap(([, v, step]) => { const error = errorAt(l, step); return error ? [v - error, v + error] : [v]; }));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const least = Math.min(...ys.filter(y => y > 0)), log = v.log && Math.min(...ys) >= 0 && least < Infinity;
  const scale = log ? y => Math.log10(Math.max(y, least)) : y => y;
  const [low, high] = log ? range(ys.map(scale)) : range(ys, floor);
  const x = v => LEFT + (x1 > x0 ? (v - x0) / (x1 - x0) : .5) * (W - LEFT - RIGHT);
  const y = v => H - BOTTOM - (Math.min(Math.max(scale(v), low), high) - low) / (high - low) * (H - BOTTOM - TOP);
  const path = points => thinned(points).map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `${title}: ${lines.map(l => `${l.run.name} ${l.mode} last ${short(last(l.points)[1])}`).join(", ")}` });
  for (const tick of (log ? decades : ticks)(low, high, large ? 8 : 3)) {
    drawing.append(svg("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: y(tick), y2: y(tick) }));
    drawing.append(svg("text", { x: LEFT - 4, y: y(tick) + 3, "text-anchor": "end" }, number(tick)));
  }
  drawing.append(svg("text", { x: LEFT, y: H - 4 }, short(x0)), svg("text", { x: W - RIGHT, y: H - 4, "text-anchor": "end" }, short(x1)));
  for (const line of lines) {
    const colour = colourOf(line.i);
    if (line.mode === "train") {
      if (smooth > 0) drawing.append(svg("path", { class: "raw", d: path(line.points), stroke: colour }));
      if (line.smooth.length > 1) drawing.append(svg("path", { class: "smooth", d: path(line.smooth), stroke: colour }));
      else drawing.append(svg("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 2.4, fill: colour }));
      continue;
    }
    for (const [a, b, step] of thinned(line.points, 120)) {
      const error = errorAt(line, step);
      if (error) drawing.append(svg("line", { class: "error", x1: x(a), x2: x(a), y1: y(b - error), y2: y(b + error), stroke: colour }));
      const dot = svg("circle", { cx: x(a), cy: y(b), r: 2.6, fill: "var(--card)", stroke: colour, "stroke-width": 1.5 });
      dot.append(svg("title", {}, `evaluation at step ${step}: ${short(b)}${error ? ` ± ${short(error)} (standard error)` : ""}`));
      drawing.append(dot);
    }
  }
  const shown = lines.filter(l => l.mode === "train").length ? lines.filter(l => l.mode === "train") : lines;
  const values = numbers => value.append(...shown.map((l, k) => el("i", { class: "value", style: shown.length > 1 ? `color:${colourOf(l.i)}` : null, text: number(numbers[k]) })));
  const rest = () => { value.replaceChildren(); values(shown.map(l => last(l.smooth)[1])); };
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  drawing.append(cursor);
  const nearest = at => shown.map(l => l.points.reduce((a, b) => Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
  const place = event => { const bounds = drawing.getBoundingClientRect(); return (event.clientX - bounds.left) / bounds.width * W; };
  const point = points => {
    cursor.setAttribute("x1", x(points[0][0])); cursor.setAttribute("x2", x(points[0][0]));
    cursor.setAttribute("visibility", "visible");
    value.textContent = `step ${points[0][2]}: `;
    values(points.map(p => p[1]));
  };
  const open = step => openStep(shown[0].run, shown[0].mode, step);
  drawing.onpointermove = event => point(nearest(place(event)));
  drawing.onpointerleave = drawing.onblur = () => { cursor.setAttribute("visibility", "hidden"); rest(); };
  let pressed = 0;
  const xAt = at => x0 + (at - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
  drawing.onpointerdown = event => { pressed = place(event); };
  drawing.onclick = event => { // a click opens the step, and a drag shows what it has passed over
    const released = place(event), [a, b] = [pressed, released].sort((a, b) => a - b).map(xAt);
    if (Math.abs(released - pressed) < 8) return open(nearest(released)[0][2]);
    const round = at => v.x === "hours" ? at.toPrecision(4) : String(Math.round(at));
    [v.from, v.to] = [round(a), round(b)];
    whet.redraw();
  };
  let at = shown[0].points.length; // where the arrow keys are
  drawing.onkeydown = event => {
    const points = shown[0].points, step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter") open(points[Math.min(at, points.length - 1)][2]);
    if (!step) return;
    event.preventDefault();
    at = Math.min(Math.max(at + step, 0), points.length - 1);
    point(nearest(x(points[at][0])));
  };
  rest();
  box.append(drawing);
  return box;
}

function range(values, floor) { // the axis: all values, but for single spikes far beyond the others
  const sorted = [...values].sort((a, b) => a - b), at = q => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
  let low = sorted[0], high = last(sorted);
  const wide = at(.98) - at(.02);
  if (sorted.length > 50 && wide > 0) { low = Math.max(low, at(.02) - 2 * wide); high = Math.min(high, at(.98) + 2 * wide); }
  if (floor !== undefined) low = Math.min(floor, low);
  if (floor === 0 && high === 0) return [0, 1];
  return high > low ? [low, high] : [low - (Math.abs(low) / 10 || .5), high + (Math.abs(high) / 10 || .5)];
}

function ticks(low, high, count) { // some round numbers from low to high: two to five for a count of 3
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map(f => f * power).filter(f => f <= rough).pop() || power, found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * size; i++) found.push(i * size);
  return found.filter((_, i) => found.length < 2 * count || i % 2 === 0);
}

function decades(low, high, count) { // 1, 2, 5, 10 ... from 10 ** low to 10 ** high, or powers of ten alone
  const all = [], powers = [];
  for (let k = Math.floor(low); k <= high; k++) {
    for (const digit of [1, 2, 5]) {
      const value = Number(`${digit}e${k}`), place = Math.log10(value);
      if (place < low - 1e-9 || place > high + 1e-9) continue;
      all.push(value);
      if (digit === 1) powers.push(value);
    }
  }
  if (all.length < 2) return ticks(10 ** low, 10 ** high, count);
  return all.length < 2 * count ? all : powers.filter((_, i) => i % Math.ceil(powers.length / (2 * count)) === 0);
}

function openStep(run, mode, step) { // the completions nearest to a step, of its mode if there are any
  const own = run.completions.filter(f => f.mode === mode), files = own.length ? own : run.completions;
  if (!files.length) return;
  const near = files.reduce((a, b) => Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a);
  go("completions", near.key);
}
