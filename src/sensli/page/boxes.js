// The network of any model: a column of boxes that scrolls to where it grows.
const drawn = data.outlines.flatMap((o) => o.units);
const most = Math.log10(10 + Math.max(10, ...drawn.map((unit) => unit.parameters))); // one scale for the whole film, so that a box that gets more units gets wider
const chain = (widths, small) => `${widths.map(whole).join(" → ")}${small ? "" : " units"}`; // the legend says units, too
const noteOf = (unit, units, epoch, small, space) => {
  const widths = widthsOf(unit, epoch), resized = unit.growth === null && resizedBy(unit, epoch).length ? sizesOf(unit, units) : null;
  if (widths.length) { // every step of it where there is room, otherwise the first and the last
    return [chain(widths, small), chain(widths, true), chain([widths[0], widths[widths.length - 1]], small)].find((text) => lengthOf(text) <= space) || chain([widths[0], widths[widths.length - 1]], true);
  }
  if (resized) return [resized.map(whole).join(" → "), `+${whole(resized[1] - resized[0])}`].find((text) => lengthOf(text) <= space - 4) || whole(resized[1]);
  return unit.parameters ? whole(unit.parameters) : "";
};
const marks = (look, units) => { // unit index -> merit of the site after (or before) it, at the last check
  const found = new Map();
  if (!look) return found;
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
  const names = units.map((unit) => { // what is new is called by when it came: the numbers of new modules do not follow the order of the layers
    const block = around(unit, units), own = block ? nameOf(unit.path.slice(block.path.length + 1)) : nameOf(unit.path);
    return `${block ? "↳ " : ""}${unit.growth === null ? own : `new, ${when(bornAt(unit.growth, epoch))}`}`;
  });
  const notes = units.map((unit) => noteOf(unit, units, epoch, small, width * 0.3 - 2));
  const left = 10 + Math.min(width * (small ? 0.28 : 0.32), Math.max(40, ...names.map((name) => lengthOf(name))));
  const widest = drawn.map((u) => (u.changes || []).length ? lengthOf(chain([u.units || 0, u.units || 0], small)) : 0);
  const right = 10 + Math.min(width * 0.3, Math.max(50, ...widest, ...notes.map((note) => lengthOf(note))));
  const wide = width - left - right, centre = left + wide / 2;
  const text = (unit) => Math.max(0.34 * wide, Math.min(lengthOf(pretty(unit.label), BOLD) + 16, unit.parameters ? Math.max(0.5 * wide, 165) : wide, wide)); // room for most names
  const sizeOf = (unit) => Math.max(text(unit), unit.parameters ? (wide * Math.log10(10 + unit.parameters)) / most : 0);
  const newest = (lookAt(epoch) || { call: null }).call;
  const wanted = new Map(units.map((unit, i) => [`${unit.path}|${unit.growth || ""}`, { unit, i, place: i * (high + gap), grow: 1, size: sizeOf(unit) }]));
  const look = lookAt(epoch), open = marks(look, units), height = units.length * (high + gap);
  const paint = (rows) => {
    const svg = drawing(width, height, describe(units, epoch));
    for (const { unit, i, place, grow, size } of rows.values()) {
      const young = unit.growth !== null, now = young && bornAt(unit.growth, epoch) === newest, widths = widthsOf(unit, epoch);
      const resized = young ? [] : resizedBy(unit, epoch), current = [...resized, ...changesOf(unit, epoch)].some((growth) => growth.call === newest);
      const y = place + (high * (1 - grow)) / 2, band = widths.length ? Math.max(4, Math.min(6, high / 5)) : 0, line = place + high / 2 + 4;
      const frame = { x: centre - size / 2, y, width: size, height: high * grow, rx: 5 }, row = draw("g", { opacity: grow });
      const state = `${young ? " young" : ""}${now ? " now" : ""}${resized.length ? " resized" : ""}${!now && current ? " current" : ""}`;
      row.append(draw("title", {}, `${inWords(unit, epoch)}: ${whole(unit.parameters)} parameters${widths.length ? `, ${chain([widths[0], unit.units])}` : ""}`));
      row.append(label(names[i], left - 10, { x: left - 10, y: line, "text-anchor": "end", class: young ? "fresh" : "soft" }));
      row.append(draw("rect", { ...frame, class: `box${state}`, "data-unit": unit.path || "model", ...(young ? { "data-growth": unit.growth } : {}), ...(resized.length ? { "data-resized": resized.map((growth) => growth.number).join(" ") } : {}) }));
      row.append(label(pretty(unit.label), size - 12, { x: centre, y: line - band / 2, "text-anchor": "middle", class: now ? "on" : "" }));
      if (band) { // a strip at the lower edge: the units from the start, and those of each growth, as the shares that they are
        const strip = draw("g", { "data-added": unit.units - widths[0] }), grown = changesOf(unit, epoch).filter((growth) => growth.units), inner = size - 6;
        widths.slice(1).forEach((until, k) => {
          const part = { x: centre - size / 2 + 3 + (inner * widths[k]) / unit.units, y: y + (high - band - 1.5) * grow, width: Math.max(1, (inner * (until - widths[k])) / unit.units - 1), height: band * grow };
          const piece = draw("rect", { ...part, class: grown[k] && grown[k].call === newest ? "added now" : "added", "data-part": until - widths[k] });
          piece.append(draw("title", {}, `${grown[k] ? `${when(grown[k].call)}: ` : ""}${whole(widths[k])} → ${whole(until)}`));
          strip.append(piece);
        });
        row.append(strip);
      }
      row.append(label(notes[i], right - 10, { x: width, y: line, "text-anchor": "end", class: young || widths.length || resized.length ? "fresh" : "soft" }));
      if (open.has(i)) row.append(draw("circle", { cx: centre, cy: place + high + gap / 2, r: 3.5, class: look.call === epoch ? "open" : "open past" }));
      svg.append(row);
    }
    space.replaceChildren(svg);
  };
  move(wanted, paint, follow(epoch, units, (index) => index * (high + gap) + high / 2));
};
const boxKey = () => [
  swatch("box", "from the start"),
  ...(drawn.some((unit) => unit.growth !== null) ? [swatch("box young", "new"), swatch("box now", "just now")] : []),
  ...(data.growths.some((growth) => growth.units) ? [swatch("box part", "units added, one piece per growth")] : []),
  ...(drawn.some((unit) => (unit.resized || []).length) ? [swatch("box resized", "resized with them (parameters)")] : []),
  ...(data.looks.some((look) => look.merits.length > look.chosen.length) ? [swatch("dot", "a site that was measured")] : []),
  make("span", {}, "width of a box: parameters, on a log scale"),
];
