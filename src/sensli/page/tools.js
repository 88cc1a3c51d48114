// Elements, colours and numbers that every part of the page uses.
const isNumber = (value) => value !== null && typeof value === "object" && Object.keys(value).length === 1 && ["Infinity", "-Infinity", "NaN"].includes(value.float);
const data = JSON.parse(document.getElementById("data").textContent, (_, value) => (isNumber(value) ? Number(value.float) : value)); // JSON knows no infinity
const at = (id) => document.getElementById(id);
const room = (id) => at(id).querySelector(".drawing");
const widthOf = (id) => Math.max(240, room(id).clientWidth); // before the first layout and in a hidden frame it is 0
const still = matchMedia("(prefers-reduced-motion: reduce)"), narrow = matchMedia("(max-width: 760px)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const whole = (value) => value.toLocaleString("en-US");
const short = (value) => { const size = Math.abs(value); return size === 0 ? "0" : size < 1e-3 || size >= 1e6 ? value.toExponential(2) : size < 1e4 ? value.toPrecision(4) : whole(Math.round(value)); };
const when = (call) => `${data.unit} ${whole(call)}`; // "epoch 40", "step 12,000"
const pretty = (label) => label.replace(/(\w+)\((\d+), (\d+)(?:, ([\dx]+))?\)/g, (_, name, from, to, kernel) => { // "Linear 10→10", "Conv2d 4→6, 3×3"
  const sides = kernel && !kernel.includes("x") ? Array(Number((/Conv(\d)d/.exec(name) || [0, 1])[1])).fill(kernel).join("×") : (kernel || "").replaceAll("x", "×");
  return `${name} ${from}→${to}${kernel ? `, ${sides}` : ""}`;
});
const counted = (value) => { // "3.2 G"
  const [size, sign] = [[1e15, " P"], [1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"], [1, " "]].find(([least]) => value >= least) || [1, " "];
  return `${Number((value / size).toPrecision(3))}${sign}`;
};
const merit = (value) => value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
const icons = { play: "M6 3 L16 10 L6 17 Z", stop: "M5 3h4v14H5z M11 3h4v14h-4z", previous: "M4 3h2.5v14H4z M16 3 L7.5 10 L16 17 Z", next: "M13.5 3H16v14h-2.5z M4 3 L12.5 10 L4 17 Z", save: "M8.7 2h2.6v7h3.5L10 14.2 5.2 9h3.5z M3 15.5h14V18H3z" };
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

// --- text that fits: cut in the middle, because both ends of a path tell where it is; the whole of it is in a tooltip ---
const FONT = "12px system-ui, sans-serif", BOLD = `600 ${FONT}`; // texts of drawings: that of the style sheet, and what stands out
const ruler = document.createElement("canvas").getContext("2d");
const lengthOf = (text, font = FONT) => { ruler.font = font; return ruler.measureText(text).width; };
const cut = (text, space, font) => {
  if (lengthOf(text, font) <= space) return text;
  let least = 0, most = text.length; // as many letters as fit, more of them from the end
  const part = (letters) => `${text.slice(0, Math.floor(letters * 0.4))}…${text.slice(text.length - Math.ceil(letters * 0.6))}`;
  while (least < most) { const middle = Math.ceil((least + most) / 2); if (lengthOf(part(middle), font) <= space) least = middle; else most = middle - 1; }
  return least ? part(least) : "…";
};
const fontOf = (node) => { const style = getComputedStyle(node); return `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`; };
const label = (text, space, options) => { // a text of a drawing that stays within its space; bold only where that leaves it whole
  const bold = options.class === "on" && lengthOf(text, BOLD) <= space, short = cut(text, space);
  const node = draw("text", { ...options, ...(bold ? { "font-weight": 600 } : {}), "data-space": Math.floor(space) }, short);
  if (short !== text) node.append(draw("title", {}, text));
  return node;
};
const swatch = (kind, text) => make("span", {}, make("i", { class: kind }), text); // one entry of a legend
