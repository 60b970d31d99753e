// The columns of the tables: samples of a step, samples of two steps beside each other, and groups.
// `s` is the step of the row: that of A, or of B where only B has the row.

// The mean of a row: "–" without tokens in the loss mask, "?" if no value of one is known.
const mean = (name, show) => (s, r) => (Number.isFinite(s.sums[name][r]) ? show(s.sums[name][r]) : s.sums.trained[r] === 0 ? "–" : UNKNOWN);
const fixed = digits => value => value.toFixed(digits);
const fixedOrUnknown = digits => value => (Number.isFinite(value) ? value.toFixed(digits) : UNKNOWN);
const SAMPLES = [
  { name: "sample", px: 68, keep: 9, value: (s, r) => s.rows.prompt[r] * 4096 + s.rows.sample[r], show: (s, r) => `${promptOf(s, r)}.${s.rows.sample[r]}`, title: "prompt and sample" },
  { name: "rank", px: 44, keep: 1, value: (s, r) => s.rows.rank[r], hide: s => s.rows.rank.every(rank => rank === 0) },
  { name: "reward", px: 58, keep: 8, value: (s, r) => s.rows.reward[r], format: value => known(value, 3), pairs: true },
  { name: "advantage", px: 76, keep: 5, value: (s, r) => s.sums.advantage[r], show: mean("advantage", fixed(2)), hide: s => !s.tokens.advantage, title: "mean over its tokens", pairs: true },
  { name: "length", px: 54, keep: 7, value: (s, r) => (lacks(s, r, "tokens") ? NaN : s.rows.length[r]), format: value => known(value), title: "tokens, the prompt included", pairs: true },
  { name: "finish", px: 50, keep: 4, value: (s, r) => (lacks(s, r, "finish") ? NaN : s.rows.finish[r]), show: finishOf },
  { name: "logprob", px: 62, keep: 6, value: (s, r) => s.sums.logprob[r], show: mean("logprob", fixed(3)), title: "mean over its tokens" },
  { name: "ratio", px: 50, keep: 3, value: (s, r) => s.sums.ratio[r], show: mean("ratio", fixed(2)), hide: s => !s.tokens["trainer logprob"], title: "the furthest from 1 of its tokens" },
  { name: "version", px: 66, keep: 2, value: (s, r) => s.sums.oldest[r], title: "weights that sampled it",
    show: (s, r) => mean("oldest", oldest => (oldest === s.sums.newest[r] ? number(oldest) : `${oldest}–${s.sums.newest[r]}`))(s, r) },
  { name: "calls", px: 50, keep: 4.5, value: (s, r) => s.rows.calls?.[r] ?? NaN, hide: s => !s.rows.calls, title: "calls of the agent in its conversation" },
  { name: "failed", px: 54, keep: 4.6, value: (s, r) => s.rows.failed?.[r] ?? NaN, hide: s => !s.rows.failed?.some(Boolean), title: "tool calls that failed" },
  { name: "answer", px: 0, keep: 9, value: (s, r) => s.sums.trained[r], show: (s, r) => answerOf(s, r, 120).replace(/\s+/g, " "), start: true, title: "what the model sampled; sorts by how many tokens" },
];
const PAIR_PX = { reward: 64, advantage: 100, length: 84 }, GROUP_PAIR_PX = 106; // with a value of each side
const COMPARED_COLUMNS = [
  { name: "differs", px: 60, keep: 8, value: (v, i) => v.differs[i], show: differsText, title: "the first token that differs between A and B" },
  { name: "change", px: 66, keep: 6.5, value: (v, i) => v.change[i], show: (v, i) => (Number.isFinite(v.change[i]) ? number(v.change[i], 3) : "–"), title: "the largest change of a logprob from A to B, up to the first token that differs" },
];

// The step and row of an item that its columns read.
function mainOf(view, item) {
  return view.rowA[item] >= 0 ? [view.a, view.rowA[item]] : [view.b, view.rowB[item]];
}

function textOfCell(column, step, row) {
  return column.show ? column.show(step, row) : (column.format || number)(column.value(step, row));
}

function differsText(view, item) {
  const [one, other] = sidesOf(view, item);
  if (!other) return one.side === "a" ? "only A" : "only B";
  if (lacks(one.step, one.row, "tokens") || lacks(other.step, other.row, "tokens")) return UNKNOWN;
  return Number.isFinite(view.differs[item]) ? String(view.differs[item]) : "–";
}

// The columns of the samples of a view: `value` and `show` of (view, item).
function sampleColumns(view) {
  const columns = SAMPLES.filter(column => !column.hide || !column.hide(view.a)).map(column => ({
    ...column,
    value: (v, i) => column.value(...mainOf(v, i)),
    show: (v, i) => (v.b && column.pairs ? bothSides(column, v, i) : textOfCell(column, ...mainOf(v, i))),
    ...(view.b && column.pairs && { px: PAIR_PX[column.name], keep: Math.min(column.keep, column.name === "reward" ? 8 : 5) }),
  }));
  if (view.b) columns.splice(1, 0, ...COMPARED_COLUMNS);
  return columns;
}

function bothSides(column, view, item) {
  const texts = sidesOf(view, item).map(({ step, row }) => textOfCell(column, step, row));
  return texts.length < 2 || texts[0] === texts[1] ? texts[0] : texts.join(" → ");
}

// The rows of each prompt together. Rows of B belong to the prompt of their partner in A.
function groupsOf(view) {
  const groups = new Map();
  let unknown = 0;
  for (let item = 0; item < view.count; item++) {
    const [step, row] = mainOf(view, item);
    if (lacks(step, row, "prompt")) { unknown++; continue; }
    const key = `${view.rowA[item] >= 0 ? "" : "b"}${step.rows.prompt[row]}`;
    if (!groups.has(key)) groups.set(key, { prompt: step.rows.prompt[row], items: [] });
    groups.get(key).items.push(item);
  }
  const found = [...groups.values()];
  for (const group of found) {
    group.sides = SIDES.map(side => spreadOf(view, side, group.items));
    group.main = group.sides[0].count ? group.sides[0] : group.sides[1];
  }
  return { groups: found, count: found.length, b: view.b, unknown };
}

// Mean and standard deviation (of the population) of the known rewards, and the mean length.
function spreadOf(view, side, items) {
  const sides = items.flatMap(item => sidesOf(view, item).filter(one => one.side === side));
  const all = sides.map(({ step, row }) => step.rows.reward[row]), given = all.filter(Number.isFinite);
  const average = values => values.reduce((sum, value) => sum + value, 0) / values.length;
  const middle = average(given), lengths = sides.map(({ start, end }) => end - start);
  return { count: sides.length, mean: middle, std: Math.sqrt(average(given.map(value => (value - middle) ** 2))), length: average(lengths),
    low: Math.min(...given), high: Math.max(...given), rewards: all.map(value => known(value, 3)).join("  ") };
}

function groupColumns(groups) {
  const of = (name, show) => ({ value: (g, i) => g.groups[i].main[name], show: (g, i) => bothGroups(g, i, side => show(side[name])), pairs: true });
  return [
    { name: "prompt", px: 60, keep: 9, value: (g, i) => g.groups[i].prompt },
    { name: "samples", px: 66, keep: 6, value: (g, i) => g.groups[i].items.length },
    { name: "mean", px: 58, keep: 8, ...of("mean", fixedOrUnknown(3)), title: "mean of the known rewards" },
    { name: "std", px: 58, keep: 8, ...of("std", fixedOrUnknown(3)), title: "standard deviation of the known rewards, of the population" },
    { name: "min", px: 50, keep: 3, ...of("low", value => known(value, 3)) },
    { name: "max", px: 50, keep: 3, ...of("high", value => known(value, 3)) },
    { name: "length", px: 62, keep: 5, ...of("length", fixedOrUnknown(0)), title: "mean over its samples" },
    { name: "rewards", px: 0, keep: 9, start: true, value: (g, i) => g.groups[i].main.mean, show: (g, i) => bothGroups(g, i, side => side.rewards, "  →  ") },
  ].map(column => ({ ...column, px: groups.b && column.pairs ? Math.max(column.px, GROUP_PAIR_PX) : column.px }));
}

function bothGroups(groups, item, show, arrow = " → ") {
  const texts = groups.groups[item].sides.filter(side => side.count).map(show);
  return texts.length < 2 || texts[0] === texts[1] ? texts[0] : texts.join(arrow);
}
