// The tint of a token: a colour and its strength (0 to 1), from one value of the token. Ordinary
// values are pale.

const grow = share => Math.min(1, Math.max(0, share)) ** 0.6;

// `value` of (step, token) is false where the step does not have it.
function colourings(step, run) {
  const t = step.tokens, trainer = t["trainer logprob"], { clip } = run, { missing } = step;
  const largest = largestOf(t.advantage, t.mask);
  const oldest = step.sums.oldest.reduce((low, v) => (v < low ? v : low), step.version);
  const span = Math.max(1, step.version - oldest);
  return [
    { name: "logprob", ends: ["likely", "unlikely"], colours: ["", "warm"],
      value: t.logprob.some(Number.isFinite) && ((s, at) => s.tokens.logprob[at]), tint: v => ["warm", grow(-v / 6)] },
    { name: "ratio", ends: ["less likely now", "more likely now"], colours: ["cool", "warm"],
      value: trainer && ((s, at) => Math.exp(gapAt(s, at))),
      tint: v => [v > 1 ? "warm" : "cool", grow(Math.abs(Math.log(v)) / 0.4)],
      marked: clip && (v => v < clip[0] || v > clip[1]) },
    { name: "advantage", ends: ["negative", "positive"], colours: ["bad", "good"],
      value: t.advantage && ((s, at) => s.tokens.advantage[at]), tint: v => [v > 0 ? "good" : "bad", grow(Math.abs(v) / largest) * 0.8] },
    { name: "entropy", ends: ["low", "high"], colours: ["", "violet"],
      value: t.entropy && ((s, at) => s.tokens.entropy[at]), tint: v => ["violet", grow(v / 3)] },
    { name: "version", ends: ["newest weights", `${span} versions older`], colours: ["", "amber"],
      value: !missing.version && ((s, at) => (s.tokens.version[at] < 0 ? NaN : s.tokens.version[at])), tint: v => ["amber", (step.version - v) / span * 0.8] },
    { name: "mask", ends: ["not in the loss mask", "in the loss mask"], colours: ["", "good"], value: (s, at) => s.tokens.mask[at], tint: v => ["good", v ? 0.4 : 0] },
    { name: "gap", ends: ["engine higher", "trainer higher"], colours: ["cool", "warm"],
      value: trainer && gapAt, tint: v => [v > 0 ? "warm" : "cool", grow(Math.abs(v) / 0.4)] },
  ];
}

// The tint of B - A, for changes of at most `largest`.
function changeTint(change, largest) {
  return [change > 0 ? "warm" : "cool", change ? 0.15 + 0.85 * grow(Math.abs(change) / largest) : 0];
}

// The 99th percentile of the absolute values, so that one outlier does not make the rest pale.
function largestOf(values, mask) {
  if (!values) return 1;
  const sizes = [];
  const stride = Math.max(1, Math.floor(values.length / 50000));
  for (let at = 0; at < values.length; at += stride) if (mask[at] && Number.isFinite(values[at])) sizes.push(Math.abs(values[at]));
  sizes.sort((a, b) => a - b);
  return sizes[Math.floor(sizes.length * 0.99)] || 1;
}

// The tint of a value; none if it is unknown.
function tintOf(mode, value) {
  return Number.isFinite(value) ? mode.tint(value) : ["faint", 0];
}

function tintStyle([colour, share]) {
  return share < 0.02 ? "" : `color-mix(in srgb, var(--tint-${colour}) ${Math.round(share * 100)}%, transparent)`;
}

function legendOf(colouring) {
  const side = colour => (colour ? `var(--tint-${colour})` : "transparent");
  const [low, high] = colouring.colours.map(side);
  const middle = colouring.colours[0] ? ", transparent" : "";
  const bar = element("i");
  bar.style.background = `linear-gradient(to right, ${low}${middle}, ${high})`;
  return element("span", { className: "legend" }, colouring.ends[0], bar, colouring.ends[1]);
}

// The values of a token in their order, as [name, number or text].
function factsOf(step, row, at) {
  const t = step.tokens, facts = [];
  if (step.ids[t.index[at]] >= 0) facts.push(["token id", step.ids[t.index[at]]]);
  facts.push(["position", at - step.sums.starts[row]]);
  if (lacks(step, row, "mask")) facts.push(["in the loss mask", UNKNOWN]);
  else if (!t.mask[at]) return [...facts, ["in the loss mask", "no"]];
  facts.push(["logprob", t.logprob[at]], ["probability", `${known(100 * Math.exp(t.logprob[at]), 4)} %`]);
  for (const name of ["trainer logprob", "reference logprob"]) if (t[name]) facts.push([name, t[name][at]]);
  if (t["trainer logprob"]) facts.push(["log-prob gap", gapAt(step, at)], ["ratio", Math.exp(gapAt(step, at))]);
  for (const name of ["advantage", "return", "entropy"]) if (t[name]) facts.push([name, t[name][at]]);
  return [...facts, ["weights", lacks(step, row, "version") ? UNKNOWN : `version ${t.version[at]}`]];
}

function factText(value) {
  return typeof value === "number" ? known(value, 6) : value;
}
