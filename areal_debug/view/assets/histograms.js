// Histograms of a step: of its samples, and of its tokens in the loss mask. Those of two sides have
// the same bins.

const NUM_BINS = 40, MOST_VALUES = 24;
const QUANTITIES = [
  { name: "reward", of: "samples", value: (s, r) => s.rows.reward[r] },
  { name: "length", of: "samples", value: (s, r) => (lacks(s, r, "tokens") ? NaN : s.rows.length[r]) },
  { name: "advantage", of: "tokens", needs: "advantage", value: (s, at) => s.tokens.advantage[at] },
  { name: "ratio", of: "tokens", needs: "trainer logprob", value: (s, at) => Math.exp(gapAt(s, at)) },
  { name: "log-prob gap", of: "tokens", needs: "trainer logprob", value: gapAt },
  { name: "logprob", of: "tokens", needs: "logprob", value: (s, at) => s.tokens.logprob[at] },
  { name: "entropy", of: "tokens", needs: "entropy", value: (s, at) => s.tokens.entropy[at] },
];

// The trainer's log-probability of a token less the engine's.
function gapAt(step, at) {
  return step.tokens["trainer logprob"][at] - step.tokens.logprob[at];
}

// The known values of a quantity, sorted.
function valuesOf(step, { of, needs, value }) {
  if (needs && !step.tokens[needs]) return new Float64Array(0);
  const found = [], { starts } = step.sums;
  for (let row = 0; row < step.count; row++) {
    if (of === "samples") { found.push(value(step, row)); continue; }
    const anyMask = lacks(step, row, "mask");
    for (let at = starts[row], end = at + step.rows.length[row]; at < end; at++) if (anyMask || step.tokens.mask[at]) found.push(value(step, at));
  }
  return Float64Array.from(found.filter(Number.isFinite)).sort();
}

// Bins over sorted values: one for each value if there are few, else of equal width between the
// 0.1th and 99.9th percentile, whose ends count what is beyond.
function binsOf(sorted) {
  const all = Float64Array.from(sorted.flatMap(values => Array.from(values))).sort();
  const distinct = [...new Set(all)];
  if (distinct.length <= MOST_VALUES) return { centres: distinct, exact: true };
  const low = all[Math.floor(all.length * 0.001)], high = all[Math.ceil(all.length * 0.999) - 1], width = (high - low) / NUM_BINS || 1;
  return { centres: Array.from({ length: NUM_BINS }, (_, bin) => low + (bin + 0.5) * width), low, width, beyond: all[0] < low || all.at(-1) > high };
}

function countIn(bins, values) {
  const counts = new Array(bins.centres.length).fill(0), places = new Map(bins.centres.map((value, place) => [value, place]));
  for (const value of values) {
    const place = bins.exact ? places.get(value) : Math.floor((value - bins.low) / bins.width);
    counts[Math.min(counts.length - 1, Math.max(0, place))]++;
  }
  return counts;
}

class Histograms {
  constructor(root) {
    Object.assign(this, { root, charts: [] });
  }

  show(steps) {
    this.charts.forEach(chart => chart.destroy());
    this.charts = [];
    const absent = [], panels = [];
    for (const quantity of QUANTITIES) {
      const values = steps.map(step => valuesOf(step, quantity));
      if (values.every(one => !one.length)) absent.push(quantity.name);
      else panels.push(this.panel(quantity, values));
    }
    const note = absent.length ? [element("p", { className: "missing", textContent: `Not known in this step: ${absent.join(", ")}.` })] : [];
    this.root.replaceChildren(...panels, ...note);
  }

  panel({ name, of }, values) {
    const bins = binsOf(values), log = of === "tokens", counts = values.map(one => countIn(bins, one));
    const lines = counts.map(line => line.map(count => (log && !count ? null : count)));
    const bin = place => (bins.exact ? known(bins.centres[place]) : `${number(bins.low + place * bins.width, 3)} to ${number(bins.low + (place + 1) * bins.width, 3)}`);
    const read = place => `${bin(place)}: ${counts.map(line => line[place]).join(" · ")}`;
    const facts = values.map((one, side) => `${values.length > 1 ? `${SIDES[side].toUpperCase()}: ` : ""}${one.length} ${of}, mean ${known(one.reduce((sum, v) => sum + v, 0) / one.length)}, median ${known(one[Math.floor(one.length / 2)])}`);
    const chart = new Chart({ title: name, x: bins.centres, lines, read, summary: facts.join("; "), bars: true, log, height: 150 });
    this.charts.push(chart);
    const ends = `${log ? "counts on a log scale" : ""}${bins.beyond ? "; the ends count what is beyond" : ""}`;
    return element("section", { className: "histogram" }, chart.root, element("p", { className: "small", textContent: [...facts, ends].filter(Boolean).join(" · ") }));
  }
}
