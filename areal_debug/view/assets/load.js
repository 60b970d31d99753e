// Decode a step: rows and tokens as typed arrays, and the sums of each row that the table shows.

const FINISH = ["stop", "length", "abort"];

async function unpackStep(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const arrays = { row: {}, token: {} };
  let offset = 4 + size;
  for (const { kind, name, type, length } of head.columns) {
    const array = new globalThis[type](buffer, offset, length);
    arrays[kind][name] = array;
    offset += Math.ceil(array.byteLength / 8) * 8;
  }
  return summarised({ ...head, rows: arrays.row, tokens: arrays.token, count: arrays.row.length.length });
}

// Add the start of each row, and its means over tokens in the loss mask.
function summarised(step) {
  const { rows, tokens, count } = step;
  const names = ["starts", "trained", "logprob", "ratio", "advantage", "oldest", "newest"];
  const sums = Object.fromEntries(names.map(name => [name, new Float64Array(count)]));
  const trainer = tokens["trainer logprob"], advantage = tokens.advantage;
  for (let row = 0, at = 0; row < count; row++) {
    sums.starts[row] = at;
    let trained = 0, logprob = 0, ratio = 0, given = 0, oldest = Infinity, newest = -Infinity;
    for (const end = at + rows.length[row]; at < end; at++) {
      if (!tokens.mask[at]) continue;
      trained++;
      logprob += tokens.logprob[at];
      if (trainer) ratio = Math.max(ratio, Math.abs(trainer[at] - tokens.logprob[at]));
      if (advantage) given += advantage[at];
      oldest = Math.min(oldest, tokens.version[at]);
      newest = Math.max(newest, tokens.version[at]);
    }
    sums.trained[row] = trained;
    sums.logprob[row] = trained ? logprob / trained : NaN;
    sums.ratio[row] = trained && trainer ? Math.exp(ratio) : NaN;
    sums.advantage[row] = trained && advantage ? given / trained : NaN;
    sums.oldest[row] = trained ? oldest : NaN;
    sums.newest[row] = trained ? newest : NaN;
  }
  return { ...step, sums };
}

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function textOf(step, row, most = Infinity) {
  if (step.recorded) return step.recorded[row].join("").slice(0, most);
  let text = "";
  const start = step.sums.starts[row], end = start + step.rows.length[row];
  for (let at = start; at < end && text.length < most; at++) text += step.texts[step.tokens.index[at]];
  return text;
}

// The text that the model sampled, from the first token in the loss mask.
function answerOf(step, row, most) {
  if (step.recorded) return step.recorded[row][1].slice(0, most);
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

function number(value, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}
