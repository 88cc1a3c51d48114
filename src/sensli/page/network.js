// What holds at a position of the slider, and the network as it is then.
// --- what holds at a position of the slider ---
const slider = at("slider");
const call = () => data.frames[Number(slider.value)];
const lookAt = (epoch) => data.looks[last(data.looks, (look) => look.call <= epoch)];
const unitsAt = (epoch) => { const found = data.outlines[last(data.outlines, (o) => o.call <= epoch)]; return found ? found.units : []; };
const valueAt = (curve, epoch) => { const index = last(curve.calls, (c) => c <= epoch); return index < 0 ? null : curve.values[index]; };
const grownAt = (number, epoch) => data.looks[last(data.looks, (l) => l.call <= epoch && l.inserted.includes(number))]; // the last: what is undone gives its number back
const bornAt = (number, epoch) => { const look = grownAt(number, epoch); return look ? look.call : null; };
const unitsBefore = (unit, epoch) => { // how many units a widened box had at first: its path was the site's then
  const number = (unit.changes || [])[0], look = grownAt(number, epoch);
  if (!look || !unit.units) return null;
  const entry = look.merits[look.chosen[look.inserted.indexOf(number)]];
  const box = unitsAt(look.call - 1).find((u) => inside(entry.path, u.path));
  return box && box.units && box.units < unit.units ? box.units : null; // a layer of the same look was not there yet
};

// --- the network: boxes for any model, units and weights for a small one ---
let shown = new Map(); // box or column -> where it is now, so that a change is animated
let moving = 0;
const move = (wanted, paint) => {
  cancelAnimationFrame(moving);
  const known = [...wanted].every(([key, to]) => shown.has(key) && shown.get(key).size === to.size) && shown.size === wanted.size;
  if (known || shown.size === 0 || still.matches) { shown = wanted; paint(wanted); return; }
  const from = new Map([...wanted].map(([key, to]) => [key, shown.get(key) || { ...to, grow: 0 }]));
  const began = performance.now();
  const step = (now) => {
    const part = Math.min(1, (now - began) / 450), ease = part * part * (3 - 2 * part);
    const mixed = new Map([...wanted].map(([key, to]) => {
      const start = from.get(key), mix = (name) => start[name] + (to[name] - start[name]) * ease;
      return [key, { ...to, place: mix("place"), grow: mix("grow"), size: mix("size") }];
    }));
    shown = mixed;
    paint(mixed);
    if (part < 1) moving = requestAnimationFrame(step);
  };
  moving = requestAnimationFrame(step);
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
const describe = (units, epoch) => units.map((u) => {
  const before = unitsBefore(u, epoch), notes = [];
  if (u.growth) notes.push(`inserted at epoch ${bornAt(u.growth, epoch)}`);
  if (before) notes.push(`widened from ${before} to ${u.units} units`);
  return `${u.path || "model"} ${u.label}${notes.length ? ` (${notes.join(", ")})` : ""}`;
}).join(", ");
// One scale for the whole film, so that a box that gets more units gets wider.
const drawn = data.outlines.flatMap((o) => o.units), most = Math.log10(10 + Math.max(10, ...drawn.map((u) => u.parameters)));
const right = 12 + 6.4 * Math.max(9, ...drawn.map((u) => ((u.changes || []).length ? `${whole(u.units || 0)} → ${whole(u.units || 0)} units`.length : 0))); // for the notes
const boxes = (epoch) => {
  const units = unitsAt(epoch), width = widthOf("network");
  const high = Math.max(20, Math.min(34, 440 / Math.max(units.length, 1))), gap = Math.min(8, high / 4);
  const notes = units.map((unit) => unitsBefore(unit, epoch)).map((before, i) => (before ? `${whole(before)} → ${whole(units[i].units)} units` : units[i].growth !== null ? `epoch ${bornAt(units[i].growth, epoch)}` : units[i].parameters ? whole(units[i].parameters) : ""));
  const left = Math.min(150, width * 0.3, 12 + 7.5 * Math.max(5, ...units.map((u) => u.path.length))), wide = width - left - right;
  const part = (unit) => (unit.parameters ? Math.max(0.34, Math.log10(10 + unit.parameters) / most) : 0.34);
  const wanted = new Map(units.map((unit, i) => [`${unit.path}|${unit.growth || ""}`, { unit, note: notes[i], before: unitsBefore(unit, epoch), place: i * (high + gap), grow: 1, size: wide * part(unit) }]));
  const height = units.length * (high + gap);
  const open = marks(lookAt(epoch), units, epoch);
  const paint = (now) => {
    const svg = drawing(width, height, `The network at epoch ${epoch}: ${describe(units, epoch)}`);
    let index = 0;
    for (const { unit, note, before, place, grow, size: full } of now.values()) {
      const young = unit.growth !== null, y = place + (high * (1 - grow)) / 2;
      const name = unit.path || "model", fits = Math.floor(left / 7.5);
      svg.append(draw("text", { x: left - 10, y: place + high / 2 + 4, "text-anchor": "end", class: "soft", opacity: grow }, name.length > fits ? `…${name.slice(1 - fits)}` : name));
      svg.append(draw("rect", {
        x: left + (wide - full) / 2, y, width: full, height: high * grow, rx: 5, "data-unit": name,
        fill: young ? colour("new") : colour("page"), stroke: young ? colour("grown") : colour("line"), "stroke-width": young ? 2 : 1,
      }));
      if (before) { // the units that were added, as the share of the box that they are
        const share = full * (1 - before / unit.units), area = { x: left + (wide + full) / 2 - share, width: share };
        svg.append(draw("rect", { ...area, y: y + 1, height: high * grow - 2, fill: colour("new"), "data-added": unit.units - before }));
        svg.append(draw("rect", { ...area, y: y + high * grow - 3, height: 3, fill: colour("grown") }));
      }
      const letters = Math.floor(full / 6.6), label = unit.label.length > letters ? `${unit.label.slice(0, letters - 1)}…` : unit.label;
      svg.append(draw("text", { x: left + wide / 2, y: place + high / 2 + 4, "text-anchor": "middle", opacity: grow }, label));
      svg.append(draw("text", { x: width, y: place + high / 2 + 4, "text-anchor": "end", class: young || before ? "" : "soft", opacity: grow, fill: young || before ? colour("grown") : "" }, note));
      if (open.has(index)) svg.append(draw("circle", { cx: left + wide / 2, cy: place + high + gap / 2, r: 4, fill: colour("baseline") }));
      index += 1;
    }
    room("network").replaceChildren(svg);
  };
  move(wanted, paint);
};
const graph = (film, frame, epoch) => {
  const units = unitsAt(epoch), layers = film.weights[frame], width = widthOf("network"), height = 330, bottom = 52;
  const edge = Math.min(60, width * 0.1), apart = (width - 2 * edge) / layers.length, tight = apart < 96 ? (apart < 60 ? 2 : 1) : 0;
  const columns = [{ key: "input", size: layers[0].weight[0].length, name: "input" }].concat(layers.map((layer, i) => {
    const unit = units.find((u) => inside(layer.path, u.path)) || { growth: null, path: layer.path };
    const from = units.indexOf(unit), until = units.findIndex((u, k) => k > from && u.parameters > 0);
    const names = units.slice(from, until < 0 ? units.length : until).map((u) => u.path);
    return { key: layer.path, size: layer.weight.length, before: unit.growth ? null : unitsBefore(unit, epoch), unit, growth: unit.growth, name: i === layers.length - 1 && tight < 2 ? `${names.join(", ")} (output)` : names.join(", ") };
  }));
  const wanted = new Map(columns.map((c, i) => [c.key, { ...c, place: edge + i * apart, grow: 1 }]));
  const spacing = (column) => Math.min(40, (height - bottom - 24) / Math.max(column.size, 1)), radius = (column) => Math.min(8, spacing(column) * 0.42);
  const node = (column, k) => (height - bottom) / 2 + (k - (column.size - 1) / 2) * spacing(column);
  const paint = (now) => {
    const svg = drawing(width, height, `The network at epoch ${epoch}: ${describe(units, epoch)}`);
    const list = [...now.values()];
    layers.forEach((layer, i) => layer.weight.forEach((row, to) => row.forEach((value, from) => {
      const size = Math.min(Math.abs(value), 3);
      if (size < 0.05) return;
      svg.append(draw("line", {
        x1: list[i].place, y1: node(list[i], from), x2: list[i + 1].place, y2: node(list[i + 1], to),
        stroke: colour(value > 0 ? "class1" : "class0"), "stroke-width": 0.4 + 1.6 * size, opacity: Math.min(0.9, 0.15 + 0.4 * size) * list[i + 1].grow,
      }));
    })));
    for (const column of list) {
      for (let k = 0; k < column.size; k += 1) {
        const young = column.growth || (column.before && k >= column.before); // new units come after those that were there
        svg.append(draw("circle", {
          cx: column.place, cy: node(column, k), r: radius(column) * column.grow * Math.min(1, column.size - k), "data-column": column.key, "stroke-width": 2,
          fill: young ? colour("new") : colour("page"), stroke: young ? colour("grown") : colour("soft"), ...(young ? { "data-new": k } : {}),
        }));
      }
      svg.append(draw("text", { x: column.place, y: height - 26, "text-anchor": "middle", opacity: column.grow }, column.name));
      const born = column.growth ? (tight < 1 ? `inserted at ${bornAt(column.growth, epoch)}` : `at ${bornAt(column.growth, epoch)}`) : "";
      const note = born || (column.before ? `${column.before} → ${column.unit.units}${tight < 1 ? " units" : ""}` : "");
      if (note) svg.append(draw("text", { x: column.place, y: height - 10, "text-anchor": "middle", fill: colour("grown"), opacity: column.grow }, note));
    }
    room("network").replaceChildren(svg);
  };
  move(wanted, paint);
};
const network = (frame, epoch) => {
  const units = unitsAt(epoch);
  at("size").textContent = units.length ? `${whole(units.reduce((sum, u) => sum + u.parameters, 0))} parameters` : "";
  const film = data.films.find((f) => f.name === "grown");
  if (film) graph(film, frame, epoch);
  else if (units.length) boxes(epoch);
};
