// The network of any model: a column of boxes that scrolls to where it grows.
const drawn = data.outlines.flatMap((o) => o.units);
const most = Math.log10(10 + Math.max(10, ...drawn.map((unit) => unit.parameters))); // one scale for the whole film, so that a box that gets more units gets wider
const wider = (before, after, small) => `${whole(before)} → ${whole(after)}${small ? "" : " units"}`; // the legend says units, too
const noteOf = (unit, epoch, small) => {
  const before = unitsBefore(unit, epoch);
  if (before) return wider(before, unit.units, small);
  if (unit.growth !== null) return when(bornAt(unit.growth, epoch));
  return unit.parameters ? whole(unit.parameters) : "";
};
const marks = (look, units, epoch) => { // unit index -> merit of the site after (or before) it, at the look itself
  const found = new Map();
  if (!look || look.call !== epoch) return found;
  look.merits.forEach((entry, index) => {
    if (look.chosen.includes(index)) return;
    const unit = last(units, (u) => inside(entry.path, u.path));
    if (unit >= 0 && !found.has(unit)) found.set(unit, entry);
  });
  return found;
};
const around = (unit, units) => units.find((other) => other !== unit && other.growth === null && other.path && unit.path.startsWith(`${other.path}.`)); // the block that it is part of
let followed = null; // the look whose growth the drawing was last scrolled to
const follow = (epoch, units, middle) => { // how to scroll to what has grown, and to the top before the first look; where nothing has grown since, the reader decides
  const look = lookAt(epoch), space = room("network"), from = space.scrollTop;
  if (look === followed) return undefined;
  followed = look;
  if (!look) return (part) => { space.scrollTop = from * (1 - part); };
  const index = units.findIndex((unit) => look && look.inserted.length && [unit.growth, ...(unit.changes || [])].includes(look.inserted[0]));
  if (index < 0) return undefined;
  return (part) => { space.scrollTop = from + (middle(index) - space.clientHeight / 2 - from) * part; }; // its height is known only when it is drawn
};
const boxes = (epoch) => {
  const units = unitsAt(epoch), space = room("network"), width = widthOf("network"), phone = narrow.matches, small = width < 420;
  const high = Math.max(22, Math.min(34, (phone ? 440 : space.clientHeight - 4) / Math.max(units.length, 1) - 5)), gap = Math.min(8, high / 4);
  const names = units.map((unit) => { const block = around(unit, units); return block ? `↳ ${nameOf(unit.path.slice(block.path.length + 1))}` : nameOf(unit.path); });
  const notes = units.map((unit) => noteOf(unit, epoch, small));
  const left = 10 + Math.min(width * (small ? 0.28 : 0.32), Math.max(40, ...names.map((name) => lengthOf(name))));
  const right = 10 + Math.min(width * 0.3, Math.max(50, ...drawn.map((u) => lengthOf((u.changes || []).length ? wider(u.units || 0, u.units || 0, small) : "")), ...notes.map((note) => lengthOf(note))));
  const wide = width - left - right, centre = left + wide / 2;
  const text = (unit) => Math.max(0.34 * wide, Math.min(lengthOf(unit.label, BOLD) + 16, unit.parameters ? Math.max(0.5 * wide, 165) : wide, wide)); // room for most names
  const sizeOf = (unit) => Math.max(text(unit), unit.parameters ? (wide * Math.log10(10 + unit.parameters)) / most : 0);
  const newest = (lookAt(epoch) || { call: null }).call;
  const wanted = new Map(units.map((unit, i) => [`${unit.path}|${unit.growth || ""}`, { unit, i, place: i * (high + gap), grow: 1, size: sizeOf(unit) }]));
  const open = marks(lookAt(epoch), units, epoch), height = units.length * (high + gap);
  const paint = (rows) => {
    const svg = drawing(width, height, describe(units, epoch));
    for (const { unit, i, place, grow, size } of rows.values()) {
      const young = unit.growth !== null, now = young && bornAt(unit.growth, epoch) === newest, recent = changesOf(unit, epoch).some((growth) => growth.call === newest), before = unitsBefore(unit, epoch), y = place + (high * (1 - grow)) / 2, line = place + high / 2 + 4;
      const frame = { x: centre - size / 2, y, width: size, height: high * grow, rx: 5 }, row = draw("g", { opacity: grow });
      row.append(draw("title", {}, `${inWords(unit, epoch)}: ${whole(unit.parameters)} parameters`));
      row.append(label(names[i], left - 10, { x: left - 10, y: line, "text-anchor": "end", class: "soft" }));
      row.append(draw("rect", { ...frame, class: `box${young ? " young" : ""}${now ? " now" : ""}`, "data-unit": unit.path || "model", ...(young ? { "data-growth": unit.growth } : {}) }));
      if (before) { // the units that were added, as the share of the box that they are
        const share = size * (1 - before / unit.units);
        row.append(draw("rect", { ...frame, x: centre + size / 2 - share, width: share, class: recent ? "added now" : "added", "data-added": unit.units - before }));
      }
      row.append(label(unit.label, size - 12, { x: centre, y: line, "text-anchor": "middle", class: now ? "on" : "" }));
      row.append(label(notes[i], right - 10, { x: width, y: line, "text-anchor": "end", class: young || before ? "fresh" : "soft" }));
      if (open.has(i)) row.append(draw("circle", { cx: centre, cy: place + high + gap / 2, r: 3.5, class: "open" }));
      svg.append(row);
    }
    space.replaceChildren(svg);
  };
  move(wanted, paint, follow(epoch, units, (index) => index * (high + gap) + high / 2));
};
const boxKey = () => [
  swatch("box", "from the start"),
  ...(drawn.some((unit) => unit.growth !== null) ? [swatch("box young", "inserted"), swatch("box now", "just now")] : []),
  ...(data.growths.some((growth) => growth.units) ? [swatch("box part", "units added")] : []),
  ...(data.looks.some((look) => look.merits.length > look.chosen.length) ? [swatch("dot", "measured, not chosen")] : []),
  make("span", {}, "width of a box: parameters, on a log scale"),
];
