// The place in the page as the fragment of its address:
// #step=12&prompt=4&sample=1&token=7&compare=B&search=...

const NUMBERS = ["step", "prompt", "sample", "token"];

function parsePlace(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, "")), place = {};
  for (const name of NUMBERS) if (/^-?\d{1,16}$/.test(given.get(name) ?? "")) place[name] = Number(given.get(name));
  for (const name of ["compare", "search"]) if (given.get(name)) place[name] = given.get(name);
  return place;
}

function fragmentOf(place) {
  const given = new URLSearchParams();
  for (const name of [...NUMBERS, "compare", "search"]) if (place[name] !== undefined && place[name] !== "") given.set(name, place[name]);
  return `#${given}`;
}
