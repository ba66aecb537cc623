"use strict";
// The report of runs. Data arrive by whet.receive(key, text) from the scripts in data/: "runs" first, then of a step's
// completions an index and parts (completions.js). Every text of a run is set as textContent, never as HTML.

const PANELS = [ // title, metrics (the first that a run has), what it is, lowest value of the axis, log axis
  ["Learning", [
    ["reward", ["reward"], "Mean of the completions' total rewards; dots are evaluations."],
    ["accuracy", ["accuracy", "rewards/accuracies", "mean_token_accuracy"], "Share of right answers.", 0],
    ["pass@k", ["pass@4", "pass@8", "pass@2", "pass@16"], "Chance that one of k completions is right.", 0],
    ["loss", ["loss"], "What the optimizer minimises."],
    ["margin", ["rewards/margins", "margin"], "How far the chosen answers are above the rejected ones."],
    ["groups without signal", ["frac_reward_zero_std"], "Share of groups whose completions all have the same reward: they teach nothing.", 0],
  ]],
  ["Completions", [
    ["tokens of a completion", ["completions/mean_length"], "Mean length, with the end token.", 0],
    ["share truncated", ["completions/clipped_ratio"], "Share of completions that reached the limit of tokens.", 0],
    ["turns", ["turns/mean"], "Turns of the model in an episode.", 0],
  ]],
  ["Policy", [
    ["KL to the reference", ["kl"], "How far the policy has moved from the reference model, in nats a token."],
    ["KL to the sampler", ["sampling/kl_to_inference", "sampling/kl_approx"], "Between the policy that sampled and the one that is trained, in nats a token."],
    ["sampler and trainer apart", ["sampling/sampling_logp_difference/mean"], "Mean |difference| of the log-probabilities of sampler and trainer with the same weights.", 0],
    ["entropy", ["entropy/token_mean", "entropy"], "Of the next token, in nats: 0 is a policy that is certain.", 0],
    ["share clipped", ["clip_ratio/region_mean", "pg_clipfrac"], "Share of tokens whose ratio left the clip range.", 0],
    ["effective sample size", ["sampling/ess"], "Of the importance weights, as a share: 1 is on policy.", 0],
  ]],
  ["Optimizer", [
    ["gradient norm", ["grad_norm"], "Before clipping.", 0],
    ["learning rate", ["learning_rate"], "", 0],
    ["explained variance", ["critic/explained_variance"], "Of the critic: 1 is perfect, 0 no better than a constant."],
  ]],
  ["Speed", [
    ["tokens per second", ["perf/tokens_per_second"], "Trained tokens by the time of the whole step.", 0],
    ["seconds a step", ["time/step", "perf/global_step_time"], "", 0],
    ["share idle", ["perf/idle_share"], "Of a step's time: no phase ran, or it waited for rows or tools.", 0],
    ["model FLOP utilisation", ["perf/mfu"], "Of the updates, as a share of the GPU's peak.", 0],
    ["TFLOP/s of the updates", ["perf/update_tflops"], "What the model computes in the updates, in 10¹² operations a second.", 0],
    ["peak memory", ["memory/peak_allocated", "perf/peak_memory"], "Most bytes so far: of torch's allocator on a GPU, else of the process.", 0],
  ]],
];
const PHASES = { data: "#6c8ecb", rollout: "#4c78a8", rewards: "#f2a541", scoring: "#8e6bbf", update: "#3aa675", weight_sync: "#9aa3ad", eval: "#d0708f", checkpoint: "#a6763c" };
const OTHER_COLORS = ["#5fb3b3", "#c17fd0", "#7f9a3d", "#d98c5f"];

const PARTS = 200; // parts of completions that are held

const whet = {
  data: {}, waiting: {}, held: [], steps: {}, runs: [],
  view: { tab: "overview", smooth: 0.8, x: "step", from: "", to: "", log: false, hidden: new Set(), large: new Set(), open: new Set(["general"]), all: "", setting: "", differing: false, file: null, sort: "row", colour: "logprob", text: "", low: "", high: "", short: "", long: "", end: "", target: null },
  receive(key, text) { // JSON, or lines of it: a browser reads a text several times as fast as the same data as a program
    const value = this.data[key] = key.includes(".") ? text.split("\n") : JSON.parse(text);
    if (key.includes(".")) this.held.push(key);
    if (this.held.length > PARTS) delete this.data[this.held.shift()];
    (this.waiting[key] || []).forEach(([then]) => then(value));
    delete this.waiting[key];
  },
  load(key, then, failed) {
    if (key in this.data) return then(this.data[key]);
    if (this.waiting[key]) return void this.waiting[key].push([then, failed]);
    this.waiting[key] = [[then, failed]];
    const script = document.createElement("script"), done = () => script.remove();
    script.src = `data/${encodeURIComponent(key)}.js`;
    script.onload = done;
    script.onerror = () => {
      const waited = this.waiting[key];
      delete this.waiting[key];
      done();
      waited.forEach(([, f]) => f());
    };
    document.head.append(script);
  },
  forget(run) { // the completions of a run that was resumed from an earlier step
    for (const key of Object.keys(this.data)) if (key.startsWith(`${run}-`)) delete this.data[key];
    for (const key of Object.keys(this.steps)) if (key.startsWith(`${run}-`)) delete this.steps[key];
    this.held = this.held.filter(key => key in this.data);
  },
  start(live) {
    if (!this.data.runs) {
      document.getElementById("main").append(el("p", { text: "data/runs.js is missing: keep index.html beside its folder data/." }));
      return;
    }
    this.runs = this.data.runs;
    const names = this.runs.map(r => r.name);
    document.getElementById("title").textContent = names.join(" · ");
    const tabs = document.getElementById("tabs");
    for (const [id, tab] of Object.entries(TABS)) {
      const button = el("button", { role: "tab", id: `tab-${id}`, "aria-controls": "main", text: tab.title });
      button.onclick = () => go(id);
      tabs.append(button);
    }
    tabs.onkeydown = event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const ids = Object.keys(TABS), next = ids[(ids.indexOf(this.view.tab) + step + ids.length) % ids.length];
      go(next);
      document.getElementById(`tab-${next}`).focus();
    };
    window.onhashchange = () => location.hash !== this.routed && this.route();
    this.route();
    if (live) setInterval(() => this.update(), 2000);
  },
  async update() { // of a run that goes on: the rows behind those that are here
    if (this.updating || document.hidden) return;
    this.updating = true;
    try {
      let changed = false, more = false;
      for (const [i, run] of this.runs.entries()) {
        const at = ["train", "eval"].map(mode => `${mode}=${run.metrics[mode].steps.length}&${mode}_step=${last(run.metrics[mode].steps) ?? -1}`);
        const response = await fetch(`update?run=${i}&${at.join("&")}`);
        if (!response.ok) throw new Error(await response.text());
        const found = await response.json();
        if (found.metrics.train.replace) this.forget(i);
        for (const mode of ["train", "eval"]) changed = appendRows(run.metrics[mode], found.metrics[mode]) || changed;
        more = more || found.completions.length !== run.completions.length;
        run.completions = found.completions;
        run.warnings = found.warnings;
      }
      document.getElementById("live").textContent = "live";
      if (this.view.tab === "completions" && document.querySelector(".steps")) more && this.drawSteps();
      else if (changed || more) this.redraw();
    } catch (error) {
      document.getElementById("live").textContent = "not reached: the page shows what it had";
    }
    this.updating = false;
  },
  route() {
    this.routed = location.hash;
    const [tab, key, group, item] = decodeURIComponent(location.hash.slice(1)).split("/");
    this.view.tab = tab in TABS ? tab : "overview";
    if (this.view.tab === "completions" && key) {
      this.view.file = key;
      this.view.target = group === undefined ? null : [Number(group), Number(item)];
    }
    this.draw();
  },
  draw() {
    for (const id of Object.keys(TABS)) {
      const button = document.getElementById(`tab-${id}`);
      button.setAttribute("aria-selected", id === this.view.tab);
      button.tabIndex = id === this.view.tab ? 0 : -1;
    }
    document.getElementById("main").replaceChildren(TABS[this.view.tab].draw());
  },
  redraw() { // with the focus where it was
    const name = node => (node.getAttribute("aria-label") || "").split(":")[0], focused = name(document.activeElement);
    this.draw();
    const again = focused && [...document.querySelectorAll("#main [aria-label]")].find(node => name(node) === focused);
    if (again) again.focus({ preventScroll: true });
  },
};

function go(...parts) {
  const hash = "#" + parts.map(encodeURIComponent).join("/");
  if (location.hash !== hash) location.hash = hash;
  whet.route(); // now, not at the event: the next key may come before it
}

// ---- elements ------------------------------------------------------------------------------------------------------

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function svg(name, attributes = {}, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12 || (size < 1e-3 && size > 0)) return value.toExponential(1);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3)));
}

const seconds = s => s >= 5400 ? `${(s / 3600).toFixed(1)} h` : s >= 90 ? `${(s / 60).toFixed(0)} min` : `${s.toFixed(1)} s`;
const last = list => list[list.length - 1];
const colourOf = i => `var(--run${i % 6})`;
const selected = (options, value, onchange, label) => {
  const select = el("select", { onchange: () => onchange(select.value), "aria-label": label });
  for (const [id, title] of options) select.append(el("option", { value: id, text: title, selected: id === value }));
  return select;
};

// ---- the tabs ------------------------------------------------------------------------------------------------------

function legend() {
  if (whet.runs.length < 2) return null;
  const { hidden } = whet.view;
  const toggle = i => { if (hidden.has(i)) hidden.delete(i); else if (hidden.size < whet.runs.length - 1) hidden.add(i); whet.redraw(); };
  return el("div", { class: "runs" }, ...whet.runs.map((run, i) => el("button", { title: "show or hide this run", "aria-label": `run ${run.name}`, "aria-pressed": String(!hidden.has(i)), onclick: () => toggle(i) }, el("i", { class: "swatch", style: `background:${colourOf(i)}` }), run.name)));
}

function plotControls(redraw) {
  const slider = el("input", { type: "range", min: 0, max: .99, step: .01, value: whet.view.smooth, "aria-label": "smoothing" });
  slider.oninput = () => { whet.view.smooth = Number(slider.value); redraw(); };
  const x = selected([["step", "steps"], ["tokens", "tokens"], ["hours", "hours"]], whet.view.x, v => { Object.assign(whet.view, { x: v, from: "", to: "" }); whet.redraw(); }, "horizontal axis");
  const field = (name, placeholder) => { const input = el("input", { type: "number", step: "any", min: 0, placeholder, "aria-label": `${placeholder} on the horizontal axis`, value: whet.view[name] }); input.onchange = () => { whet.view[name] = input.value; redraw(); }; return input; };
  const log = el("input", { type: "checkbox", checked: whet.view.log, "aria-label": "logarithmic" });
  log.onchange = () => { whet.view.log = log.checked; redraw(); };
  return el("div", { class: "bar" }, el("label", {}, "smoothing ", slider), el("label", {}, "over ", x, " ", field("from", "from"), " ", field("to", "to")), el("label", {}, log, " logarithmic"),
    el("span", { class: "dim", text: "dots: evaluations · a click, or Enter after the arrow keys, opens the step's completions; a drag shows these steps alone" }));
}

function overview() {
  const part = el("section"), plots = el("div");
  part.append(...[legend(), tiles(), warnings()].filter(Boolean));
  const draw = () => plots.replaceChildren(...[PANELS[0], rewardPanels(), ...PANELS.slice(1)].flatMap(([title, panels]) => {
    const drawn = panels.map(panel => chart(...panel)).filter(Boolean);
    return drawn.length ? [el("h2", { text: title }), el("div", { class: "plots" }, ...drawn)] : [];
  }));
  draw();
  part.append(plotControls(draw), plots);
  return part;
}

function rewardPanels() { // one for each reward function, if a run has several
  const names = new Set(whet.runs.flatMap(run => ["train", "eval"].flatMap(mode => column(run, mode, "reward") ? Object.keys(run.metrics[mode].columns) : [])));
  const functions = [...names].filter(name => /^rewards\/[^/]+$/.test(name) && names.has(`${name}/mean`));
  return ["Rewards by function", functions.length > 1 ? functions.map(name => [name.slice(8), [name], "Mean of this function's rewards."]) : []];
}

function tiles() {
  const run = whet.runs.find((_, i) => !whet.view.hidden.has(i)), box = el("div", { class: "tiles" });
  const tile = (name, text, help) => box.append(el("div", { class: "tile", title: help }, el("span", { text: name }), el("b", { text })));
  const first = run.metrics.train.steps.length ? "train" : "eval";
  if (whet.runs.length > 1) tile("run", run.name);
  tile("steps", String(last(run.metrics[first].steps)));
  for (const [mode, name] of [["eval", "accuracy"], ["eval", "reward"], ["eval", "loss"], ["train", "reward"], ["train", "loss"]]) {
    const points = series(run, mode, name);
    if (!points.length || box.children.length > (whet.runs.length > 1 ? 3 : 2)) continue;
    if (name === "reward" && column(run, mode, "accuracy")) continue;
    const tenth = mode === "eval" ? 1 : Math.ceil(points.length / 10), mean = some => some.reduce((a, p) => a + p[1], 0) / some.length;
    tile(mode === "eval" ? `held-out ${name}` : name, `${short(mean(points.slice(0, tenth)))} → ${short(mean(points.slice(-tenth)))}`, tenth > 1 ? `Means of the first and the last ${tenth} steps` : null);
  }
  const times = column(run, "train", "time/step"), tokens = column(run, "train", "num_tokens");
  if (times) tile("time of all steps", seconds(times.reduce((a, b) => a + (b || 0), 0)));
  if (tokens) tile("completion tokens", short(last(tokens.filter(v => v !== null))));
  if (run.config["actor.model"]) tile("model", String(run.config["actor.model"]).split("/").filter(Boolean).slice(-1)[0]);
  return box;
}

function warnings() {
  const found = whet.runs.flatMap(run => run.warnings.map(w => ({ ...w, run })));
  if (!found.length) return null;
  const lines = found.map(w => el("p", {}, el("b", { text: `${whet.runs.length > 1 ? w.run.name + ", " : ""}step ${w.step}: ` }), w.message));
  return el("div", { class: "warnings", role: "note" }, ...lines);
}

function allMetrics() {
  const part = el("section"), box = el("div");
  const names = [...new Set(whet.runs.flatMap(run => ["train", "eval"].flatMap(mode => Object.keys(run.metrics[mode].columns))))];
  const find = el("input", { type: "search", placeholder: "find a metric", value: whet.view.all, "aria-label": "find a metric" });
  const draw = () => {
    const groups = { general: [] };
    for (const name of names.filter(n => n.includes(whet.view.all))) {
      const group = name.includes("/") ? name.split("/")[0] : "general";
      (groups[group] = groups[group] || []).push(name);
    }
    box.replaceChildren(...Object.entries(groups).filter(([, members]) => members.length).map(([group, members]) => {
      const details = el("details", { open: whet.view.all !== "" || whet.view.open.has(group) }, el("summary", { text: `${group} (${members.length})` }));
      const fill = () => { if (details.open && details.children.length === 1) details.append(el("div", { class: "plots" }, ...members.map(name => chart(name, [name], "")))); };
      details.ontoggle = () => {
        if (whet.view.all === "") whet.view.open[details.open ? "add" : "delete"](group);
        fill();
      };
      fill();
      return details;
    }));
    if (!box.children.length) box.append(el("p", { class: "dim", text: `no metric has "${whet.view.all}" in its name` }));
  };
  find.oninput = () => { whet.view.all = find.value; draw(); };
  draw();
  const controls = plotControls(draw);
  controls.prepend(find);
  part.append(...[legend(), controls, box].filter(Boolean));
  return part;
}

function phasesOf(run) { // the parts of a step's time, without the parts of those parts
  const names = Object.keys(run.metrics.train.columns).filter(n => /^time\/[^/]+$/.test(n) && n !== "time/step");
  return names.map(n => n.slice(5));
}

function timeTab() {
  const part = el("section");
  whet.runs.forEach(run => {
    const phases = phasesOf(run), steps = run.metrics.train.steps;
    if (!phases.length) return part.append(el("p", { class: "dim", text: `${run.name} has no times of steps` }));
    const colours = Object.fromEntries(phases.map((p, i) => [p, PHASES[p] || OTHER_COLORS[i % OTHER_COLORS.length]]));
    const whole = column(run, "train", "time/step") || [], per = Math.max(1, Math.ceil(steps.length / 300));
    const bars = [];
    for (let i = 0; i < steps.length; i += per) {
      const rows = steps.slice(i, i + per).map((_, k) => i + k), mean = f => rows.reduce((a, r) => a + (f(r) || 0), 0) / rows.length;
      const parts = phases.map(p => [p, mean(r => column(run, "train", `time/${p}`)[r])]);
      const known = parts.reduce((a, [, v]) => a + v, 0);
      bars.push({ step: steps[i], parts: [...parts, ["other", Math.max(0, mean(r => whole[r]) - known)]] });
    }
    colours.other = "#c9ced6";
    const w = Math.min(1200, Math.max(300, document.getElementById("main").clientWidth - 70)), h = 170, total = bar => bar.parts.reduce((a, [, v]) => a + v, 0);
    const sorted = bars.map(total).sort((a, b) => a - b), most = Math.min(last(sorted), 3 * sorted[Math.floor(sorted.length / 2)]) || 1;
    const drawing = svg("svg", { viewBox: `0 0 ${w} ${h + 16}`, role: "img", "aria-label": `time of each step of ${run.name} by phase` });
    const width = (w - 50) / bars.length;
    bars.forEach((bar, i) => {
      let top = h;
      for (const [phase, value] of bar.parts) {
        const height = Math.min(value / most * (h - 10), top);
        top -= height;
        if (height < .2) continue;
        const rect = svg("rect", { x: 46 + i * width, y: top, width: Math.max(.6, width - (width > 4 ? 1 : 0)), height, fill: colours[phase] });
        rect.append(svg("title", {}, `step ${bar.step}: ${phase} ${value.toFixed(2)} s`));
        drawing.append(rect);
      }
    });
    drawing.append(svg("text", { x: 42, y: 16, "text-anchor": "end" }, seconds(most)), svg("text", { x: 46, y: h + 13 }, `step ${steps[0]}`), svg("text", { x: w, y: h + 13, "text-anchor": "end" }, `step ${last(steps)}`));
    const sums = [...phases, "other"].map(p => [p, bars.reduce((a, b) => a + (b.parts.find(q => q[0] === p) || [0, 0])[1] * per, 0)]).sort((a, b) => b[1] - a[1]);
    const all = sums.reduce((a, [, v]) => a + v, 0) || 1;
    const table = el("table", {}, el("tr", {}, el("th", { text: "phase" }), el("th", { class: "n", text: "time" }), el("th", { class: "n", text: "share" })));
    for (const [phase, value] of sums) table.append(el("tr", {}, el("td", {}, el("i", { class: "swatch", style: `background:${colours[phase]}` }), phase), el("td", { class: "n", text: seconds(value) }), el("td", { class: "n", text: `${(100 * value / all).toFixed(1)} %` })));
    part.append(el("h2", { text: `${run.name}: seconds of a step, by phase` }), el("div", { class: "plot" }, drawing), table);
  });
  return part;
}

function evaluationsTab() {
  const part = el("section"), names = ["reward", "accuracy", "loss", "completions/mean_length", "completions/clipped_ratio"];
  whet.runs.forEach(run => {
    const { steps, columns } = run.metrics.eval;
    part.append(el("h2", { text: run.name }));
    if (!steps.length) return part.append(el("p", { class: "dim", text: "no evaluations" }));
    const extra = Object.keys(columns).filter(n => n.startsWith("pass@")), shown = [...names, ...extra].filter(n => columns[n]);
    const table = el("table", {}, el("tr", {}, el("th", { text: "step" }), ...shown.map(n => el("th", { class: "n", text: n }))));
    steps.forEach((step, i) => {
      const error = evalError(run, step);
      const row = el("tr", {}, el("td", {}, run.completions.some(f => f.mode === "eval" && f.step === step) ? el("a", { href: `#completions/${last(run.completions.filter(f => f.mode === "eval" && f.step === step)).key}`, text: step }) : String(step)));
      for (const name of shown) {
        const value = columns[name][i], spread = error && (name === "reward" || name === "accuracy") ? ` ± ${short(error)}` : "";
        row.append(el("td", { class: "n", text: value === null ? "–" : short(value) + spread }));
      }
      table.append(row);
    });
    part.append(el("div", { class: "scroll" }, table), el("p", { class: "dim", text: "± is one standard error, by prompts." }));
  });
  return part;
}

function configTab() {
  const part = el("section"), box = el("div"), v = whet.view;
  const find = el("input", { type: "search", placeholder: "find a setting", value: v.setting, "aria-label": "find a setting" });
  const differing = el("input", { type: "checkbox", checked: v.differing, "aria-label": "differences alone" });
  const draw = () => box.replaceChildren(...[["Configuration", "config"], ["Environment", "environment"]].flatMap(([title, key]) => {
    const table = el("table", {}, el("tr", {}, el("th", { text: "key" }), ...whet.runs.map(run => el("th", { text: run.name }))));
    for (const name of new Set(whet.runs.flatMap(run => Object.keys(run[key])))) {
      const texts = whet.runs.map(run => name in run[key] ? typeof run[key][name] === "string" ? run[key][name] : JSON.stringify(run[key][name]) : "–");
      const differs = new Set(texts).size > 1;
      if (!`${name} ${texts.join(" ")}`.includes(v.setting) || v.differing && !differs) continue;
      table.append(el("tr", { class: differs ? "differs" : null }, el("td", { text: name }), ...texts.map(text => el("td", { text }))));
    }
    return [el("h2", { text: title }), table.children.length > 1 ? el("div", { class: "scroll" }, table) : el("p", { class: "dim", text: "none" })];
  }));
  find.oninput = () => { v.setting = find.value; draw(); };
  differing.onchange = () => { v.differing = differing.checked; draw(); };
  draw();
  part.append(el("div", { class: "bar" }, find, whet.runs.length > 1 ? el("label", {}, differing, " differences alone") : null), box);
  return part;
}

const TABS = {
  overview: { title: "Overview", draw: overview },
  metrics: { title: "All metrics", draw: allMetrics },
  completions: { title: "Completions", draw: completionsTab },
  evaluations: { title: "Evaluations", draw: evaluationsTab },
  time: { title: "Time", draw: timeTab },
  config: { title: "Configuration", draw: configTab },
};
