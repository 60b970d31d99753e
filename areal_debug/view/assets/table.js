// A table that is sorted and filtered; only the rows on the screen are in the document. Its items
// have numbers; `columns` have `value` and `show` of (view, item).

// In a narrow table the columns with the lowest `keep` are dropped first; the last one fills the rest.
const FILLING_PX = 96;

// The columns that fit into this width.
function columnsThatFit(columns, width) {
  const shown = [...columns], total = () => shown.reduce((sum, column) => sum + column.px + 8, FILLING_PX);
  while (total() > width && shown.some(column => column.keep < 7)) {
    const least = shown.reduce((low, column) => (column.keep < low.keep ? column : low));
    shown.splice(shown.indexOf(least), 1);
  }
  return shown;
}

const OPERATORS = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

// A predicate over the items of a view from the filter text, or the word that is invalid.
function parseFilter(text, view, columns) {
  const tests = [];
  for (const word of text.match(/"[^"]*"|\S+/g) || []) {
    const condition = word.match(/^([a-z]+)(<=|>=|!=|<|>|=)(.+)$/);
    if (!condition) {
      const wanted = word.replaceAll('"', "").toLowerCase();
      tests.push(item => sidesOf(view, item).some(({ step, row }) => textOf(step, row).toLowerCase().includes(wanted)));
      continue;
    }
    const [, name, operator, operand] = condition;
    const column = columns.find(c => c.name === name), main = read => item => read(...mainOf(view, item));
    const values = { prompt: main((s, r) => s.rows.prompt[r]), sample: main((s, r) => s.rows.sample[r]), row: main((s, r) => s.rows.row[r]), trained: main((s, r) => s.sums.trained[r]) };
    const value = values[name] || (column && (item => column.value(view, item)));
    const compared = name === "finish" && FINISH.includes(operand) ? FINISH.indexOf(operand) : Number(operand);
    if (!value || Number.isNaN(compared)) return { problem: word };
    tests.push(item => OPERATORS[operator](value(item), compared));
  }
  return { accepts: item => tests.every(test => test(item)) };
}

class Table {
  // choose(item, open): of a click; `empty` is shown without items.
  constructor(root, first, empty, choose) {
    Object.assign(this, { root, first, empty, choose, order: [], sort: { name: first, down: false }, chosen: -1, problem: "" });
    root.addEventListener("scroll", () => this.drawRows());
    new ResizeObserver(() => this.view && this.draw()).observe(root);
  }

  show(view, columns, filter = "") {
    Object.assign(this, { view, columns, filter });
    this.arrange();
  }

  arrange() {
    const { view, sort, columns } = this;
    const { accepts, problem } = parseFilter(this.filter, view, columns);
    this.problem = problem || "";
    const items = Array.from({ length: view.count }, (_, item) => item);
    this.order = accepts ? items.filter(accepts) : items;
    const column = columns.find(c => c.name === sort.name) || columns[0], sign = sort.down ? -1 : 1;
    const keys = Float64Array.from(items, item => column.value(view, item));
    // NaN comes last in both orders.
    this.order.sort((a, b) => (Number.isNaN(keys[a]) - Number.isNaN(keys[b])) || sign * (keys[a] - keys[b]) || a - b);
    this.draw();
  }

  sortBy(name) {
    this.sort = { name, down: this.sort.name === name ? !this.sort.down : name !== this.first };
    this.arrange();
    [...this.root.querySelectorAll(".head button")][this.shown.findIndex(column => column.name === name)]?.focus();
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
    const empty = element("p", { className: "empty", textContent: this.empty });
    this.root.replaceChildren(head, this.body, ...(this.order.length ? [] : [empty]));
    this.drawRows();
  }

  heading(column) {
    const sorted = this.sort.name === column.name;
    const arrow = sorted ? (this.sort.down ? " ↓" : " ↑") : "";
    const button = element("button", { textContent: column.name + arrow, title: column.title || "" });
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
    const item = this.order[place], { view } = this;
    const cells = this.shown.map(column => {
      const text = textOfCell(column, view, item);
      const cell = element("div", { className: `cell${column.start ? " start" : ""}`, textContent: text });
      cell.setAttribute("role", "gridcell");
      return cell;
    });
    const node = element("div", { className: "row", id: this.idOf(item) }, ...cells);
    node.style.top = `${place * this.rowHeight}px`;
    node.setAttribute("role", "row");
    node.setAttribute("aria-rowindex", place + 2);
    node.setAttribute("aria-selected", item === this.chosen);
    node.addEventListener("click", () => this.choose(item, true));
    return node;
  }

  idOf(item) {
    return `${this.root.id}-${item}`;
  }

  select(item) {
    this.chosen = item;
    const place = this.order.indexOf(item), top = place * this.rowHeight, head = 34;
    if (place >= 0 && top < this.root.scrollTop) this.root.scrollTop = top;
    if (place >= 0 && top + this.rowHeight + head > this.root.scrollTop + this.root.clientHeight) {
      this.root.scrollTop = top + this.rowHeight + head - this.root.clientHeight;
    }
    this.root.setAttribute("aria-activedescendant", this.idOf(item));
    this.drawRows();
  }

  // The item `by` places further down; the first if none is selected.
  neighbour(by) {
    const place = this.order.indexOf(this.chosen);
    const next = place < 0 ? 0 : Math.min(this.order.length - 1, Math.max(0, place + by));
    return this.order[next];
  }
}
