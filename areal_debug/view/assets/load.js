// Decode a step: rows and tokens as typed arrays, and the sums of each row that the table shows.

const FINISH = ["stop", "length", "abort"], UNKNOWN = "?", SIDES = ["a", "b"];
const BITS = { tokens: 1, mask: 2, logprob: 4, version: 8, reward: 16, prompt: 32, finish: 64 };

// Whether the trainer did not know a value of a row.
function lacks(step, row, name) {
  return (step.rows.unknown[row] & BITS[name]) !== 0;
}

async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function unpackJson(bytes) {
  return JSON.parse(new TextDecoder().decode(await gunzip(bytes)));
}

// The facts of the header, and `rows` and `tokens` as typed arrays by name.
async function unpack(bytes) {
  const buffer = await gunzip(bytes);
  const size = new DataView(buffer).getUint32(0, true);
  const { columns, ...head } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const arrays = { row: {}, token: {} };
  let offset = 4 + size;
  for (const { kind, name, type, length } of columns) {
    const array = new globalThis[type](buffer, offset, length);
    arrays[kind][name] = array;
    offset += Math.ceil(array.byteLength / 8) * 8;
  }
  return { ...head, rows: arrays.row, tokens: arrays.token };
}

// The rows and tokens of a step, without their numbers.
function readText(part) {
  const { length } = part.rows, starts = new Float64Array(length.length);
  for (let row = 1; row < length.length; row++) starts[row] = starts[row - 1] + length[row - 1];
  return { ...part, count: length.length, sums: { starts } };
}

// Add the start of each row, and its means over the tokens in the loss mask whose values are known.
// Of a row whose loss mask is unknown they are over all tokens.
function summarised(step) {
  const { rows, tokens, count } = step, { starts } = step.sums;
  const names = ["trained", "logprob", "ratio", "advantage", "oldest", "newest"];
  const sums = Object.fromEntries(names.map(name => [name, new Float64Array(count)]));
  const trainer = tokens["trainer logprob"], advantage = tokens.advantage;
  for (let row = 0, at = 0; row < count; row++) {
    const anyMask = lacks({ rows }, row, "mask"), noVersion = lacks({ rows }, row, "version");
    let trained = 0, logprob = 0, scored = 0, ratio = -1, given = 0, valued = 0, oldest = Infinity, newest = -Infinity;
    for (const end = at + rows.length[row]; at < end; at++) {
      if (!tokens.mask[at] && !anyMask) continue;
      trained++;
      if (Number.isFinite(tokens.logprob[at])) { logprob += tokens.logprob[at]; scored++; }
      if (trainer) { const gap = Math.abs(trainer[at] - tokens.logprob[at]); if (gap > ratio) ratio = gap; }
      if (advantage && Number.isFinite(advantage[at])) { given += advantage[at]; valued++; }
      oldest = Math.min(oldest, tokens.version[at]);
      newest = Math.max(newest, tokens.version[at]);
    }
    sums.trained[row] = anyMask || lacks({ rows }, row, "tokens") ? NaN : trained;
    sums.logprob[row] = scored ? logprob / scored : NaN;
    sums.ratio[row] = ratio >= 0 ? Math.exp(ratio) : NaN;
    sums.advantage[row] = valued ? given / valued : NaN;
    sums.oldest[row] = trained && !noVersion ? oldest : NaN;
    sums.newest[row] = trained && !noVersion ? newest : NaN;
  }
  return { ...step, sums: { starts, ...sums } };
}

function promptOf(step, row) {
  return lacks(step, row, "prompt") ? UNKNOWN : step.rows.prompt[row];
}

function finishOf(step, row) {
  return lacks(step, row, "finish") ? UNKNOWN : FINISH[step.rows.finish[row]];
}

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function textOf(step, row, most = Infinity) {
  if (step.recorded?.[row]) return step.recorded[row].join("").slice(0, most);
  let text = "";
  const start = step.sums.starts[row], end = start + step.rows.length[row];
  for (let at = start; at < end && text.length < most; at++) text += step.texts[step.tokens.index[at]];
  return text;
}

// The text that the model sampled, from the first token in the loss mask.
function answerOf(step, row, most) {
  if (step.recorded?.[row]) return step.recorded[row][1].slice(0, most);
  if (lacks(step, row, "mask")) return textOf(step, row, most);
  const start = step.sums.starts[row], end = start + step.rows.length[row];
  let at = start;
  while (at < end && !step.tokens.mask[at]) at++;
  let text = "";
  for (; at < end && text.length < most; at++) text += step.texts[step.tokens.index[at]];
  return text;
}

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

// A value of a row or token that may be unknown.
function known(value, digits) {
  return Number.isFinite(value) ? number(value, digits) : UNKNOWN;
}

function number(value, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}
