// The run over its steps: one small curve per quantity with a common horizontal axis. A click
// selects a step, if the page is served.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function drawRun(run, current, goTo) {
  const panels = Object.entries(run.curves).map(([name, values]) => curvePanel(name, values, run.steps, current, goTo));
  document.getElementById("run").replaceChildren(...panels);
}

function curvePanel(name, values, steps, current, goTo) {
  const given = values.filter(value => value !== null);
  const low = Math.min(...given), high = Math.max(...given), width = 300, height = 40;
  const x = place => (steps.length > 1 ? place / (steps.length - 1) * width : width / 2);
  const y = value => height - 3 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 6);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  let line = "", pen = "M";
  values.forEach((value, place) => {
    if (value === null) { pen = "M"; return; }
    line += `${pen}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  svg.append(shape("path", { d: line }));
  const label = element("b");
  const show = place => {
    svg.querySelectorAll(".guide, .here").forEach(node => node.remove());
    if (place < 0) { label.textContent = ""; return; }
    label.textContent = known(values[place]);
    svg.append(shape("line", { class: "guide", x1: x(place), x2: x(place), y1: 0, y2: height }));
    if (values[place] !== null) {
      const rx = 3.2 * width / (svg.clientWidth || width);
      svg.append(shape("ellipse", { class: "here", cx: x(place), cy: y(values[place]), rx, ry: 3.2 }));
    }
  };
  const placeAt = event => {
    const box = svg.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    return Math.round(share * (steps.length - 1));
  };
  const caption = element("span", { textContent: name });
  const home = () => { caption.textContent = name; show(steps.indexOf(current)); };
  svg.addEventListener("pointermove", event => {
    const place = placeAt(event);
    caption.textContent = `${name}, step ${steps[place]}`;
    show(place);
  });
  svg.addEventListener("pointerleave", home);
  svg.addEventListener("click", event => goTo(steps[placeAt(event)]));
  svg.setAttribute("aria-label", `${name}: ${known(values[0])} at step ${steps[0]}, ${known(values.at(-1))} at step ${steps.at(-1)}`);
  const panel = element("div", { className: "curve" }, element("p", {}, caption, label), svg);
  requestAnimationFrame(home);
  return panel;
}
