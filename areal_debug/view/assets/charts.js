// A chart with axes, a reading of the values under the pointer, and keys: arrows move it, Enter
// chooses. Lines of one or two sides over a common axis, or bars.

const FEW = 6, POWERS = Array.from({ length: 10 }, (_, power) => 10 ** power), WHOLE = POWERS.flatMap(power => [power, 2 * power, 5 * power]), LINE_COLOURS = ["--accent", "--warm"], charts = new Set();

// The value of a colour of the style sheet, for a canvas: `light-dark()` is resolved.
function cssColour(name) {
  const probe = document.body.appendChild(element("i"));
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

class Chart {
  // x: ascending numbers. lines: arrays of values, null where unknown, one for each side.
  // read(place): the text of a place. choose(place), if places can be chosen.
  constructor({ title, x, lines, read, summary, choose, bars = false, log = false, height = 110 }) {
    Object.assign(this, { x, lines, read, choose, bars, log, height, chosen: -1, place: -1 });
    this.caption = element("span", { textContent: title });
    this.value = element("b");
    this.box = element("div", { className: "plot", tabIndex: 0, role: "slider", ariaLabel: `${title}. ${summary}`, ariaValueMin: "0", ariaValueMax: String(x.length - 1) });
    this.root = element("div", { className: "chart" }, element("p", {}, this.caption, this.value), this.box);
    this.box.addEventListener("keydown", event => this.pressed(event));
    this.box.addEventListener("blur", () => this.show(this.chosen));
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.box);
    charts.add(this);
    this.show(-1);
  }

  fit() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: this.height });
    else this.draw(width);
  }

  draw(width) {
    const soft = cssColour("--soft"), grid = { stroke: cssColour("--line"), width: 1 };
    const axis = { stroke: soft, font: "11px system-ui, sans-serif", grid, ticks: { ...grid, size: 4 }, gap: 3 };
    const short = (plot, values) => values.map(value => (value === null ? "" : number(value, 6)));
    const space = this.x.slice(1).reduce((low, x, place) => Math.min(low, x - this.x[place]), this.x.length > 1 ? Infinity : 1) * 0.6;
    const series = this.lines.map((_, side) => {
      const stroke = cssColour(LINE_COLOURS[side]);
      if (this.bars && side === 0) return { stroke, fill: `color-mix(in srgb, ${stroke} 45%, transparent)`, width: 1, paths: uPlot.paths.bars({ size: [0.92, 60] }), points: { show: false } };
      if (this.bars) return { stroke, width: 2, paths: uPlot.paths.bars({ size: [0.92, 60] }), points: { show: false } };
      return { stroke, width: 1.5, dash: side ? [5, 3] : undefined, spanGaps: false, points: { show: this.x.length < 3, size: 5 } };
    });
    this.plot = new uPlot({
      width, height: this.height, legend: { show: false }, series: [{}, ...series], padding: [6, 8, 0, 0],
      scales: { x: { time: false, ...(this.bars && { range: (_, low, high) => [low - space, high + space] }) }, y: this.log ? { distr: 3, range: (_, low, high) => [0.5, Math.max(10, high * 1.3)] } : this.bars ? { range: (_, low, high) => [0, high * 1.08 || 1] } : { range: (_, low, high) => rangeOf(low, high) } },
      axes: [{ ...axis, size: 20, space: 55, values: short, ...(!this.bars && { incrs: WHOLE }), ...(this.bars && this.x.length <= FEW && { splits: () => this.x, values: (_, values) => values.map(value => number(value, 3)) }) }, { ...axis, size: 46, space: 26, values: short, ...(this.bars && { incrs: WHOLE }), ...(this.log && { splits: () => POWERS }) }],
      cursor: { y: false, drag: { x: !this.bars, y: false, dist: 8 }, points: { size: 6 }, sync: this.choose ? { key: "steps" } : undefined },
      hooks: { setCursor: [plot => this.moved(plot.cursor.idx)], draw: [plot => this.mark(plot)] },
    }, [this.x, ...this.lines], this.box);
    let down = 0;
    this.plot.over.addEventListener("mousedown", event => { down = event.clientX; });
    this.plot.over.addEventListener("click", event => {
      if (this.choose && Math.abs(event.clientX - down) < 5 && this.plot.cursor.idx != null) this.choose(this.plot.cursor.idx);
    });
  }

  // The line at the chosen place.
  mark(plot) {
    if (this.chosen < 0) return;
    const x = plot.valToPos(this.x[this.chosen], "x", true), { top, height } = plot.bbox, pen = plot.ctx;
    pen.save();
    pen.strokeStyle = cssColour("--soft");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
    pen.restore();
  }

  moved(place) {
    this.show(place ?? this.chosen);
  }

  select(place) {
    this.chosen = place;
    this.plot?.redraw(false);
    this.show(place);
  }

  show(place) {
    this.place = place;
    const text = place >= 0 && place < this.x.length ? this.read(place) : "";
    this.value.textContent = text;
    this.box.ariaValueNow = String(Math.max(0, place));
    this.box.ariaValueText = text || "nothing selected";
  }

  pressed(event) {
    const last = this.x.length - 1;
    const to = { ArrowRight: this.place + 1, ArrowLeft: this.place - 1, Home: 0, End: last, PageDown: this.place + 10, PageUp: this.place - 10 }[event.key];
    if (to === undefined && !(event.key === "Enter" && this.choose && this.place >= 0)) return;
    event.preventDefault();
    event.stopPropagation();
    if (to === undefined) { this.choose(this.place); return; }
    const place = Math.min(last, Math.max(0, to));
    this.plot?.setCursor({ left: this.plot.valToPos(this.x[place], "x"), top: 10 });
    this.show(place);
  }

  redraw() {
    this.plot?.destroy();
    this.plot = null;
    this.fit();
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
    charts.delete(this);
  }
}

function rangeOf(low, high) {
  if (low === null || high === null) return [0, 1];
  const space = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - space, high + space];
}
