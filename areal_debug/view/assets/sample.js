// One sample, or the same one of two runs beside each other: tokens tinted by a value, an overview
// map, a tooltip with values. A token is named by its side and its position in that side's step.

const SPECIAL = /^\s*<\|?[\w/][^<>\s]*\|?>\s*$/, MOST_IN_PIECE = 400;

const SHOWN_FORMATS = ["png", "jpeg", "gif", "webp", "bmp"];

// A picture and what is known of it; a click shows it larger. Formats that may have scripts are not shown.
function pictureOf({ about, name, format, data }, number) {
  const caption = element("figcaption", { textContent: `image ${number}: ${about}${data ? "" : name ? ", not shown" : ""}`, title: name ? `sha256 ${name}` : "" });
  if (!data || !SHOWN_FORMATS.includes(format)) return element("figure", {}, caption);
  const picture = element("img", { alt: `image ${number} of the prompt`, src: `data:image/${format};base64,${data}` });
  const button = element("button", { title: "larger or smaller" }, picture);
  button.addEventListener("click", () => button.parentNode.classList.toggle("large"));
  picture.addEventListener("error", () => { button.remove(); caption.textContent += ", which this browser cannot decode"; });
  return element("figure", {}, button, caption);
}

class SampleView {
  constructor(root, tip, actions) {
    Object.assign(this, { root, tip, actions, colouring: "logprob", asTurns: null, byChange: false, side: "a", at: -1 });
    root.addEventListener("pointermove", event => this.hover(event));
    root.addEventListener("pointerleave", () => { tip.hidden = true; });
    root.addEventListener("click", event => this.hover(event, true));
    root.addEventListener("scroll", () => { if (!this.walking) tip.hidden = true; });
  }

  // runs: of the sides.
  show(view, runs, item) {
    Object.assign(this, { view, item, at: -1, sides: sidesOf(view, item) });
    this.main = this.sides[0];
    Object.assign(this, { step: this.main.step, row: this.main.row, start: this.main.start, end: this.main.end, side: this.main.side });
    this.modes = colourings(this.step, runs[SIDES.indexOf(this.main.side)]);
    this.turns = this.turnsOf();
    this.pieces = this.sides.length > 1 ? alignTokens(...this.sides) : null;
    this.partners = this.pieces && partnersOf(this.pieces);
    this.tip.hidden = true;
    this.draw();
    this.root.scrollTop = 0;
  }

  get mode() {
    const wanted = this.modes.find(mode => mode.name === this.colouring);
    return wanted.value ? wanted : this.modes.find(mode => mode.value);
  }

  // Whether a token is in the loss mask, or may be.
  trained(at, one = this.main) {
    return lacks(one.step, one.row, "mask") || one.step.tokens.mask[at] > 0;
  }

  // Runs of tokens outside or in the loss mask: [first, last + 1, sampled].
  turnsOf() {
    const turns = [];
    for (let at = this.start; at < this.end; at++) {
      const sampled = this.trained(at);
      if (!turns.length || turns.at(-1)[2] !== sampled) turns.push([at, at, sampled]);
      turns.at(-1)[1] = at + 1;
    }
    return turns;
  }

  get drawnAsTurns() {
    return !this.pieces && (this.asTurns ?? this.turns.filter(turn => turn[2]).length > 1);
  }

  draw() {
    const back = element("button", { className: "back", textContent: "← samples" });
    back.addEventListener("click", this.actions.close);
    const { step, row } = this;
    const title = element("h2", { textContent: `Prompt ${promptOf(step, row)}, sample ${step.rows.sample[row]}` });
    this.map = element("canvas", { className: "map", title: "The complete sample; click to go to a token", ariaHidden: "true" });
    this.map.addEventListener("click", event => this.goToShare(event.offsetX / this.map.clientWidth));
    this.text = element("div");
    this.root.replaceChildren(back, title, ...this.sides.map(one => this.facts(one)), ...this.group(), ...this.differences(), ...this.images(), ...this.calls(), this.controls(), this.map, ...this.notes(), this.text);
    this.drawText();
  }

  facts({ side, step, row }) {
    const { rows, sums } = step;
    const count = lacks(step, row, "tokens") ? "tokens unknown" : `${known(sums.trained[row])} of ${rows.length[row]} tokens in the loss mask`;
    const text = `reward ${known(rows.reward[row])} · ${lacks(step, row, "finish") ? "finish reason ?" : finishOf(step, row)} · ${count}`
      + ` · mean logprob ${mean("logprob", number)(step, row)} · rank ${rows.rank[row]}, row ${rows.row[row]}`;
    return element("p", { className: "facts", textContent: this.view.b ? `${side.toUpperCase()}: ${text}` : text });
  }

  // The other samples of the prompt, with their rewards.
  group() {
    const { view, step, row } = this, prompt = step.rows.prompt[row], buttons = [];
    if (lacks(step, row, "prompt")) return [];
    for (let item = 0; item < view.count; item++) {
      const [other, at] = mainOf(view, item);
      if (other !== step || other.rows.prompt[at] !== prompt) continue;
      const text = bothSides(SAMPLES.find(column => column.name === "reward"), view, item);
      const button = element("button", { textContent: text, title: `sample ${other.rows.sample[at]}, ${other.rows.length[at]} tokens`, ariaLabel: `sample ${other.rows.sample[at]}, reward ${text}` });
      button.setAttribute("aria-current", item === this.item);
      button.addEventListener("click", () => this.actions.choose(item));
      buttons.push(button);
    }
    return buttons.length > 1 ? [element("div", { className: "group" }, "rewards of this prompt", ...buttons)] : [];
  }

  // What differs between the sides: tokens, and values of the tokens that both have. A click goes to
  // the first one.
  differences() {
    if (!this.view.b) return [];
    if (!this.pieces) return [element("p", { className: "missing", textContent: `Only ${this.side.toUpperCase()} has this sample.` })];
    const other = this.pieces.find(piece => !piece.same), [a, b] = this.sides;
    const alone = side => this.pieces.reduce((sum, piece) => sum + (piece.same ? 0 : piece[side][1] - piece[side][0]), 0);
    const unknown = this.sides.some(one => lacks(one.step, one.row, "tokens"));
    const chips = [this.chip(unknown ? "tokens unknown" : other ? `tokens differ from token ${other.a[0] - a.start}: ${alone("a")} only in A, ${alone("b")} only in B` : "same tokens", other && !unknown, () => this.goToPiece(other))];
    for (const { name, count, compared, first, largest } of valueDifferences(a, b, this.pieces)) {
      if (count) chips.push(this.chip(`${name}: ${count} of ${compared} differ, by up to ${number(largest, 3)}`, true, () => this.focusToken(first, "a")));
    }
    if (chips.length === 1 && !unknown) chips.push(element("span", { textContent: other ? "all values of the shared tokens are equal" : "and equal values" }));
    return [element("div", { className: "group differences", role: "group", ariaLabel: "Differences between A and B" }, ...chips)];
  }

  // The pictures of each side's row, which are loaded with the first sample that has any.
  images() {
    return this.sides.filter(({ step, row }) => step.images?.[row]).map(({ side, step, row }) => {
      const box = element("div", { className: "images" });
      step.pictures ||= this.actions.images(side, step.step);
      step.pictures.then(
        ({ rows, images }) => box.replaceChildren(...rows[row].map((place, number) => pictureOf(images[place], number))),
        error => { step.pictures = null; box.replaceChildren(error.message); },
      );
      return box;
    });
  }

  // The calls of each side's row, which are loaded with the first sample that has any.
  calls() {
    return this.sides.filter(({ step, row }) => step.rows.calls?.[row]).map(({ side, step, row }) => {
      const box = element("div", { className: "calls" });
      step.conversations ||= this.actions.calls(side, step.step);
      step.conversations.then(
        found => {
          box.replaceChildren(...(this.view.b ? [`${side.toUpperCase()}: `] : []), callsOf(found, row, this.unfolded ?? true));
          box.querySelector("details")?.addEventListener("toggle", event => { this.unfolded = event.target.open; });
        },
        error => { step.conversations = null; box.replaceChildren(error.message); },
      );
      return box;
    });
  }

  chip(textContent, leads, go) {
    if (!leads) return element("span", { textContent });
    const button = element("button", { textContent, title: "go to the first" });
    button.addEventListener("click", go);
    return button;
  }

  goToPiece(piece) {
    const side = piece.a[1] > piece.a[0] ? "a" : "b";
    this.focusToken(piece[side][0], side);
  }

  // Go to the next token that differs, the first one after the last.
  nextDifference() {
    const others = this.pieces?.filter(piece => !piece.same) || [];
    const next = others.find(piece => this.at < 0 || piece[this.side][0] > this.at) || others[0];
    if (next) this.goToPiece(next);
  }

  controls() {
    const colours = this.segments("Colour by", this.modes.map((mode, place) => ({
      name: mode.name, pressed: mode === this.mode, disabled: !mode.value, go: () => this.colourBy(mode.name),
      title: mode.value ? `colour by ${mode.name} (${place + 1})` : `not recorded: ${this.step.missing[mode.name] || this.step.missing.ratio || ""}`,
    })));
    const layout = this.pieces
      ? this.segments("Tint", [["value", false], ["B − A", true]].map(([name, on]) => ({ name, pressed: this.byChange === on, title: "tint by the value, or by its change from A to B (x)", go: () => this.tintByChange(on) })))
      : this.segments("Layout", [["text", false], ["conversation", true]].map(([name, turns]) => ({ name, pressed: this.drawnAsTurns === turns, title: "text or conversation (c)", go: () => this.layOut(turns) })));
    const shown = this.changes() ? { ends: ["lower in B", "higher in B"], colours: ["cool", "warm"] } : this.mode;
    return element("div", { className: "controls" }, colours, layout, legendOf(shown));
  }

  segments(label, choices) {
    const buttons = choices.map(({ name, pressed, disabled = false, title, go }) => {
      const button = element("button", { textContent: name, disabled, title, ariaPressed: String(pressed) });
      button.addEventListener("click", go);
      return button;
    });
    return element("div", { className: "segments", role: "group", ariaLabel: label }, ...buttons);
  }

  notes() {
    const notes = [];
    for (const { side, step, row } of this.sides) {
      const missing = Object.entries(step.missing).map(([name, why]) => `${name} (${why})`), where = this.view.b ? `${side.toUpperCase()}: ` : "";
      if (missing.length) notes.push(`${where}Not in this record: ${missing.join("; ")}.`);
      if (lacks(step, row, "tokens")) notes.push(`${where}The tokens of this row are unknown; what is known is its text.`);
      else if (step.recorded?.[row]) notes.push(`${where}The tokenizer is not available, so tokens are shown as ids; the recorded text is below them.`);
    }
    return notes.map(textContent => element("p", { className: "missing", textContent }));
  }

  colourBy(name) {
    if (!this.modes.find(mode => mode.name === name).value) return;
    this.colouring = name;
    this.redraw();
  }

  layOut(turns) {
    this.asTurns = turns;
    this.redraw();
  }

  tintByChange(on) {
    this.byChange = on;
    this.redraw();
  }

  redraw() {
    const top = this.root.scrollTop, pressed = this.root.contains(document.activeElement) && document.activeElement.textContent;
    this.draw();
    this.root.scrollTop = top;
    if (pressed) [...this.root.querySelectorAll(".controls button")].find(button => button.textContent === pressed)?.focus({ preventScroll: true });
    if (this.at >= 0) this.spanOf(this.at, this.side)?.classList.add("at");
  }

  drawText() {
    this.scale = this.changes();
    const nodes = this.pieces ? [this.compared()]
      : this.drawnAsTurns ? this.turns.map((turn, place) => this.turn(turn, place)) : [this.tokens(this.start, this.end)];
    for (const { step, row } of this.sides) if (step.recorded?.[row]) nodes.push(element("div", { className: "tokens", textContent: textOf(step, row) }));
    this.text.replaceChildren(...nodes);
    requestAnimationFrame(() => this.drawMap());
  }

  turn([first, last, sampled], place) {
    const turns = this.turns.slice(0, place + 1).filter(turn => turn[2]).length;
    const name = lacks(this.step, this.row, "mask") ? "tokens" : sampled ? `model, turn ${turns}` : place === 0 ? "prompt" : "environment";
    const heading = element("h3", {}, element("span", { textContent: name }), element("span", { textContent: `${last - first} tokens` }));
    return element("section", { className: `turn ${sampled ? "model" : "given"}` }, heading, this.tokens(first, last));
  }

  tokens(first, last) {
    const blocks = [element("div")];
    for (let at = first; at < last; at++) {
      const block = blocks.at(-1), span = this.token(this.main, at);
      block.append(span);
      // Blocks outside the screen need no layout: 32,000 tokens in one block took the browser seconds.
      const endsLine = block.children.length > 100 && this.step.texts[this.step.tokens.index[at]].endsWith("\n");
      if (endsLine) { span.lastChild.remove(); span.lastChild.remove(); } // the end of the block ends the line
      if (endsLine || block.children.length > 1000) blocks.push(element("div"));
    }
    return element("div", { className: "tokens" }, ...blocks);
  }

  token(one, at) {
    const { step, side } = one, { version, index } = step.tokens, text = step.texts[index[at]], { mode } = this;
    const span = element("span", { className: this.trained(at, one) ? "" : "out" });
    span.dataset.at = at;
    span.dataset.side = side;
    text.split("\n").forEach((piece, line) => {
      if (line) span.append(element("i", { className: "mark", textContent: "↵" }), "\n");
      span.append(piece);
    });
    if (SPECIAL.test(text)) span.classList.add("special");
    if (!this.trained(at, one)) return span;
    const value = mode.value(step, at);
    span.style.background = tintStyle(this.scale ? this.changeAt(side, at) : tintOf(mode, value));
    if (mode.marked && mode.marked(value)) span.classList.add("clipped");
    if (at > one.start && this.trained(at - 1, one) && version[at - 1] !== version[at]) span.classList.add("border");
    return span;
  }

  // The largest change of the value from A to B, if tokens are tinted by it, else 0.
  changes() {
    if (!this.pieces || !this.byChange) return 0;
    let largest = 0;
    for (const [at, other] of this.partners.a) {
      const change = Math.abs(this.changeOf(at, other));
      if (change > largest) largest = change;
    }
    return largest || 1;
  }

  changeOf(atA, atB) {
    const [a, b] = this.sides;
    return this.mode.value(b.step, atB) - this.mode.value(a.step, atA);
  }

  changeAt(side, at) {
    const other = this.partners[side].get(at);
    const change = other === undefined ? NaN : side === "a" ? this.changeOf(at, other) : this.changeOf(other, at);
    return Number.isFinite(change) ? changeTint(change, this.scale) : ["faint", 0];
  }

  // Both sides beside each other, aligned where a line ends in both.
  compared() {
    const [a, b] = this.sides, grid = element("div", { className: "compared" });
    const heads = this.sides.map(one => element("h3", { textContent: `${one.side.toUpperCase()}, step ${one.step.step}` }));
    let cells = [], first = true;
    const open = () => { cells = [a, b].map(() => element("div", { className: "tokens" })); grid.append(element("div", { className: "beside given" }, ...cells)); };
    open();
    for (const piece of this.pieces) {
      if (piece.same) {
        for (let i = 0; i < piece.a[1] - piece.a[0]; i++) {
          cells[0].append(this.token(a, piece.a[0] + i));
          cells[1].append(this.token(b, piece.b[0] + i));
          if (this.trained(piece.a[0] + i, a)) cells[0].parentNode.classList.remove("given");
          const ended = a.step.texts[a.step.tokens.index[piece.a[0] + i]].endsWith("\n") || cells[0].children.length > MOST_IN_PIECE;
          if (ended) open();
        }
        continue;
      }
      cells[0].parentNode.classList.remove("given");
      for (const [place, one] of [a, b].entries()) {
        const [from, to] = piece[one.side];
        for (let at = from; at < to; at++) {
          const span = this.token(one, at);
          span.classList.add("only");
          if (first && at === from) span.classList.add("first");
          cells[place].append(span);
        }
        if (first && from === to) cells[place].append(element("i", { className: "first gap", title: "the other side has tokens here" }));
      }
      first = false;
    }
    return element("div", {}, element("div", { className: "beside heads" }, ...heads), grid);
  }

  // One column per pixel, as dark as its strongest token.
  drawMap() {
    const { map, mode } = this, width = map.clientWidth, height = map.clientHeight, scale = devicePixelRatio || 1;
    if (!width) return;
    Object.assign(map, { width: width * scale, height: height * scale });
    const pen = map.getContext("2d"), colours = new Map(), count = this.end - this.start;
    pen.scale(scale, scale);
    for (let x = 0; x < width; x++) {
      const first = this.start + Math.floor(x / width * count), last = Math.max(first + 1, this.start + Math.floor((x + 1) / width * count));
      let best = ["", -1];
      for (let at = first; at < last; at++) {
        const tint = !this.trained(at) ? ["faint", 0.12] : this.scale ? this.changeAt(this.side, at) : tintOf(mode, mode.value(this.step, at));
        const shown = this.partners && !this.partners[this.main.side].has(at) ? ["bad", 1] : tint;
        if (shown[1] > best[1]) best = shown;
      }
      pen.globalAlpha = 0.12 + 0.88 * Math.max(0, best[1]);
      if (!colours.has(best[0])) colours.set(best[0], cssColour(`--${best[0]}`));
      pen.fillStyle = colours.get(best[0]);
      pen.fillRect(x, height * (1 - Math.max(0.12, best[1])), 1, height);
    }
  }

  goToShare(share) {
    this.focusToken(this.start + Math.floor(share * (this.end - this.start)), this.main.side);
  }

  // Select the next or previous token; the first sampled one if none is selected.
  walk(by) {
    const sampled = this.turns.find(turn => turn[2]);
    this.focusToken(this.at >= 0 ? this.at + by : sampled ? sampled[0] : this.start);
  }

  spanOf(at, side) {
    return this.text.querySelector(`[data-at="${at}"][data-side="${side}"]`);
  }

  focusToken(at, side = this.side) {
    const one = this.sides.find(other => other.side === side);
    if (one.start === one.end) return; // only its text is known
    Object.assign(this, { side, at: Math.min(one.end - 1, Math.max(one.start, at)) });
    this.walking = true; // the scrolling that follows must not hide the tooltip
    const span = this.spanOf(this.at, side);
    this.mark(span);
    span.scrollIntoView({ block: "center" });
    this.showTip(span);
    announce(this.tip.innerText.replaceAll(/\s+/g, " "));
    this.actions.moved();
  }

  mark(span) {
    this.text.querySelector(".at")?.classList.remove("at");
    span.classList.add("at");
  }

  hover(event, selects = false) {
    this.walking = false;
    const span = event.target.closest?.("[data-at]");
    if (!span) { this.tip.hidden = true; return; }
    this.showTip(span);
    if (!selects) return;
    Object.assign(this, { side: span.dataset.side, at: Number(span.dataset.at) });
    this.mark(span);
    this.actions.moved();
  }

  showTip(span) {
    const at = Number(span.dataset.at), { side } = span.dataset, one = this.sides.find(other => other.side === side);
    const partner = this.partners?.[side].get(at), other = this.sides.find(second => second !== one);
    this.text.querySelector(".partner")?.classList.remove("partner");
    if (partner !== undefined) this.spanOf(partner, other.side)?.classList.add("partner");
    const facts = factsOf(one.step, one.row, at);
    const rows = partner === undefined ? facts.map(([name, value]) => [name, factText(value)]) : this.besides(one, at, other, partner);
    const heads = partner === undefined ? [] : [element("tr", {}, ...["", "A", "B", "B − A"].map(textContent => element("th", { textContent, scope: "col" })))];
    const lines = rows.map(([name, ...values]) => element("tr", {}, element("th", { textContent: name, scope: "row" }), ...values.map(textContent => element("td", { textContent }))));
    const note = this.pieces && partner === undefined ? [element("p", { textContent: `only in ${side.toUpperCase()}` })] : [];
    this.tip.replaceChildren(element("b", { textContent: JSON.stringify(one.step.texts[one.step.tokens.index[at]]) }), ...note, element("table", {}, ...heads, ...lines));
    this.tip.hidden = false;
    this.placeTip(span);
    // What came into view by scrolling has its size a frame later.
    requestAnimationFrame(() => requestAnimationFrame(() => this.placeTip(span)));
  }

  placeTip(span) {
    const box = span.getBoundingClientRect(), mine = this.tip.getBoundingClientRect();
    const below = box.bottom + 8 + mine.height < innerHeight;
    this.tip.style.top = `${below ? box.bottom + 8 : Math.max(4, box.top - mine.height - 8)}px`;
    this.tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - mine.width - 12))}px`;
  }

  // The values of a token and of its partner, and the change from A to B.
  besides(one, at, other, partner) {
    const sides = [[one, at], [other, partner]].sort(([x], [y]) => (x.side < y.side ? -1 : 1));
    const [left, right] = sides.map(([{ step, row }, place]) => new Map(factsOf(step, row, place)));
    return [...new Set([...left.keys(), ...right.keys()])].map(name => {
      const [a, b] = [left.get(name), right.get(name)];
      const change = typeof a === "number" && typeof b === "number" && name !== "token id" ? (a === b ? "=" : known(b - a, 3)) : a === b ? "=" : "≠";
      return [name, ...[a, b].map(value => (value === undefined ? UNKNOWN : factText(value))), change];
    });
  }
}

// The partner of each token that both sides have, by side.
function partnersOf(pieces) {
  const found = { a: new Map(), b: new Map() };
  for (const { same, a, b } of pieces) for (let i = 0; same && i < a[1] - a[0]; i++) {
    found.a.set(a[0] + i, b[0] + i);
    found.b.set(b[0] + i, a[0] + i);
  }
  return found;
}
