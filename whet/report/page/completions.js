// ---- the completions of a step ---------------------------------------------------------------------------------------
// Of a step the page has an index: the numbers of all completions. Texts come in segments of at most some 20,000
// characters, and these in parts, which are loaded when they are drawn or searched: report/completions.py. A part is lines
// of JSON. What is in sight is drawn first, and the rest when the reader comes near it.

const ITEM_WIDTH = 236; // least pixels of a completion, as in page.css
const FIRST_GROUPS = 2, MORE_GROUPS = 8; // groups that are drawn at once
const FIRST_TEXT = 2000; // characters of a completion that are drawn at once
const LONG_TEXT = 20000; // of a prompt or a message
const TRANSCRIPT = 100; // segments of a transcript that is read whole and shown by its messages
const LISTS = ["len", "lp", "ratio", "ent", "adv", "vs"]; // of a segment, a value for each token

const loaded = key => new Promise((then, failed) => whet.load(key, then, () => failed(new Error(`data/${key}.js is missing`))));

class Step {
  constructor(key, index) {
    const floats = text => new Float32Array(bytesOf(text)), n = new Int32Array(bytesOf(index.n)), size = index.sizes.length;
    Object.assign(this, index, { n, r: floats(index.r), a: floats(index.a), f: index.f.map(floats), end: new Uint8Array(bytesOf(index.end)) });
    Object.assign(this, { key, count: n.length, search: null, orders: {}, items: new Int32Array(size + 1), prompts: new Int32Array(size + 1) });
    for (let g = 0; g < size; g++) { // items: the first completion of each group; prompts: the first segment
      this.items[g + 1] = this.items[g] + this.sizes[g];
      this.prompts[g + 1] = this.prompts[g] + 1 + this.sizes[g];
      for (let i = this.items[g]; this.segments && i < this.items[g + 1]; i++) this.prompts[g + 1] += this.segments[i] - 1;
    }
  }
  numSegments(i) { return this.segments ? this.segments[i] : 1; }
  first(i) { // the first segment of a completion
    const g = lastAtMost(this.items, i, this.sizes.length);
    let number = this.prompts[g] + 1 + i - this.items[g];
    for (let k = this.items[g]; this.segments && k < i; k++) number += this.segments[k] - 1;
    return number;
  }
  order(sort) { // the groups in an order
    if (sort in this.orders) return this.orders[sort];
    const keys = new Float64Array(this.sizes.length);
    if (sort !== "row") for (let g = 0; g < keys.length; g++) keys[g] = keyOf(this, g, sort);
    return this.orders[sort] = inOrder(keys, sort === "worst" ? 1 : -1);
  }
  async segmentsOf(numbers) { // the segments with these numbers, by number
    const found = new Map(), parts = new Map();
    for (const n of numbers) {
      const p = lastAtMost(this.parts, n, this.parts.length);
      parts.set(p, [...(parts.get(p) || []), n]);
    }
    await Promise.all([...parts].map(async ([p, wanted]) => {
      const part = await loaded(`${this.key}.${p}`);
      for (const n of wanted) found.set(n, JSON.parse(part[n - this.parts[p]]));
    }));
    return found;
  }
  async textOf(i) {
    const all = Array.from({ length: this.numSegments(i) }, (_, k) => this.first(i) + k), found = await this.segmentsOf(all);
    return all.map(number => found.get(number).t).join("");
  }
  async whole(i) { // a completion with all its segments, as it is saved
    const digits = value => Number(value.toPrecision(5));
    const found = { r: digits(this.r[i]), f: this.f.map(f => digits(f[i])), a: digits(this.a[i]), end: this.ends[this.end[i]], n: this.n[i], text: "", tokens: "" };
    for (let k = 0; k < this.numSegments(i); k++) {
      const { t, k: own, ...rest } = (await this.segmentsOf([this.first(i) + k])).get(this.first(i) + k);
      found.text += t;
      found.tokens += own ?? t;
      for (const [name, value] of Object.entries(rest)) found[name] = LISTS.includes(name) ? (found[name] || []).concat(value) : value;
    }
    if (!found.len) delete found.tokens;
    return found;
  }
  async find(text, progress) { // the completions with a text in themselves or in their prompt; null if another search began
    if (this.search && this.search.text === text && this.search.done) return this.search;
    const search = this.search = { text, hits: new Uint8Array(this.count), at: new Map(), done: false };
    let group = -1, i = -1, left = 0, tail = "", inPrompt = false; // left: segments of completion i
    for (const [p, start] of this.parts.entries()) {
      progress(p, this.parts.length);
      const part = await loaded(`${this.key}.${p}`);
      if (this.search !== search) return null;
      for (const [k, line] of part.entries()) {
        const number = start + k, segment = JSON.parse(line);
        if (number === this.prompts[group + 1]) {
          group++;
          inPrompt = segment.prompt.toLowerCase().includes(text);
          continue;
        }
        if (left === 0) {
          left = this.numSegments(++i);
          tail = "";
          search.hits[i] = inPrompt ? 1 : 0;
        }
        left--;
        const own = tail + segment.t.toLowerCase(), place = own.indexOf(text);
        if (place >= 0 && !search.at.has(i)) { search.hits[i] = 1; search.at.set(i, [number, Math.max(0, place - tail.length)]); }
        tail = own.slice(own.length - text.length + 1);
      }
    }
    search.done = true;
    return search;
  }
}

function lastAtMost(list, value, count) { // the place of the last of the first count numbers that is at most value
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (list[middle] <= value) low = middle; else high = middle - 1;
  }
  return low;
}

const bytesOf = text => Uint8Array.fromBase64 ? Uint8Array.fromBase64(text).buffer : Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;

function inOrder(values, sign) { // the places of numbers, the least sign * number first and NaN last
  const count = values.length, places = new Int32Array(count), keys = new Float64Array(count), words = new Int32Array(keys.buffer);
  for (let i = 0; i < count; i++) {
    keys[i] = Number.isNaN(values[i]) ? Number.MAX_VALUE : sign * values[i] + 0;
    words[2 * i] = keys[i] < 0 ? ~i : i; // the place, in the bits beyond the sixth digit: numbers alone sort ten times as fast
  }
  keys.sort();
  for (let k = 0; k < count; k++) places[k] = keys[k] < 0 ? ~words[2 * k] : words[2 * k];
  return places;
}

async function stepOf(key) {
  const index = await loaded(key);
  return whet.steps[key] = whet.steps[key] || new Step(key, index);
}

// ---- the tab -------------------------------------------------------------------------------------------------------

const FILTERS = ["low", "high", "short", "long", "end", "text"];

function completionsTab() {
  const part = el("section"), listed = () => whet.runs.flatMap((run, i) => run.completions.map(f => ({ ...f, run, i }))), files = listed();
  if (!files.length) return el("p", { class: "dim", text: "The run folder has no completions." });
  let at = files.findIndex(f => f.key === whet.view.file);
  if (at < 0) at = files.findLastIndex(f => f.mode === "train" && f.i === files[0].i); // of the run in front
  if (at < 0) at = files.length - 1;
  const file = files[at], list = el("div"), count = el("span", { class: "dim count", role: "status" });
  const ends = el("select", { "aria-label": "finish reason", onchange: () => filter("end")(ends.value) });
  whet.view.file = file.key;
  const redraw = async () => {
    const mine = list.drawing = {}; // a later redraw takes the place of this one
    try {
      const step = await stepOf(file.key), text = whet.view.text.toLowerCase();
      if (!ends.children.length) fillEnds(ends, step);
      const search = text ? await step.find(text, (p, all) => { if (list.drawing === mine && all > 2) count.textContent = `searching, part ${p + 1} of ${all}`; }) : step.search = null;
      if (list.drawing === mine && (search || !text)) await drawGroups(list, count, step, file, search);
    } catch (error) {
      list.replaceChildren(el("p", { class: "bad", text: error.message }));
    }
  };
  const filter = name => value => { whet.view[name] = value; redraw(); };
  const label = f => `${whet.runs.length > 1 ? f.run.name + " · " : ""}${f.mode} step ${f.step} (${f.n})`;
  const steps = el("span", { class: "steps" });
  whet.drawSteps = () => { // again when a run that goes on has more of them
    const all = listed(), same = all.filter(f => f.mode === file.mode && f.i === file.i).map(f => f.key);
    const move = (step, text, name) => {
      const next = same[same.indexOf(file.key) + step];
      return el("button", { text, "aria-label": name, disabled: next === undefined, onclick: () => go("completions", next) });
    };
    steps.replaceChildren(move(-1, "←", "previous step"), selected(all.map(f => [f.key, label(f)]), file.key, key => go("completions", key), "step"), move(1, "→", "next step"));
  };
  whet.drawSteps();
  const field = (name, attributes) => { const input = el("input", { ...attributes, value: whet.view[name] }); input.oninput = () => filter(name)(input.value); return input; };
  const between = (title, from, to, least, greatest) => el("label", {}, `${title} `, field(from, { type: "number", step: "any", placeholder: "from", "aria-label": least }), " ", field(to, { type: "number", step: "any", placeholder: "to", "aria-label": greatest }));
  const clear = el("button", { text: "clear", title: "clear all filters", onclick: () => { for (const name of FILTERS) whet.view[name] = ""; whet.draw(); } });
  const sorts = [["row", "order of the data"], ["best", "best first"], ["worst", "worst first"], ["spread", "widest spread first"], ["long", "longest first"]];
  const colours = [["logprob", "probability"], ["ratio", "ratio trainer / sampler"], ["entropy", "entropy"], ["advantage", "advantage"], ["none", "nothing"]];
  let legend = legendOf(whet.view.colour);
  part.append(el("div", { class: "bar" },
    steps,
    el("label", {}, "sort ", selected(sorts, whet.view.sort, filter("sort"), "order")),
    el("label", {}, "colour by ", selected(colours, whet.view.colour, colour => { filter("colour")(colour); legend.replaceWith(legend = legendOf(colour)); }, "colour")), legend,
    between("reward", "low", "high", "least reward", "greatest reward"),
    between("tokens", "short", "long", "least tokens", "most tokens"),
    el("label", {}, "ended by ", ends),
    field("text", { type: "search", placeholder: "find text", "aria-label": "find text" }), clear, count));
  if (file.run.left_out) part.append(el("p", { class: "dim", text: `${file.run.left_out} steps' completions are left out of this report for its size: whet report ${file.run.path} max_mb=1000 has more.` }));
  list.append(el("p", { class: "dim", text: "loading" }));
  part.append(list);
  redraw();
  return part;
}

function fillEnds(select, step) { // the finish reasons that the step has, "length" at last
  const found = [...step.ends].sort((a, b) => (a === "length") - (b === "length") || (a < b ? -1 : 1));
  for (const [id, title] of [["", "any"], ...found.map(end => [end, end])]) select.append(el("option", { value: id, text: title, selected: id === whet.view.end }));
}

function fitting(step, search) { // the groups with completions that fit the filters, those of a group, and how many there are, in their order
  const v = whet.view, bound = (text, none) => text === "" ? none : Math.fround(Number(text));
  const low = bound(v.low, -Infinity), high = bound(v.high, Infinity), any = v.low === "" && v.high === "";
  const short = bound(v.short, -Infinity), long = bound(v.long, Infinity), end = step.ends.indexOf(v.end);
  const { r, n } = step, all = FILTERS.every(name => v[name] === ""), of = v.sort === "long" ? n : r;
  const fits = i => all || (any || r[i] >= low && r[i] <= high) && n[i] >= short && n[i] <= long && (end < 0 || step.end[i] === end) && (!search || search.hits[i]);
  const itemsOf = g => {
    const found = [];
    for (let i = step.items[g]; i < step.items[g + 1]; i++) if (fits(i)) found.push(i);
    const items = v.sort === "row" ? found : Array.from(inOrder(found.map(i => of[i]), v.sort === "worst" ? 1 : -1), k => found[k]);
    if (v.sort === "spread" && items.length > 2) items.splice(1, 0, items.pop()); // the best beside the worst
    return items;
  };
  if (all) return { groups: step.order(v.sort), itemsOf, count: step.count };
  let count = 0;
  const groups = step.order(v.sort).filter(g => {
    const before = count;
    for (let i = step.items[g]; i < step.items[g + 1]; i++) if (fits(i)) count++;
    return count > before;
  });
  return { groups, itemsOf, count };
}

function keyOf(step, g, sort) { // of a group: the mean reward, its range, or the greatest length
  let sum = 0, count = 0, least = Infinity, most = -Infinity, longest = 0;
  for (let i = step.items[g]; i < step.items[g + 1]; i++) {
    longest = Math.max(longest, step.n[i]);
    if (Number.isNaN(step.r[i])) continue;
    sum += step.r[i];
    count++;
    least = Math.min(least, step.r[i]);
    most = Math.max(most, step.r[i]);
  }
  return sort === "long" ? longest : sort === "spread" ? (count ? most - least : -1) : count ? sum / count : NaN;
}

async function drawGroups(list, count, step, file, search) {
  const mine = list.drawing, target = whet.view.target, across = Math.ceil(innerWidth / ITEM_WIDTH);
  let { groups, itemsOf, count: fit } = fitting(step, search);
  if (window.Highlight) CSS.highlights.delete("found");
  count.textContent = `${fit} of ${step.count} completions`;
  if (!groups.length) return list.replaceChildren(el("p", { class: "dim", text: "No completion fits these filters." }));
  if (target && groups.includes(target[0])) groups = [target[0], ...groups.filter(g => g !== target[0])];
  const withItems = g => {
    const items = itemsOf(g), linked = target && g === target[0] ? items.indexOf(step.items[g] + target[1]) : 0;
    if (linked >= across) items.unshift(...items.splice(linked, 1));
    return { g, items };
  };
  let next = 0;
  const more = el("button", { class: "more", text: "show more" });
  const add = async () => {
    const batch = Array.from(groups.slice(next, next += next ? MORE_GROUPS : FIRST_GROUPS), withItems);
    const found = await step.segmentsOf(batch.flatMap(g => [step.prompts[g.g], ...g.items.slice(0, across).flatMap(i => startOf(step, i, search))]));
    if (list.drawing !== mine) return;
    if (!more.isConnected) list.replaceChildren(more);
    for (const g of batch) list.insertBefore(groupCard(g, found, { step, file, search, across }), more);
    watcher.disconnect();
    if (next >= groups.length) more.remove(); else whenIdle(() => watcher.observe(more)); // anew: it may be in sight still
  };
  const watcher = new IntersectionObserver(entries => entries.some(e => e.isIntersecting) && (watcher.disconnect(), add()), { rootMargin: "600px" });
  more.onclick = () => { watcher.disconnect(); add(); };
  await add();
}

const whenIdle = window.requestIdleCallback || setTimeout; // after what is in sight is drawn

function startOf(step, i, search) { // the segments that a completion's card needs: its first one, and the one with the text
  const at = search && search.at.get(i);
  return at ? [step.first(i), at[0]] : [step.first(i)];
}

function groupCard({ g, items }, found, context) {
  const { step, across } = context, prompt = found.get(step.prompts[g]).prompt, size = step.sizes[g], mean = keyOf(step, g, "best");
  const text = longText(el("div", { class: "prompt", tabindex: 0, role: "region", "aria-label": "prompt" }), prompt);
  const head = el("header", {}, el("b", { text: `row ${step.rows[g]}` }), el("span", { class: "dim num", text: `  ${size} completion${size > 1 ? "s" : ""}, mean reward ${short(mean)}` }), text);
  const row = el("div", { class: "items" }, ...items.slice(0, across).map(i => itemCard(i, g, found, context)));
  if (items.length > across) row.append(moreItems(row, items, across, g, context));
  return el("article", { class: "group" }, head, row);
}

function moreItems(row, items, from, g, context) { // of a group with many completions, the next ones
  const { step, search, across } = context, button = el("button", { class: "more", text: `${items.length - from} more` });
  const add = async () => {
    watcher.disconnect();
    const some = items.slice(from, from + across), found = await step.segmentsOf(some.flatMap(i => startOf(step, i, search)));
    if (!button.isConnected) return;
    button.replaceWith(...some.map(i => itemCard(i, g, found, context)), ...(from + across < items.length ? [moreItems(row, items, from + across, g, context)] : []));
  };
  const watcher = new IntersectionObserver(entries => entries.some(e => e.isIntersecting) && add(), { root: row, rootMargin: "0px 600px" });
  whenIdle(() => watcher.observe(button));
  button.onclick = add;
  return button;
}

const NEEDS = { ratio: "ratio", entropy: "ent" }; // colour -> what a completion must have

function itemCard(i, g, found, { step, file, search }) {
  const v = whet.view, k = i - step.items[g], linked = v.target && v.target[0] === g && v.target[1] === k;
  const item = found.get(step.first(i)), reward = step.r[i], advantage = step.a[i], end = step.ends[step.end[i]];
  const sign = advantage > 0 ? "good" : advantage < 0 ? "bad" : "dim";
  const functions = step.functions.length > 1 ? step.functions.map((name, f) => `${name} ${short(step.f[f][i])}`).join(", ") : "";
  const body = el("div", { class: "text", tabindex: 0, role: "region", "aria-label": "completion" });
  const reader = { body, step, i, v: item.v, search };
  startText(reader, found);
  reader.pager = pager(reader);
  const episode = item.info ? el("details", {}, el("summary", { class: "dim", text: "episode" })) : null;
  if (episode) episode.ontoggle = () => episode.children.length < 2 && episode.append(el("pre", { class: "scroll", text: JSON.stringify(item.info, null, 1) }));
  const box = el("div", { class: linked ? "item linked" : "item" },
    el("header", {},
      el("b", { text: `reward ${Number.isNaN(reward) ? "none" : short(reward)}` }),
      Number.isNaN(advantage) ? null : el("span", { class: sign, text: `advantage ${advantage > 0 ? "+" : ""}${short(advantage)}` }),
      el("span", { class: "dim", text: `${step.n[i]} token${step.n[i] === 1 ? "" : "s"}` }),
      end === "stop" ? null : el("span", { class: "bad", text: `ended by ${end}` }),
      item.s && Object.keys(item.s).length > 1 ? el("span", { class: "dim", title: "seconds that the episode waited for each", text: "waited for " + Object.entries(item.s).map(([name, s]) => `${name} ${seconds(s)}`).join(", ") }) : null,
      functions ? el("span", { class: "dim", text: functions }) : null),
    body,
    v.colour in NEEDS && item.len && !item[NEEDS[v.colour]] ? el("p", { class: "dim", text: `no ${v.colour} of tokens: the trainer stores them every token_stats_every_n_steps, of completions that it updates on` }) : null,
    episode,
    el("footer", {},
      el("button", { text: "link", title: "put the address of this completion into the address bar", onclick: () => { history.replaceState(null, "", "#" + ["completions", file.key, g, k].join("/")); if (navigator.clipboard) navigator.clipboard.writeText(location.href).catch(() => {}); } }),
      el("button", { text: "save", title: "save this completion as JSON", onclick: async () => save(`${file.key}-${g}-${k}.json`, { run: file.run.path, mode: file.mode, step: file.step, row: step.rows[g], prompt: (await step.segmentsOf([step.prompts[g]])).get(step.prompts[g]).prompt, functions: step.functions, ...await step.whole(i) }) }),
      reader.pager));
  if (linked) requestAnimationFrame(() => box.scrollIntoView({ block: "center" }));
  return box;
}

// ---- the text of a completion --------------------------------------------------------------------------------------

function pager(reader) { // of a completion of several segments: which one is in front
  const { step, i } = reader, count = step.numSegments(i);
  if (count < 2) return null;
  const input = el("input", { type: "number", min: 1, max: count, value: (reader.number ?? step.first(i)) - step.first(i) + 1, "aria-label": "part of the completion" });
  input.onchange = async () => {
    const number = step.first(i) + Math.min(Math.max(Math.round(Number(input.value)) || 1, 1), count) - 1;
    const found = await step.segmentsOf([number]);
    reader.body.replaceChildren();
    reader.body.scrollTop = 0;
    fillText(reader, number, found.get(number), 0);
  };
  return el("label", { class: "dim" }, "part ", input, ` of ${count}`);
}

function startText(reader, found) { // a transcript by its messages where tokens are not coloured, else the text
  const { step, i } = reader, segment = found.get(step.first(i)), count = step.numSegments(i);
  const fill = text => {
    const messages = messagesOf(text);
    if (!messages) return startPlain(reader, found);
    if (reader.pager) reader.pager.remove();
    const sought = reader.search && reader.search.at.has(i) ? messages.findIndex(box => box.textContent.toLowerCase().includes(reader.search.text)) : 0;
    fillMessages(reader, messages, Math.max(0, sought));
  };
  if (segment.len && whet.view.colour !== "none" || !segment.t.startsWith('[{"') || count > TRANSCRIPT) startPlain(reader, found);
  else if (count === 1) fill(segment.t);
  else step.textOf(i).then(fill);
}

function startPlain(reader, found) { // from the first segment, or a little before the text that was searched for
  const { body, step, i, search } = reader, at = search && search.at.get(i), first = step.first(i);
  if (!at || at[0] === first && at[1] < FIRST_TEXT / 2) return fillText(reader, first, found.get(first), 0);
  const back = el("button", { class: "more", text: "from the beginning" });
  back.onclick = () => { body.replaceChildren(); fillText(reader, first, found.get(first), 0); };
  body.append(back);
  fillText(reader, at[0], found.get(at[0]), Math.max(0, at[1] - 300));
}

function fillText(reader, number, segment, from) { // the next FIRST_TEXT characters, as coloured tokens where they are known
  const { body, step, i } = reader, by = whet.view.colour, tokens = segment.len && by !== "none";
  const text = tokens && segment.k !== undefined ? segment.k : segment.t;
  let until = Math.min(text.length, from + FIRST_TEXT);
  reader.number = number;
  if (tokens) until = fillTokens(reader, segment, text, from, until); else body.append(text.slice(from, until));
  const next = until < text.length ? [number, until] : number + 1 < step.first(i) + step.numSegments(i) ? [number + 1, 0] : null;
  if (next) body.append(moreText(reader, ...next, text.length - until));
  if (reader.search) markFound(body, reader.search.text);
}

function messagesOf(text) { // of a transcript that is stored as JSON, a box each; null if it is another text
  try {
    const found = JSON.parse(text);
    return found.every(message => typeof message.role === "string") ? found.map(messageBox) : null;
  } catch { return null; }
}

function fillMessages(reader, boxes, from) { // the next ones, of LONG_TEXT characters together
  const { body, search } = reader;
  if (from > 0 && !body.children.length) body.append(el("button", { class: "more", text: "from the beginning", onclick: () => { body.replaceChildren(); fillMessages(reader, boxes, 0); } }));
  let next = from;
  for (let size = 0; next < boxes.length && size < LONG_TEXT; next++) {
    size += boxes[next].textContent.length;
    body.append(boxes[next]);
  }
  if (next < boxes.length) body.append(whenSeen(el("button", { class: "more", text: `show more (${boxes.length - next} messages)` }), body, button => { button.remove(); fillMessages(reader, boxes, next); }));
  if (search) markFound(body, search.text);
}

function longText(node, text) { // its beginning, and the rest on request
  node.append(text.slice(0, LONG_TEXT));
  if (text.length > LONG_TEXT) node.append(el("button", { class: "more", text: `show all ${short(text.length)} characters`, onclick: () => { node.textContent = text; } }));
  return node;
}

function whenSeen(button, body, add) { // a button that adds what follows in a text: clicked, or come to in reading
  const watcher = new IntersectionObserver(entries => entries.some(e => e.isIntersecting) && body.scrollTop > 0 && button.onclick(), { root: body });
  button.onclick = () => { watcher.disconnect(); add(button); };
  watcher.observe(button);
  return button;
}

function messageBox({ role, content, tool_calls: calls }) {
  const plain = value => typeof value === "string" ? value : JSON.stringify(value);
  const parts = (Array.isArray(content) ? content : [content ?? ""]).map(part => part.text ?? plain(part));
  const called = (calls || []).map(({ function: f, ...rest }) => f ? `${f.name}(${plain(f.arguments)})` : plain(rest));
  return el("div", { class: role === "assistant" ? "message" : "message given" }, el("b", { text: `${role} ` }), longText(el("span"), parts.join("\n")), ...called.map(text => el("div", { class: "call", text })));
}

function fillTokens({ body, step, i, v }, segment, text, from, until) { // returns where it ends
  const { len, lp } = segment, fragment = document.createDocumentFragment(), by = whet.view.colour, advantage = step.a[i];
  let place = 0, t = 0;
  while (t < len.length && place + len[t] <= from) place += len[t++];
  while (t < len.length && place < until) {
    const start = place, first = t;
    if (lp[t] === null) { // what the model has not sampled, together
      while (t < len.length && lp[t] === null && place < until) place += len[t++];
      fragment.append(el("span", { class: "given", title: "not sampled by the model", text: text.slice(start, place) }));
      continue;
    }
    place += len[t++];
    if (place === start) continue;
    const span = document.createElement("span"), style = tokenColour(segment, first, by, advantage);
    span.className = "tok";
    if (style) span.style.background = style;
    span.textContent = text.slice(start, place);
    span.about = [segment, first, v];
    fragment.append(span);
  }
  body.append(fragment);
  body.onpointerover = event => { const about = event.target.about; if (about && !event.target.title) event.target.title = tokenTitle(...about); };
  return place;
}

function moreText(reader, number, from, rest) {
  const { step, i, body } = reader, left = step.first(i) + step.numSegments(i) - 1 - number;
  const button = el("button", { class: "more", text: `show more (${rest > 0 ? `${short(rest)} characters` : ""}${rest > 0 && left > 0 ? " and " : ""}${left > 0 ? `${left} part${left > 1 ? "s" : ""}` : ""})` });
  return whenSeen(button, body, async () => {
    const found = await step.segmentsOf([number]);
    if (!button.isConnected) return;
    button.remove();
    fillText(reader, number, found.get(number), from);
  });
}

function markFound(body, text) { // marks a text that was searched for, across tokens, without changing them
  if (!window.Highlight) return;
  if (!CSS.highlights.has("found")) CSS.highlights.set("found", new Highlight());
  const nodes = [], walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT, node => node.parentNode.tagName === "BUTTON" ? 2 : 1);
  let whole = "";
  while (walker.nextNode()) { nodes.push([whole.length, walker.currentNode]); whole += walker.currentNode.data; }
  const starts = nodes.map(([start]) => start), lower = whole.toLowerCase();
  for (let place = lower.indexOf(text), count = 0; place >= 0 && count < 200; place = lower.indexOf(text, place + text.length), count++) {
    const range = new Range(), end = place + text.length, at = offset => { const [start, node] = nodes[lastAtMost(starts, offset, starts.length)]; return [node, offset - start]; };
    range.setStart(...at(place));
    const [node, offset] = at(end - 1);
    range.setEnd(node, offset + 1);
    CSS.highlights.get("found").add(range);
  }
}

const tinted = (rgb, strength) => strength < .005 ? "" : `rgba(${rgb},${strength.toFixed(2)})`;
const signed = x => tinted(x >= 0 ? "40,160,100" : "220,70,50", Math.min(.6, .6 * Math.abs(x))); // green above 0, red below

const LEGENDS = { // what the palest and the strongest colour mean, and the colours
  logprob: ["likely", "unlikely", tinted("224,96,60", 0), tinted("224,96,60", .8)],
  ratio: ["less likely now", "more", signed(-1), "transparent", signed(1)],
  entropy: ["certain", "uncertain", tinted("110,90,220", 0), tinted("110,90,220", .7)],
  advantage: ["−", "+", signed(-1), "transparent", signed(1)],
};

function legendOf(colour) {
  const [low, high, ...colours] = LEGENDS[colour] || [];
  return el("span", { class: "legend dim" }, ...low ? [low, el("i", { style: `background:linear-gradient(90deg,${colours.map(c => c || "transparent").join(",")})` }), high] : []);
}

const at = (list, i) => list && list[i] !== null ? list[i] : undefined; // a number of a token, if it is known

function tokenColour(segment, t, by, advantage) { // "" = none
  if (by === "advantage") return signed(((at(segment.adv, t) ?? advantage) || 0) / 3);
  if (by === "ratio") return signed((at(segment.ratio, t) ?? 0) / 100 / .3); // full at a ratio of 1.35, or its inverse
  if (by === "entropy") return tinted("110,90,220", Math.min(.7, .35 * Math.sqrt((at(segment.ent, t) ?? 0) / 100)));
  return tinted("224,96,60", .8 * (1 - Math.exp(-segment.lp[t] / 100)));
}

function tokenTitle(segment, t, version) {
  const lp = -segment.lp[t] / 100, ratio = at(segment.ratio, t), entropy = at(segment.ent, t), advantage = at(segment.adv, t);
  const parts = [`p ${Math.exp(lp).toFixed(3)}, logprob ${lp.toFixed(2)}`];
  if (ratio !== undefined) parts.push(`ratio ${Math.exp(ratio / 100).toFixed(2)}`);
  if (entropy !== undefined) parts.push(`entropy ${(entropy / 100).toFixed(2)}`);
  if (advantage !== undefined) parts.push(`advantage ${short(advantage)}`);
  parts.push(`version ${at(segment.vs, t) ?? version}`);
  return parts.join(", ");
}

function save(name, value) {
  const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
