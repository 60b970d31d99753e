// The statistics of a run over its steps: some of them as charts, any of them by choice.

const FIRST_CURVES = ["reward", "length", "staleness", "loss", "grad norm", "entropy"];

class Curves {
  constructor(root, goTo) {
    Object.assign(this, { root, goTo, chosen: null, charts: [] });
  }

  // Draw the chosen curves of the shown sides again.
  show(sides, shift, current) {
    Object.assign(this, { sides, shift });
    const steps = sides.map((side, place) => (place ? side.steps.map(step => step - shift) : side.steps));
    this.steps = [...new Set(steps.flat())].sort((a, b) => a - b);
    const places = new Map(this.steps.map((step, place) => [step, place]));
    this.lines = name => sides.map((side, number) => {
      const line = new Array(this.steps.length).fill(null);
      side.curves[name]?.forEach((value, place) => { line[places.get(steps[number][place])] = value; });
      return line;
    });
    this.names = [...new Set(sides.flatMap(side => Object.keys(side.curves)))];
    this.chosen ??= this.names.filter(name => FIRST_CURVES.includes(name));
    this.charts.forEach(chart => chart.destroy());
    this.charts = this.names.filter(name => this.chosen.includes(name)).map(name => this.chart(name));
    this.root.replaceChildren(...this.charts.map(chart => chart.root));
    this.select(current);
  }

  chart(name) {
    const lines = this.lines(name), { steps } = this;
    const read = place => `${lines.map(line => known(line[place])).join(" · ")}  at ${steps[place]}`;
    const ends = lines.map(line => `${known(line[0])} at step ${steps[0]}, ${known(line.at(-1))} at step ${steps.at(-1)}`);
    const summary = ends.map((text, side) => (ends.length > 1 ? `${SIDES[side].toUpperCase()}: ${text}` : text)).join("; ");
    const chart = new Chart({ title: name, x: steps, lines, read, summary, choose: place => this.goTo(steps[place]) });
    chart.root.classList.add("curve");
    return chart;
  }

  select(step) {
    this.charts.forEach(chart => chart.select(this.steps.indexOf(step)));
  }

  // The list of all statistics in the dialog, as check boxes; typing shows those with the words.
  pick(dialog) {
    const list = dialog.querySelector("fieldset"), words = dialog.querySelector("input[type=search]");
    const boxes = this.names.map(name => {
      const box = element("input", { type: "checkbox", checked: this.chosen.includes(name) });
      box.addEventListener("change", () => {
        this.chosen = box.checked ? [...this.chosen, name] : this.chosen.filter(other => other !== name);
        this.show(this.sides, this.shift, app.number);
      });
      return element("label", {}, box, name);
    });
    list.replaceChildren(element("legend", { textContent: "Statistics to draw" }), ...boxes);
    words.value = "";
    words.oninput = () => boxes.forEach(label => { label.hidden = !label.textContent.toLowerCase().includes(words.value.toLowerCase()); });
    dialog.showModal();
  }
}
