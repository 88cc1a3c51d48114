// Elements, colours and numbers that every part of the page uses.
const isNumber = (value) => value !== null && typeof value === "object" && Object.keys(value).length === 1 && ["Infinity", "-Infinity", "NaN"].includes(value.float);
const data = JSON.parse(document.getElementById("data").textContent, (_, value) => (isNumber(value) ? Number(value.float) : value)); // JSON knows no infinity
const at = (id) => document.getElementById(id);
const room = (id) => at(id).querySelector(".drawing");
const widthOf = (id) => Math.max(240, room(id).clientWidth); // before the first layout and in a hidden frame it is 0
const still = matchMedia("(prefers-reduced-motion: reduce)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const whole = (value) => value.toLocaleString("en-US");
const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? value.toPrecision(4) : value.toExponential(2));
const merit = (value) => value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
const icons = { play: "M6 3 L16 10 L6 17 Z", stop: "M5 3h4v14H5z M11 3h4v14h-4z", previous: "M4 3h2.5v14H4z M16 3 L7.5 10 L16 17 Z", next: "M13.5 3H16v14h-2.5z M4 3 L12.5 10 L4 17 Z" };
const last = (list, test) => list.reduce((found, item, index) => (test(item) ? index : found), -1);
const inside = (path, outer) => path === outer || path.startsWith(`${outer}.`);

// --- building elements: text goes in as text, never as HTML ---
const make = (tag, options = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) name === "style" ? Object.assign(node.style, value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const draw = (tag, options = {}, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
};
const drawing = (width, height, label) => draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

const face = (id, icon, label) => { // a drawn sign: not every system has a font with these
  const svg = draw("svg", { viewBox: "0 0 20 20", width: 20, height: 20, "aria-hidden": "true" });
  svg.append(draw("path", { d: icons[icon] }));
  at(id).replaceChildren(svg);
  at(id).setAttribute("aria-label", label);
};
