// The data of steps: inline in this file, as scripts in a folder, or from the server; the last few
// steps are kept unpacked.

const KEPT_STEPS = 6;
const arriving = new Map();

// Called by the scripts of a folder.
function receive(name, data) {
  arriving.get(name)?.(data);
}

function loadScript(name) {
  return new Promise((resolve, reject) => {
    const script = element("script", { src: `steps/${name}.js` });
    arriving.set(name, data => resolve(bytesOfBase64(data)));
    const ended = () => { arriving.delete(name); script.remove(); reject(new Error(`steps/${name}.js is missing or incomplete`)); };
    script.addEventListener("load", ended);
    script.addEventListener("error", ended);
    document.head.append(script);
  });
}

async function fetchBlob(name) {
  const reply = await fetch(`blob/${name}`);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.arrayBuffer();
}

const SOURCES = { inline: async name => bytesOfBase64(at(name).textContent), files: loadScript, server: fetchBlob };

class Steps {
  constructor(source) {
    this.blob = SOURCES[source];
    this.kept = new Map();
  }

  // A step of side "a" or "b", with all its columns.
  async load(side, number) {
    const key = `${side}-${number}`;
    const found = this.kept.get(key) || this.read(key);
    this.kept.delete(key);
    this.kept.set(key, found);
    if (this.kept.size > KEPT_STEPS) this.kept.delete(this.kept.keys().next().value);
    try { return await found; } catch (error) { this.kept.delete(key); throw error; }
  }

  async read(key) {
    const [text, numbers] = await Promise.all([this.text(key), this.blob(`${key}-numbers`).then(unpack)]);
    return summarised({ ...text, tokens: { ...text.tokens, ...numbers.tokens } });
  }

  async text(key) {
    return readText(await unpack(await this.blob(`${key}-text`)));
  }

  // The pictures of a step, and which of them each row has.
  async images(side, number) {
    return unpackJson(await this.blob(`${side}-${number}-images`));
  }

  // The calls of agents in a step, and which of them each row has.
  async calls(side, number) {
    return unpackJson(await this.blob(`${side}-${number}-calls`));
  }

  async pair(number) {
    return unpackJson(await this.blob(`pair-${number}`));
  }
}
