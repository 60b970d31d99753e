// Two steps beside each other: which rows belong together, and which tokens of two rows.

const MOST_EDITS = 1500; // beyond it, what follows the first difference is one replaced piece
const COMPARED = ["logprob", "trainer logprob", "reference logprob", "advantage", "return", "entropy", "version", "mask"];

// The items of a table: the rows of A with their partners in B, then rows that only B has. Without
// B, the rows of A.
function viewOf(a, b, pair) {
  const rowA = Array.from({ length: a.count }, (_, row) => row), rowB = new Array(a.count).fill(-1);
  if (b) pair.match.forEach((row, other) => {
    if (row >= 0) rowB[row] = other;
    else { rowA.push(-1); rowB.push(other); }
  });
  const view = { a, b, rowA, rowB, count: rowA.length, differences: b ? pair : null };
  if (b) {
    view.differs = Float64Array.from(rowA, (_, item) => firstDifference(view, item));
    view.change = Float64Array.from(rowA, (_, item) => largestChange(view, item));
  }
  return view;
}

// The sides of an item: one or two of { step, row, start, end, side }.
function sidesOf(view, item) {
  return SIDES.map(side => ({ side, step: view[side], row: side === "a" ? view.rowA[item] : view.rowB[item] }))
    .filter(({ step, row }) => step && row >= 0)
    .map(one => ({ ...one, start: one.step.sums.starts[one.row], end: one.step.sums.starts[one.row] + one.step.rows.length[one.row] }));
}

// What two tokens must have in common: the id, or the text of a redacted one.
function keyOf(step, at) {
  const entry = step.tokens.index[at];
  return step.ids[entry] >= 0 ? step.ids[entry] : step.texts[entry];
}

// The first token that differs, NaN if none does or the tokens of a side are not known.
function firstDifference(view, item) {
  const [a, b] = sidesOf(view, item);
  if (!b || lacks(a.step, a.row, "tokens") || lacks(b.step, b.row, "tokens")) return NaN;
  const equal = equalFrom(a, b), length = a.end - a.start;
  return equal === length && equal === b.end - b.start ? NaN : equal;
}

function equalFrom(a, b) {
  const most = Math.min(a.end - a.start, b.end - b.start);
  let equal = 0;
  while (equal < most && keyOf(a.step, a.start + equal) === keyOf(b.step, b.start + equal)) equal++;
  return equal;
}

// The largest change of a token's logprob from A to B, among the tokens before the first difference.
function largestChange(view, item) {
  const [a, b] = sidesOf(view, item);
  if (!b) return NaN;
  let largest = NaN;
  for (let i = 0, equal = equalFrom(a, b); i < equal; i++) {
    const change = Math.abs(b.step.tokens.logprob[b.start + i] - a.step.tokens.logprob[a.start + i]);
    if (a.step.tokens.mask[a.start + i] && !(change <= largest) && Number.isFinite(change)) largest = change;
  }
  return largest;
}

// The pieces of two rows in order: { same, a: [from, to], b: [from, to] }, positions in the steps.
function alignTokens(a, b) {
  const before = equalFrom(a, b), pieces = [];
  let endA = a.end, endB = b.end;
  while (endA > a.start + before && endB > b.start + before && keyOf(a.step, endA - 1) === keyOf(b.step, endB - 1)) { endA--; endB--; }
  const add = (same, fromA, toA, fromB, toB) => {
    if (toA > fromA || toB > fromB) pieces.push({ same, a: [fromA, toA], b: [fromB, toB] });
  };
  add(true, a.start, a.start + before, b.start, b.start + before);
  for (const [same, fromA, toA, fromB, toB] of edits(a.step, a.start + before, endA, b.step, b.start + before, endB)) add(same, fromA, toA, fromB, toB);
  add(true, endA, a.end, endB, b.end);
  return pieces;
}

// A shortest edit from one range of tokens to another, by Myers' algorithm (1986), as pieces.
function edits(stepA, fromA, toA, stepB, fromB, toB) {
  const n = toA - fromA, m = toB - fromB;
  if (!n || !m) return [[false, fromA, toA, fromB, toB]];
  const equal = (x, y) => keyOf(stepA, fromA + x) === keyOf(stepB, fromB + y);
  const most = Math.min(n + m, MOST_EDITS), reached = new Int32Array(2 * most + 3), trace = [];
  for (let d = 0; d <= most; d++) {
    trace.push(reached.slice(most - d, most + d + 3));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && reached[most + k] < reached[most + k + 2]);
      let x = down ? reached[most + k + 2] : reached[most + k] + 1, y = x - k;
      while (x < n && y < m && equal(x, y)) { x++; y++; }
      reached[most + k + 1] = x;
      if (x >= n && y >= m) return piecesOf(trace, n, m, fromA, fromB);
    }
  }
  return [[false, fromA, toA, fromB, toB]];
}

// Walk back through the trace of `edits`; neighbouring tokens of a kind are one piece.
function piecesOf(trace, n, m, fromA, fromB) {
  const marks = []; // from the end: [same, token of A or null, token of B or null]
  let x = n, y = m;
  for (let d = trace.length - 1; d > 0; d--) {
    const reached = trace[d], at = k => reached[k + d + 1], k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const beforeX = at(down ? k + 1 : k - 1), beforeY = beforeX - (down ? k + 1 : k - 1);
    while (x > (down ? beforeX : beforeX + 1) && y > (down ? beforeY + 1 : beforeY)) { x--; y--; marks.push([true, x, y]); }
    marks.push(down ? [false, null, --y] : [false, --x, null]);
  }
  while (x > 0 && y > 0) { x--; y--; marks.push([true, x, y]); }
  const pieces = [];
  let nextA = fromA, nextB = fromB;
  for (const [same, inA, inB] of marks.reverse()) {
    if (!pieces.length || pieces.at(-1)[0] !== same) pieces.push([same, nextA, nextA, nextB, nextB]);
    const piece = pieces.at(-1);
    if (inA !== null) piece[2] = ++nextA;
    if (inB !== null) piece[4] = ++nextB;
  }
  return pieces;
}

// For each value per token: how many of the aligned tokens differ, the first, and the largest change.
function valueDifferences(a, b, pieces) {
  return COMPARED.filter(name => a.step.tokens[name] && b.step.tokens[name]).map(name => {
    const left = a.step.tokens[name], right = b.step.tokens[name];
    const found = { name, count: 0, compared: 0, first: null, largest: 0 };
    for (const piece of pieces) for (let i = 0; piece.same && i < piece.a[1] - piece.a[0]; i++) {
      const one = left[piece.a[0] + i], other = right[piece.b[0] + i];
      if (Number.isNaN(one) || Number.isNaN(other)) continue;
      found.compared++;
      if (one === other) continue;
      found.first ??= piece.a[0] + i;
      found.count++;
      found.largest = Math.max(found.largest, Math.abs(one - other));
    }
    return found;
  });
}
