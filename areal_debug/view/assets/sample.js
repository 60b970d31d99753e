// One sample: its tokens tinted by a value, as one text or as a conversation; an overview map; a
// tooltip with values.

const SPECIAL = /^\s*<\|?[\w/][^<>\s]*\|?>\s*$/;

class SampleView {
  constructor(root, tip, choose, close) {
    Object.assign(this, { root, tip, choose, close, colouring: "logprob", asTurns: null, at: -1 });
    root.addEventListener("pointermove", event => this.hover(event));
    root.addEventListener("pointerleave", () => { tip.hidden = true; });
    root.addEventListener("click", event => this.hover(event));
    root.addEventListener("scroll", () => { if (!this.walking) tip.hidden = true; });
  }

  show(step, run, row) {
    Object.assign(this, { step, run, row, at: -1 });
    this.start = step.sums.starts[row];
    this.end = this.start + step.rows.length[row];
    this.modes = colourings(step, run);
    this.maskKnown = !lacks(step, row, "mask");
    this.turns = this.turnsOf();
    this.draw();
    this.root.scrollTop = 0;
  }

  get mode() {
    const wanted = this.modes.find(mode => mode.name === this.colouring);
    return wanted.value ? wanted : this.modes.find(mode => mode.value);
  }

  // Whether a token is in the loss mask, or may be.
  trained(at) {
    return !this.maskKnown || this.step.tokens.mask[at] > 0;
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
    return this.asTurns ?? this.turns.filter(turn => turn[2]).length > 1;
  }

  draw() {
    const { step, row } = this, { rows, sums } = step;
    const back = element("button", { className: "back", textContent: "← samples" });
    back.addEventListener("click", this.close);
    const count = lacks(step, row, "tokens") ? "tokens unknown" : `${known(sums.trained[row])} of ${rows.length[row]} tokens in the loss mask`;
    const facts = `reward ${known(rows.reward[row])} · ${lacks(step, row, "finish") ? "finish reason ?" : finishOf(step, row)} · ${count}`
      + ` · mean logprob ${mean("logprob", number)(step, row)} · rank ${rows.rank[row]}, row ${rows.row[row]}`;
    const title = element("h2", { textContent: `Prompt ${promptOf(step, row)}, sample ${rows.sample[row]}` }, element("span", { textContent: facts }));
    this.map = element("canvas", { className: "map", title: "The complete sample; click to go to a token" });
    this.map.addEventListener("click", event => this.goToShare(event.offsetX / this.map.clientWidth));
    this.text = element("div");
    this.root.replaceChildren(back, title, ...this.group(), this.controls(), this.map, ...this.notes(), this.text);
    this.drawText();
  }

  // The other samples of the prompt, with their rewards.
  group() {
    const { rows, count } = this.step, prompt = rows.prompt[this.row], buttons = [];
    for (let row = 0; row < count; row++) {
      if (rows.prompt[row] !== prompt) continue;
      const button = element("button", { textContent: known(rows.reward[row], 3), title: `sample ${rows.sample[row]}, ${rows.length[row]} tokens` });
      button.setAttribute("aria-current", row === this.row);
      button.addEventListener("click", () => this.choose(row));
      buttons.push(button);
    }
    return buttons.length > 1 ? [element("div", { className: "group" }, "rewards of this prompt", ...buttons)] : [];
  }

  controls() {
    const colours = element("div", { className: "segments" });
    colours.setAttribute("role", "group");
    colours.setAttribute("aria-label", "Colour by");
    this.modes.forEach((mode, place) => {
      const why = this.step.missing[mode.name];
      const button = element("button", { textContent: mode.name, disabled: !mode.value, title: mode.value ? `colour by ${mode.name} (${place + 1})` : `not recorded: ${why || ""}` });
      button.setAttribute("aria-pressed", mode === this.mode);
      button.addEventListener("click", () => this.colourBy(mode.name));
      colours.append(button);
    });
    const layout = element("div", { className: "segments" });
    for (const [name, turns] of [["text", false], ["conversation", true]]) {
      const button = element("button", { textContent: name, title: "text or conversation (c)" });
      button.setAttribute("aria-pressed", this.drawnAsTurns === turns);
      button.addEventListener("click", () => this.layOut(turns));
      layout.append(button);
    }
    return element("div", { className: "controls" }, colours, layout, legendOf(this.mode));
  }

  notes() {
    const missing = Object.entries(this.step.missing).map(([name, why]) => `${name} (${why})`);
    const notes = missing.length ? [`Not in this record: ${missing.join("; ")}.`] : [];
    if (lacks(this.step, this.row, "tokens")) notes.push("The tokens of this row are unknown; what is known is its text.");
    else if (this.step.recorded?.[this.row]) notes.push("The tokenizer is not available, so tokens are shown as ids; the recorded text is below them.");
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

  redraw() {
    const top = this.root.scrollTop;
    this.draw();
    this.root.scrollTop = top;
  }

  drawText() {
    const nodes = this.drawnAsTurns ? this.turns.map((turn, place) => this.turn(turn, place)) : [this.tokens(this.start, this.end)];
    if (this.step.recorded?.[this.row]) nodes.push(element("div", { className: "tokens", textContent: textOf(this.step, this.row) }));
    this.text.replaceChildren(...nodes);
    requestAnimationFrame(() => this.drawMap());
  }

  turn([first, last, sampled], place) {
    const turns = this.turns.slice(0, place + 1).filter(turn => turn[2]).length;
    const name = !this.maskKnown ? "tokens" : sampled ? `model, turn ${turns}` : place === 0 ? "prompt" : "environment";
    const heading = element("h3", {}, element("span", { textContent: name }), element("span", { textContent: `${last - first} tokens` }));
    return element("section", { className: `turn ${sampled ? "model" : "given"}` }, heading, this.tokens(first, last));
  }

  tokens(first, last) {
    const { step, mode } = this, { version, index } = step.tokens, blocks = [element("div")];
    for (let at = first; at < last; at++) {
      const text = step.texts[index[at]];
      const span = element("span", { className: this.trained(at) ? "" : "out" });
      span.dataset.at = at;
      text.split("\n").forEach((part, line) => {
        if (line) span.append(element("i", { className: "mark", textContent: "↵" }), "\n");
        span.append(part);
      });
      if (SPECIAL.test(text)) span.classList.add("special");
      if (this.trained(at)) {
        const value = mode.value(at);
        span.style.background = tintStyle(tintOf(mode, value));
        if (mode.marked && mode.marked(value)) span.classList.add("clipped");
        if (at > this.start && this.trained(at - 1) && version[at - 1] !== version[at]) span.classList.add("border");
      }
      const block = blocks.at(-1), { length } = block.children;
      block.append(span);
      // Blocks outside the screen need no layout: 32,000 tokens in one block took the browser seconds.
      const endsLine = length > 100 && text.endsWith("\n");
      if (endsLine) { span.lastChild.remove(); span.lastChild.remove(); } // the end of the block ends the line
      if (endsLine || length > 1000) blocks.push(element("div"));
    }
    return element("div", { className: "tokens" }, ...blocks);
  }

  // One column per pixel, as dark as its strongest token.
  drawMap() {
    const { map, mode } = this, width = map.clientWidth, height = map.clientHeight, scale = devicePixelRatio || 1;
    if (!width) return;
    Object.assign(map, { width: width * scale, height: height * scale });
    const pen = map.getContext("2d"), style = getComputedStyle(document.documentElement), count = this.end - this.start;
    pen.scale(scale, scale);
    for (let x = 0; x < width; x++) {
      const first = this.start + Math.floor(x / width * count), last = Math.max(first + 1, this.start + Math.floor((x + 1) / width * count));
      let best = ["", -1];
      for (let at = first; at < last; at++) {
        const tint = this.trained(at) ? tintOf(mode, mode.value(at)) : ["faint", 0.12];
        if (tint[1] > best[1]) best = tint;
      }
      pen.globalAlpha = 0.12 + 0.88 * Math.max(0, best[1]);
      pen.fillStyle = style.getPropertyValue(`--${best[0]}`);
      pen.fillRect(x, height * (1 - Math.max(0.12, best[1])), 1, height);
    }
  }

  goToShare(share) {
    this.focusToken(this.start + Math.floor(share * (this.end - this.start)));
  }

  // Select the next or previous token; the first sampled one if none is selected.
  walk(by) {
    const sampled = this.turns.find(turn => turn[2]);
    this.focusToken(this.at >= 0 ? this.at + by : sampled ? sampled[0] : this.start);
  }

  focusToken(at) {
    if (this.start === this.end) return; // only its text is known
    this.at = Math.min(this.end - 1, Math.max(this.start, at));
    this.text.querySelector(".at")?.classList.remove("at");
    const span = this.text.querySelector(`[data-at="${this.at}"]`);
    span.classList.add("at");
    this.walking = true; // the scrolling that follows must not hide the tooltip
    span.scrollIntoView({ block: "center" });
    this.showTip(span);
  }

  hover(event) {
    this.walking = false;
    const span = event.target.closest?.("[data-at]");
    if (span) this.showTip(span); else this.tip.hidden = true;
  }

  showTip(span) {
    const at = Number(span.dataset.at), list = element("dl");
    for (const [name, value] of factsOf(this.step, this.row, at)) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    this.tip.replaceChildren(element("b", { textContent: JSON.stringify(this.step.texts[this.step.tokens.index[at]]) }), list);
    this.tip.hidden = false;
    const box = span.getBoundingClientRect(), mine = this.tip.getBoundingClientRect();
    const below = box.bottom + 8 + mine.height < innerHeight;
    this.tip.style.top = `${below ? box.bottom + 8 : Math.max(4, box.top - mine.height - 8)}px`;
    this.tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - mine.width - 12))}px`;
  }
}
