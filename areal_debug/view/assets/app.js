// The page: selection, keys, colour scheme, and, if it is served, new steps.

const THEMES = ["auto", "light", "dark"], THEME_SIGNS = { auto: "◐", light: "☀", dark: "☾" }, POLL_MS = 2000;
const KEYS = [["j / k, ↓ / ↑", "next and previous sample"], ["→ / ←", "next and previous token"], ["1 … 6", "colour by"], ["c", "text or conversation"],
  ["/", "filter"], ["[ / ]", "previous and next step, if the record is served"], ["t", "light or dark"], ["Esc", "back, or leave the filter"], ["?", "this list of keys"]];
const app = { run: null, step: null, served: false, following: true };
const at = id => document.getElementById(id);

function setTheme(theme) {
  app.theme = theme;
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").textContent = THEME_SIGNS[theme];
  if (sample.step) sample.drawMap();
}

function choose(row, open = false) {
  if (row === undefined) return;
  table.select(row);
  sample.show(app.step, app.run, row);
  if (open) at("sample").classList.add("open");
  const { prompt, sample: number } = app.step.rows;
  history.replaceState(null, "", `#step=${app.step.step}&sample=${prompt[row]}.${number[row]}`);
}

function closeSample() {
  at("sample").classList.remove("open");
  at("table").focus();
}

function showStep(step) {
  app.step = step;
  sample.tip.hidden = true;
  drawHeader();
  drawRun(app.run, step.step, goTo);
  table.show(step, at("filter").value);
  countSamples();
  const wanted = new URLSearchParams(location.hash.slice(1)).get("sample");
  const { prompt, sample: number } = step.rows;
  const named = table.order.find(row => `${prompt[row]}.${number[row]}` === wanted);
  if (table.order.length) choose(named ?? table.order[0]);
}

function drawHeader() {
  const { run, step } = app, name = run.record.split("/").filter(Boolean).at(-1) || run.record;
  at("title").textContent = name;
  at("title").title = run.record;
  at("facts").textContent = Object.entries(run.header).map(([key, value]) => `${key} ${value}`).join(" · ");
  const stepper = at("stepper"), label = element("span", { textContent: `Step ${step.step}` });
  label.title = `sampled by weights of version ${step.version} and older`;
  if (!app.served) { stepper.replaceChildren(label); return; }
  const place = run.steps.indexOf(step.step);
  const turn = (sign, by) => {
    const button = element("button", { textContent: sign, disabled: !run.steps[place + by] && run.steps[place + by] !== 0 });
    button.addEventListener("click", () => goTo(run.steps[place + by]));
    return button;
  };
  const follow = element("button", { className: "follow", textContent: "follow", title: "Show each new step as it is recorded" });
  follow.setAttribute("aria-pressed", app.following);
  follow.addEventListener("click", () => { app.following = !app.following; drawHeader(); poll(); });
  stepper.replaceChildren(turn("‹", -1), label, turn("›", 1), follow);
}

function countSamples() {
  const shown = table.order.length, { count } = app.step;
  at("count").textContent = table.problem ? `invalid filter: ${table.problem}` : shown === count ? `${count} samples` : `${shown} of ${count}`;
}

async function goTo(step) {
  if (!app.served || step === undefined || step === app.step?.step) return;
  app.following = step === app.run.steps.at(-1);
  const reply = await fetch(`step/${step}`);
  if (reply.ok) showStep(await unpackStep(await reply.arrayBuffer()));
  else at("count").textContent = await reply.text();
}

async function poll() {
  const reply = await fetch("run.json");
  if (!reply.ok) return;
  const run = await reply.json(), grown = run.steps.at(-1) !== app.run.steps.at(-1);
  app.run = run;
  if (!run.steps.length) { at("count").textContent = "waiting for the first step"; return; }
  if (!app.step || (grown && app.following)) { const following = app.following; await goTo(run.steps.at(-1)); app.following = following; drawHeader(); }
  else if (grown) { drawHeader(); drawRun(run, app.step.step, goTo); }
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || at("help").open) return;
  if (event.target === at("filter")) {
    if (event.key === "Escape" || event.key === "Enter") at("table").focus();
    return;
  }
  const colour = sample.modes?.[Number(event.key) - 1];
  const place = app.step ? app.run.steps.indexOf(app.step.step) : -1;
  const actions = {
    j: () => choose(table.neighbour(1)), k: () => choose(table.neighbour(-1)),
    ArrowDown: () => choose(table.neighbour(1)), ArrowUp: () => choose(table.neighbour(-1)),
    PageDown: () => choose(table.neighbour(20)), PageUp: () => choose(table.neighbour(-20)),
    Home: () => choose(table.order[0]), End: () => choose(table.order.at(-1)),
    Enter: () => { at("sample").classList.add("open"); at("sample").focus(); },
    ArrowRight: () => sample.walk(1), ArrowLeft: () => sample.walk(-1),
    c: () => sample.layOut(!sample.drawnAsTurns), "/": () => at("filter").focus(), t: nextTheme, "?": () => at("help").showModal(),
    "[": () => goTo(app.run.steps[place - 1]), "]": () => goTo(app.run.steps[place + 1]), Escape: closeSample,
  };
  const scrolls = event.target === at("sample") && ["ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End"].includes(event.key);
  const onButton = event.target.tagName === "BUTTON" && event.key === "Enter";
  const action = scrolls || onButton ? undefined : actions[event.key] || (colour && (() => sample.colourBy(colour.name)));
  if (!action) return;
  event.preventDefault();
  action();
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(app.theme) + 1) % THEMES.length]);
}

const sample = new SampleView(at("sample"), at("tip"), choose, closeSample);
const table = new Table(at("table"), choose);

async function begin() {
  setTheme("auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(app.theme));
  matchMedia("(max-width: 760px)").addEventListener("change", () => table.step && table.draw());
  addEventListener("resize", () => sample.step && sample.drawMap());
  addEventListener("keydown", pressed);
  at("theme").addEventListener("click", nextTheme);
  at("help-open").addEventListener("click", () => at("help").showModal());
  at("help").querySelector("dl").append(...KEYS.flatMap(([keys, what]) => [element("dt", {}, element("kbd", { textContent: keys })), element("dd", { textContent: what })]));
  let waiting;
  at("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { table.show(app.step, at("filter").value); countSamples(); }, 120);
  });
  app.run = JSON.parse(at("run-data").textContent);
  const packed = at("step-data").textContent.trim();
  app.served = !packed;
  if (packed) { showStep(await unpackStep(bytesOfBase64(packed))); }
  else { await poll(); setInterval(poll, POLL_MS); }
  document.body.dataset.ready = "yes";
}

begin();
