// The page: selection, keys, panels, colour scheme, its address, and, if it is served, new steps.

const THEMES = ["auto", "light", "dark"], THEME_SIGNS = { auto: "◐", light: "☀", dark: "☾" }, POLL_MS = 2000, LINK_MS = 80;
const PANELS = ["samples", "groups", "histograms", "search"];
const KEYS = [["j / k, ↓ / ↑", "next and previous sample"], ["→ / ←", "next and previous token"], ["1 … 7", "colour by"], ["c", "text or conversation"],
  ["n", "next token that differs from B"], ["x", "tint by the change from A to B"], ["b", "with or without B"], ["/", "filter"],
  ["s, g, h, f", "samples, groups, histograms, find in all steps"], ["m", "choose curves"], ["[ / ]", "previous and next step"], ["t", "light or dark"],
  ["Esc", "back, or leave a field"], ["?", "this list of keys"]];
const app = { document: null, view: null, number: null, comparing: false, following: true, panel: "samples", turn: 0 };
const at = id => document.getElementById(id);

function announce(text) {
  at("announce").textContent = text;
}

function setTheme(theme) {
  app.theme = theme;
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").textContent = THEME_SIGNS[theme];
  at("theme").ariaLabel = `Colour scheme: ${theme}`;
  charts.forEach(chart => chart.redraw());
  if (sample.step) sample.drawMap();
}

// The runs that are shown: one, or two.
function shownSides() {
  return app.comparing ? app.document.sides : app.document.sides.slice(0, 1);
}

function choose(item, open = false) {
  if (item === undefined) return;
  table.select(item);
  sample.show(app.view, app.document.sides, item);
  if (open) at("sample").classList.add("open");
  updateLink();
}

function closeSample() {
  at("sample").classList.remove("open");
  at("table").focus();
}

// What the page shows, as an address.
function currentPlace() {
  const place = { step: app.number, compare: app.comparing ? "B" : undefined, search: app.panel === "search" ? search.query : undefined };
  if (!sample.step || !app.view) return place;
  const { prompt, sample: number } = sample.step.rows, one = sample.sides.find(({ side }) => side === sample.side);
  return { ...place, prompt: prompt[sample.row], sample: number[sample.row], token: sample.at < 0 ? undefined : sample.at - one.start };
}

function updateLink() {
  clearTimeout(app.linking);
  app.linking = setTimeout(() => history.replaceState(null, "", fragmentOf(currentPlace())), LINK_MS);
}

// Show a place: `goTo({ step: 3 })` keeps whether B is shown and the panel.
async function goTo(place) {
  const turn = ++app.turn, number = place.step ?? app.number, { stored, paired, shift, sides } = app.document;
  clearTimeout(app.linking);
  at("problem").textContent = "";
  if (!stored.includes(number)) {
    at("problem").textContent = `Step ${number} is not in this page, which has ${stored.length > 1 ? `${stored.length} steps, ${stored[0]} to ${stored.at(-1)}` : `step ${stored[0]}`}: areal-debug open RECORD --step ${number}`;
    return;
  }
  const comparing = sides.length > 1 && (place.compare === undefined ? app.comparing : Boolean(place.compare)), hasB = comparing && paired.includes(number);
  const isNew = number !== app.number || comparing !== app.comparing || !app.view;
  if (isNew) {
    try {
      const [a, b, pair] = await Promise.all([steps.load("a", number), ...(hasB ? [steps.load("b", number + shift), steps.pair(number)] : [])]);
      if (turn !== app.turn) return;
      Object.assign(app, { number, comparing, view: viewOf(a, b, pair) });
    } catch (error) {
      at("problem").textContent = error.message;
      return;
    }
    app.following = app.served && number === stored.at(-1);
    drawHeader();
    if (curves.shownSides !== shownSides().length || app.grown) drawCurves(); else curves.select(number);
    table.show(app.view, sampleColumns(app.view), at("filter").value);
    countSamples();
    drawDifferences();
    drawPanel();
  }
  if (comparing && !hasB) at("problem").textContent = `B has no step ${number + shift}.`;
  const item = itemAt(place);
  if (item !== undefined) choose(item, place.prompt !== undefined);
  else if (place.prompt !== undefined) at("problem").textContent = `Step ${number} has no sample ${place.prompt}.${place.sample ?? 0}.`;
  if (item !== undefined && place.token !== undefined) sample.focusToken(sample.main.start + place.token, sample.main.side);
  if (place.search !== undefined) { showPanel("search"); if (place.search !== search.query) find(place.search); }
  updateLink();
}

// The item of a place; without a prompt the one that differs first from B, or the first.
function itemAt({ prompt, sample: number }) {
  const first = app.view.differences?.differences[0]?.place;
  if (prompt === undefined) return (first && itemAt({ prompt: first.prompt_id, sample: first.sample_id })) ?? table.order[0];
  return table.order.find(item => {
    const [step, row] = mainOf(app.view, item);
    return step.rows.prompt[row] === prompt && (number === undefined || step.rows.sample[row] === number);
  });
}

function drawHeader() {
  const { sides, stored } = app.document;
  at("facts").textContent = shownSides().map((side, place) => `${app.comparing ? `${SIDES[place].toUpperCase()}: ` : ""}${Object.entries(side.header).map(([key, value]) => `${key} ${value}`).join(" · ")}`).join("  |  ");
  const place = stored.indexOf(app.number), label = element("h1", { textContent: `Step ${app.number}` });
  label.title = `sampled by weights of version ${app.view.a.version} and older`;
  const turn = (sign, name, by) => {
    const button = element("button", { textContent: sign, ariaLabel: name, disabled: stored[place + by] === undefined });
    button.addEventListener("click", () => goTo({ step: stored[place + by] }));
    return button;
  };
  const parts = stored.length > 1 || app.served ? [turn("‹", "previous step", -1), label, turn("›", "next step", 1)] : [label];
  if (sides.length > 1) {
    const other = element("button", { className: "toggle", textContent: "compare with B", title: `${sides[1].record} (b)`, ariaPressed: String(app.comparing) });
    other.addEventListener("click", () => goTo({ ...currentPlace(), compare: app.comparing ? "" : "B" }));
    parts.push(other);
  }
  if (app.served) {
    const follow = element("button", { className: "toggle", textContent: "follow", title: "Show each new step as it is recorded", ariaPressed: String(app.following) });
    follow.addEventListener("click", () => { app.following = !app.following; drawHeader(); poll(); });
    parts.push(follow);
  }
  at("stepper").replaceChildren(...parts);
  at("sides").hidden = !app.comparing;
}

function drawCurves() {
  curves.shownSides = shownSides().length;
  app.grown = false;
  curves.show(shownSides(), app.document.shift, app.number);
}

// What `areal-debug diff` lists for these two steps, as links.
function drawDifferences() {
  const box = at("differences"), { differences } = app.view;
  box.hidden = !differences || app.document.shift !== 0;
  if (box.hidden) return;
  const list = differences.differences, lead = element("summary");
  const text = one => `${one.stage}: ${one.name}${one.minibatch === null ? "" : `, minibatch ${one.minibatch}`}, ${one.num_different} of ${one.num_compared} differ${one.largest === null ? "" : `, by up to ${number(one.largest, 3)}`}`;
  lead.textContent = list.length ? `First to differ: ${text(list[0])}` : "No difference in what both recorded of this step";
  const items = list.map(one => element("li", {}, one.place
    ? element("a", { href: fragmentOf({ step: app.number, prompt: one.place.prompt_id, sample: one.place.sample_id, token: one.place.token ?? undefined, compare: "B" }), textContent: text(one) })
    : text(one)));
  const more = differences.num_differences - list.length;
  box.replaceChildren(lead, element("ol", {}, ...items, ...(more ? [element("li", { textContent: `and ${more} more` })] : [])));
}

function countSamples() {
  const shown = table.order.length, { count } = app.view;
  at("count").textContent = table.problem ? `invalid filter: ${table.problem}` : shown === count ? `${count} samples` : `${shown} of ${count}`;
}

function showPanel(panel) {
  app.panel = panel;
  for (const name of PANELS) {
    at(`${name}-tab`).ariaSelected = String(name === panel);
    at(`${name}-tab`).tabIndex = name === panel ? 0 : -1;
    at(`${name}-panel`).hidden = name !== panel;
  }
  if (app.view) { drawPanel(); updateLink(); }
}

// Draw what the panel shows of the step; the others are drawn when they are opened.
function drawPanel() {
  if (app.panel === "groups") {
    const groups = groupsOf(app.view), { unknown } = groups;
    groupTable.show(groups, groupColumns(groups));
    at("groups-note").textContent = unknown ? `${unknown} ${unknown === 1 ? "sample whose prompt is not known is" : "samples whose prompts are not known are"} left out.` : "";
  }
  if (app.panel === "histograms") histograms.show([app.view.a, app.view.b].filter(Boolean));
}

function chooseGroup(group, open) {
  groupTable.select(group);
  choose(groupTable.view.groups[group].items[0], open);
}

function find(query) {
  search.input.value = query;
  const { stored, paired, sides, shift } = app.document, compared = app.comparing && sides.length > 1;
  const sources = stored.flatMap(step => [{ side: "a", number: step, link: { step } }, ...(compared && paired.includes(step) ? [{ side: "b", number: step + shift, link: { step } }] : [])]);
  search.run(query, steps, sources, { compare: compared ? "B" : undefined, search: query });
  updateLink();
}

async function poll() {
  const reply = await fetch(`run.json${app.document.stored.length ? `?${app.document.stored.at(-1)}` : ""}`);
  if (reply.status !== 200) return;
  const { stored } = app.document;
  app.document = await reply.json();
  app.grown = app.document.stored.at(-1) !== stored.at(-1);
  if (!app.document.stored.length) { at("count").textContent = "waiting for the first step"; return; }
  if (!app.view || (app.grown && app.following)) { await goTo({ step: app.document.stored.at(-1) }); app.following = true; drawHeader(); }
  else if (app.grown) { drawHeader(); drawCurves(); }
}

function stepBy(by) {
  const { stored } = app.document, step = stored[stored.indexOf(app.number) + by];
  if (step !== undefined) goTo({ step });
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || !app.view) return;
  if (event.target.tagName === "INPUT") {
    if (event.key === "Escape" || (event.key === "Enter" && event.target === at("filter"))) at(event.target === at("filter") ? "table" : "search-tab").focus();
    return;
  }
  const inGroups = event.target === at("groups"), lists = inGroups ? groupTable : table, pick = inGroups ? chooseGroup : choose;
  const colour = sample.modes?.[Number(event.key) - 1];
  const actions = {
    j: () => pick(lists.neighbour(1)), k: () => pick(lists.neighbour(-1)),
    ArrowDown: () => pick(lists.neighbour(1)), ArrowUp: () => pick(lists.neighbour(-1)),
    PageDown: () => pick(lists.neighbour(20)), PageUp: () => pick(lists.neighbour(-20)),
    Home: () => pick(lists.order[0]), End: () => pick(lists.order.at(-1)),
    Enter: () => { at("sample").classList.add("open"); at("sample").focus(); },
    ArrowRight: () => sample.walk(1), ArrowLeft: () => sample.walk(-1), n: () => sample.nextDifference(), x: () => sample.pieces && sample.tintByChange(!sample.byChange),
    b: () => app.document.sides.length > 1 && goTo({ ...currentPlace(), compare: app.comparing ? "" : "B" }),
    c: () => sample.layOut(!sample.drawnAsTurns), "/": () => { showPanel("samples"); at("filter").focus(); }, t: nextTheme, "?": () => at("help").showModal(),
    s: () => { showPanel("samples"); at("table").focus(); }, g: () => { showPanel("groups"); at("groups").focus(); }, h: () => { showPanel("histograms"); at("histograms-tab").focus(); },
    f: () => { showPanel("search"); search.input.focus(); }, m: () => curves.pick(at("metrics")),
    "[": () => stepBy(-1), "]": () => stepBy(1), Escape: closeSample,
  };
  const scrolls = [at("sample"), at("histograms-panel")].includes(event.target) && ["ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End"].includes(event.key);
  const onControl = ["BUTTON", "A", "SUMMARY"].includes(event.target.tagName) && ["Enter", " "].includes(event.key);
  const action = scrolls || onControl ? undefined : actions[event.key] || (colour && (() => sample.colourBy(colour.name)));
  if (!action) return;
  event.preventDefault();
  action();
}

// The arrow keys of the list of panels.
function turnTab(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  event.stopPropagation();
  const panel = PANELS[(PANELS.indexOf(app.panel) + by + PANELS.length) % PANELS.length];
  showPanel(panel);
  at(`${panel}-tab`).focus();
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(app.theme) + 1) % THEMES.length]);
}

const steps = new Steps(at("document-data").dataset.source);
const sample = new SampleView(at("sample"), at("tip"), { choose, close: closeSample, moved: updateLink, images: (side, number) => steps.images(side, number), calls: (side, number) => steps.calls(side, number) });
const table = new Table(at("table"), "sample", "No sample matches the filter.", choose);
const groupTable = new Table(at("groups"), "prompt", "The prompts of this step are not known.", chooseGroup);
const curves = new Curves(at("run"), step => goTo({ step }));
const histograms = new Histograms(at("histograms-panel"));
const search = new Search({ input: at("search-input"), list: at("results"), status: at("found") });

function listen() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(app.theme));
  matchMedia("(max-width: 760px)").addEventListener("change", () => { if (table.view) table.draw(); if (groupTable.view) groupTable.draw(); });
  addEventListener("resize", () => sample.step && sample.drawMap());
  addEventListener("keydown", pressed);
  addEventListener("hashchange", ({ newURL }) => goTo({ compare: "", ...parsePlace(new URL(newURL).hash) }));
  at("theme").addEventListener("click", nextTheme);
  at("help-open").addEventListener("click", () => at("help").showModal());
  at("metrics-open").addEventListener("click", () => curves.pick(at("metrics")));
  at("help").querySelector("dl").append(...KEYS.flatMap(([keys, what]) => [element("dt", {}, element("kbd", { textContent: keys })), element("dd", { textContent: what })]));
  at("tabs").addEventListener("keydown", turnTab);
  for (const name of PANELS) at(`${name}-tab`).addEventListener("click", () => showPanel(name));
  at("search-form").addEventListener("submit", event => { event.preventDefault(); find(search.input.value); });
  let waiting;
  at("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { table.show(app.view, table.columns, at("filter").value); countSamples(); }, 120);
  });
}

async function begin() {
  setTheme("auto");
  listen();
  app.document = await unpackJson(bytesOfBase64(at("document-data").textContent));
  app.served = at("document-data").dataset.source === "server";
  const { opens, stored, sides } = app.document, given = parsePlace(location.hash);
  const linked = Object.keys(given).length > 0, own = Object.fromEntries(Object.entries(opens || {}).filter(([, value]) => value !== null));
  app.comparing = false;
  showPanel("samples");
  if (stored.length) await goTo({ step: opens?.step ?? stored.at(-1), compare: sides.length > 1 && !linked ? "B" : "", ...(linked ? given : own) });
  if (app.served) { await poll(); setInterval(poll, POLL_MS); }
  document.body.dataset.ready = "yes";
}

begin();
