// Search all steps of the page: text, a regular expression between slashes, or token ids between
// brackets, where * is any one token. Results are links.

const MOST_RESULTS = 1000, MOST_IN_ROW = 20, SNIPPET = 40, AHEAD = 8;

// Matches in a row of a step: { token, before, found, after }; or the problem of the query.
function parseQuery(text) {
  const query = text.trim(), ids = query.match(/^\[(.*)\]$/s), pattern = query.match(/^\/(.+)\/([imsu]*)$/s);
  if (ids) {
    const words = ids[1].split(/[\s,]+/).filter(Boolean);
    if (!words.length || words.some(word => !/^(\*|\d+)$/.test(word))) return { problem: "give token ids and * between the brackets, as [12 * 17]" };
    const wanted = words.map(word => (word === "*" ? null : Number(word)));
    return { matches: (step, row) => idMatches(step, row, wanted) };
  }
  try {
    const words = query.replace(/^"(.*)"$/s, "$1");
    const expression = pattern ? new RegExp(pattern[1], [...new Set(`g${pattern[2]}`)].join("")) : new RegExp(words.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"), "gi");
    return { matches: (step, row) => textMatches(step, row, expression) };
  } catch (error) {
    return { problem: error.message };
  }
}

function idMatches(step, row, wanted) {
  const found = [], { index } = step.tokens, start = step.sums.starts[row], end = start + step.rows.length[row];
  if (lacks(step, row, "tokens")) return found;
  for (let at = start; at + wanted.length <= end && found.length < MOST_IN_ROW; at++) {
    if (!wanted.every((id, i) => id === null || step.ids[index[at + i]] === id)) continue;
    const text = (from, to) => { let joined = ""; for (let i = Math.max(start, from); i < Math.min(end, to); i++) joined += step.texts[index[i]]; return joined; };
    found.push({ token: at - start, before: text(at - 12, at), found: text(at, at + wanted.length), after: text(at + wanted.length, at + wanted.length + 12) });
  }
  return found;
}

function textMatches(step, row, expression) {
  const text = textOf(step, row), found = [], { index } = step.tokens, start = step.sums.starts[row];
  const hasTokens = !step.recorded?.[row] && !lacks(step, row, "tokens");
  let token = 0, length = hasTokens && step.rows.length[row] ? step.texts[index[start]].length : 0; // of the text up to and with the token
  expression.lastIndex = 0;
  for (let match; found.length < MOST_IN_ROW && (match = expression.exec(text));) {
    if (!match[0]) { expression.lastIndex++; continue; }
    const from = match.index, to = from + match[0].length;
    while (hasTokens && length <= from) length += step.texts[index[start + ++token]].length;
    found.push({ token: hasTokens ? token : undefined, before: text.slice(Math.max(0, from - SNIPPET), from), found: match[0].slice(0, 4 * SNIPPET), after: text.slice(to, to + SNIPPET) });
  }
  return found;
}

class Search {
  constructor({ input, list, status }) {
    Object.assign(this, { input, list, status, running: 0, query: "" });
  }

  // sources: [side, step] of all that is searched; place: what all links have in common.
  async run(query, steps, sources, place) {
    const turn = ++this.running, { problem, matches } = parseQuery(query);
    this.query = query;
    this.list.replaceChildren();
    this.status.textContent = problem ? `invalid search: ${problem}` : "";
    if (problem || !query.trim()) return;
    const load = one => one && steps.text(`${one.side}-${one.number}`).catch(error => error), ahead = sources.slice(0, AHEAD).map(load);
    let count = 0, done = 0;
    for (const { side, number, link } of sources) {
      const step = await ahead.shift();
      ahead.push(load(sources[done + AHEAD]));
      if (turn !== this.running) return;
      if (step instanceof Error) { this.status.textContent = step.message; return; }
      const results = [];
      for (let row = 0; row < step.count && count < MOST_RESULTS; row++) {
        for (const match of matches(step, row)) { results.push(this.result(step, row, match, { ...place, ...link, side })); count++; }
      }
      this.list.append(...results);
      done++;
      const more = count >= MOST_RESULTS ? `; ended at step ${number}: more would follow` : "";
      if (more || done % 20 === 0 || done === sources.length) this.status.textContent = `${count} ${count === 1 ? "match" : "matches"}, ${done} of ${sources.length} steps${more}`;
      if (more) return;
    }
  }

  result(step, row, { token, before, found, after }, { side, ...place }) {
    const { prompt, sample: number } = step.rows;
    const target = fragmentOf({ ...place, prompt: prompt[row], sample: number[row], token });
    const where = `${place.compare ? `${side.toUpperCase()} · ` : ""}step ${step.step} · ${promptOf(step, row)}.${number[row]}${token === undefined ? "" : ` · token ${token}`}`;
    const flat = text => text.replace(/\s+/g, " ");
    const snippet = element("span", { className: "snippet" }, flat(before), element("mark", { textContent: flat(found) }), flat(after));
    return element("li", {}, element("a", { href: target }, element("span", { className: "where", textContent: where }), snippet));
  }
}
