// The calls of an agent's row: what was asked and answered, tool calls and their results.

const MOST_SHOWN = 2000; // characters of a message, until it is opened

// A message beside its role, or a tool call or result beside its tool.
function partOf({ kind, name, text, failed }) {
  const labels = { tool_call: `calls ${name}`, result: `${name} ${failed ? "failed" : "returned"}`, message: name };
  const body = element("pre", { textContent: text.slice(0, MOST_SHOWN) });
  const parts = [element("b", { textContent: labels[kind] ?? kind }), body];
  if (text.length > MOST_SHOWN) {
    const more = element("button", { textContent: `${number(text.length - MOST_SHOWN)} more characters` });
    more.addEventListener("click", () => { body.textContent = text; more.remove(); });
    parts.push(more);
  }
  return element("li", { className: `${kind}${failed ? " failed" : ""}` }, ...parts);
}

function callOf({ turn, after, finish, reward, parts }) {
  const facts = [after === null ? "" : `after call ${after}`, `finished by ${finish}`, reward === null ? "" : `reward ${number(reward)}`];
  return element("section", {}, element("h4", { textContent: [`call ${turn}`, ...facts.filter(Boolean)].join(" · ") }), element("ol", {}, ...parts.map(partOf)));
}

// The calls of a row of a step's document; `open` is whether they are unfolded.
function callsOf({ rows, calls }, row, open) {
  const one = rows[row];
  if (!one) return element("p", { className: "missing", textContent: "The calls of this sample were not recorded." });
  const failures = one.calls.flatMap(place => calls[place].parts).filter(part => part.failed).length;
  const facts = [`${one.calls.length} ${one.calls.length === 1 ? "call" : "calls"} of ${one.agent}`];
  if (failures) facts.push(`${failures} tool ${failures === 1 ? "call" : "calls"} failed`);
  if (one.failure) facts.push(`failed by the model: ${one.failure}`);
  return element("details", { open }, element("summary", { textContent: facts.join(" · ") }), ...one.calls.map(place => callOf(calls[place])));
}
