// The samples of a step: sorted, filtered; only the rows on the screen are in the document.

// The mean of a row: "–" without tokens in the loss mask, "?" if no value of one is known.
const mean = (name, show) => (s, r) => (Number.isFinite(s.sums[name][r]) ? show(s.sums[name][r]) : s.sums.trained[r] === 0 ? "–" : UNKNOWN);
const fixed = digits => value => value.toFixed(digits);
// In a narrow table the columns with the lowest `keep` are dropped first; the answer fills the rest.
const ANSWER_PX = 96;
const COLUMNS = [
  { name: "sample", px: 68, keep: 9, value: (s, r) => s.rows.prompt[r] * 4096 + s.rows.sample[r], show: (s, r) => `${promptOf(s, r)}.${s.rows.sample[r]}` },
  { name: "rank", px: 44, keep: 1, value: (s, r) => s.rows.rank[r], hide: s => s.rows.rank.every(rank => rank === 0) },
  { name: "reward", px: 58, keep: 8, value: (s, r) => s.rows.reward[r], format: value => known(value, 3) },
  { name: "advantage", px: 76, keep: 5, value: (s, r) => s.sums.advantage[r], show: mean("advantage", fixed(2)), hide: s => !s.tokens.advantage },
  { name: "length", px: 54, keep: 7, value: (s, r) => (lacks(s, r, "tokens") ? NaN : s.rows.length[r]), format: value => known(value) },
  { name: "finish", px: 50, keep: 4, value: (s, r) => (lacks(s, r, "finish") ? NaN : s.rows.finish[r]), show: (s, r) => finishOf(s, r) },
  { name: "logprob", px: 62, keep: 6, value: (s, r) => s.sums.logprob[r], show: mean("logprob", fixed(3)) },
  { name: "ratio", px: 50, keep: 3, value: (s, r) => s.sums.ratio[r], show: mean("ratio", fixed(2)), hide: s => !s.tokens["trainer logprob"] },
  { name: "version", px: 66, keep: 2, value: (s, r) => s.sums.oldest[r],
    show: (s, r) => mean("oldest", oldest => (oldest === s.sums.newest[r] ? number(oldest) : `${oldest}–${s.sums.newest[r]}`))(s, r) },
  { name: "answer", px: 0, keep: 9, value: (s, r) => s.sums.trained[r], show: (s, r) => answerOf(s, r, 120).replace(/\s+/g, " "), start: true },
];

// The columns that fit into this width.
function columnsThatFit(columns, width) {
  const shown = [...columns], total = () => shown.reduce((sum, column) => sum + column.px + 8, ANSWER_PX);
  while (total() > width && shown.some(column => column.keep < 7)) {
    const least = shown.reduce((low, column) => (column.keep < low.keep ? column : low));
    shown.splice(shown.indexOf(least), 1);
  }
  return shown;
}

const TITLES = { advantage: "mean over its tokens", logprob: "mean over its tokens", ratio: "the furthest from 1 of its tokens", version: "weights that sampled it",
  sample: "prompt and sample", length: "tokens, the prompt included", answer: "what the model sampled; sorts by how many tokens" };
const OPERATORS = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

// A predicate over rows from the filter text, or the word that is invalid.
function parseFilter(text, step) {
  const tests = [];
  for (const word of text.match(/"[^"]*"|\S+/g) || []) {
    const condition = word.match(/^([a-z]+)(<=|>=|!=|<|>|=)(.+)$/);
    if (!condition) {
      const wanted = word.replaceAll('"', "").toLowerCase();
      tests.push(row => textOf(step, row).toLowerCase().includes(wanted));
      continue;
    }
    const [, name, operator, operand] = condition;
    const column = COLUMNS.find(c => c.name === name);
    const values = { prompt: r => step.rows.prompt[r], sample: r => step.rows.sample[r], row: r => step.rows.row[r], trained: r => step.sums.trained[r] };
    const value = values[name] || (column && (r => column.value(step, r)));
    const compared = name === "finish" && FINISH.includes(operand) ? FINISH.indexOf(operand) : Number(operand);
    if (!value || Number.isNaN(compared)) return { problem: word };
    tests.push(row => OPERATORS[operator](value(row), compared));
  }
  return { accepts: row => tests.every(test => test(row)) };
}

class Table {
  constructor(root, choose) {
    Object.assign(this, { root, choose, order: [], sort: { name: "sample", down: false }, chosen: -1, problem: "" });
    root.addEventListener("scroll", () => this.drawRows());
    new ResizeObserver(() => this.step && this.draw()).observe(root);
  }

  show(step, filter) {
    this.step = step;
    this.columns = COLUMNS.filter(column => !column.hide || !column.hide(step));
    this.filter = filter;
    this.arrange();
  }

  arrange() {
    const { step, sort } = this;
    const { accepts, problem } = parseFilter(this.filter, step);
    this.problem = problem || "";
    const rows = Array.from({ length: step.count }, (_, row) => row);
    this.order = accepts ? rows.filter(accepts) : rows;
    const column = COLUMNS.find(c => c.name === sort.name), sign = sort.down ? -1 : 1;
    const keys = Float64Array.from(rows, row => column.value(step, row));
    // NaN comes last in both orders.
    this.order.sort((a, b) => (Number.isNaN(keys[a]) - Number.isNaN(keys[b])) || sign * (keys[a] - keys[b]) || a - b);
    this.draw();
  }

  sortBy(name) {
    this.sort = { name, down: this.sort.name === name ? !this.sort.down : name !== "sample" };
    this.arrange();
  }

  draw() {
    const narrow = matchMedia("(max-width: 760px)").matches;
    this.rowHeight = narrow ? 40 : 32;
    const shown = columnsThatFit(this.columns, this.root.clientWidth - (narrow ? 28 : 40));
    this.root.style.setProperty("--columns", shown.map(column => (column.start ? "minmax(0, 1fr)" : `${column.px}px`)).join(" "));
    const head = element("div", { className: "row head", role: "row" }, ...shown.map(column => this.heading(column)));
    this.body = element("div", { className: "body" });
    this.body.style.height = `${this.order.length * this.rowHeight}px`;
    this.shown = shown;
    this.root.setAttribute("aria-rowcount", this.order.length + 1);
    const empty = element("p", { className: "empty", textContent: "No sample matches the filter." });
    this.root.replaceChildren(head, this.body, ...(this.order.length ? [] : [empty]));
    this.drawRows();
  }

  heading(column) {
    const sorted = this.sort.name === column.name;
    const arrow = sorted ? (this.sort.down ? " ↓" : " ↑") : "";
    const button = element("button", { textContent: column.name + arrow, title: TITLES[column.name] || "", tabIndex: -1 });
    button.setAttribute("role", "columnheader");
    button.setAttribute("aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : "none");
    button.addEventListener("click", () => this.sortBy(column.name));
    return button;
  }

  drawRows() {
    if (!this.body) return;
    const first = Math.max(0, Math.floor(this.root.scrollTop / this.rowHeight) - 6);
    const last = Math.min(this.order.length, first + Math.ceil(this.root.clientHeight / this.rowHeight) + 12);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.rowAt(place));
    this.body.replaceChildren(...rows);
  }

  rowAt(place) {
    const row = this.order[place], { step } = this;
    const cells = this.shown.map(column => {
      const text = column.show ? column.show(step, row) : (column.format || number)(column.value(step, row));
      const cell = element("div", { className: `cell${column.start ? " start" : ""}`, textContent: text });
      cell.setAttribute("role", "gridcell");
      return cell;
    });
    const node = element("div", { className: "row", id: `row-${row}` }, ...cells);
    node.style.top = `${place * this.rowHeight}px`;
    node.setAttribute("role", "row");
    node.setAttribute("aria-rowindex", place + 2);
    node.setAttribute("aria-selected", row === this.chosen);
    node.addEventListener("click", () => this.choose(row, true));
    return node;
  }

  select(row) {
    this.chosen = row;
    const place = this.order.indexOf(row), top = place * this.rowHeight, head = 34;
    if (place >= 0 && top < this.root.scrollTop) this.root.scrollTop = top;
    if (place >= 0 && top + this.rowHeight + head > this.root.scrollTop + this.root.clientHeight) {
      this.root.scrollTop = top + this.rowHeight + head - this.root.clientHeight;
    }
    this.root.setAttribute("aria-activedescendant", `row-${row}`);
    this.drawRows();
  }

  // The sample `by` places further down; the first if none is selected.
  neighbour(by) {
    const place = this.order.indexOf(this.chosen);
    const next = place < 0 ? 0 : Math.min(this.order.length - 1, Math.max(0, place + by));
    return this.order[next];
  }
}
