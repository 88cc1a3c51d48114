// A small network on the plane: every unit and every weight.
const graph = (film, frame, epoch) => {
  const units = unitsAt(epoch), layers = film.weights[frame], width = widthOf("network"), bottom = 62;
  const height = narrow.matches ? 300 : Math.max(170, room("network").clientHeight - 2);
  const edge = Math.min(60, width * 0.1), apart = (width - 2 * edge) / layers.length, tight = apart < 84;
  const columns = [{ key: "input", size: layers[0].weight[0].length, name: "input", more: "" }].concat(layers.map((layer, i) => {
    const unit = units.find((u) => inside(layer.path, u.path)) || { growth: null, path: layer.path };
    const from = units.indexOf(unit), until = units.findIndex((u, k) => k > from && u.parameters > 0);
    const parts = units.slice(from, until < 0 ? units.length : until).flatMap((u) => pretty(u.label).split(" + "));
    const end = i === layers.length - 1, name = tight ? parts[0].replace(/^\w+ /, "") : parts[0];
    return { key: layer.path, size: layer.weight.length, before: unit.growth ? null : unitsBefore(unit, epoch), unit, growth: unit.growth, name, more: end ? "output" : parts.slice(1).map((part) => `+ ${part}`).join(" "), path: nameOf(layer.path) };
  }));
  const wanted = new Map(columns.map((c, i) => [c.key, { ...c, place: edge + i * apart, grow: 1 }]));
  const spacing = (column) => Math.min(40, (height - bottom - 24) / Math.max(column.size, 1)), radius = (column) => Math.min(8, spacing(column) * 0.42);
  const node = (column, k) => (height - bottom) / 2 + (k - (column.size - 1) / 2) * spacing(column);
  const paint = (now) => {
    const svg = drawing(width, height, describe(units, epoch)), list = [...now.values()], space = Math.min(apart, 2 * edge) - 4;
    layers.forEach((layer, i) => layer.weight.forEach((row, to) => row.forEach((value, from) => {
      const size = Math.min(Math.abs(value), 3);
      if (size < 0.05) return;
      svg.append(draw("line", {
        x1: list[i].place, y1: node(list[i], from), x2: list[i + 1].place, y2: node(list[i + 1], to), class: value > 0 ? "plus" : "minus",
        "stroke-width": 0.4 + 1.6 * size, opacity: Math.min(0.9, 0.15 + 0.4 * size) * list[i + 1].grow,
      }));
    })));
    for (const column of list) {
      for (let k = 0; k < column.size; k += 1) {
        const young = column.growth || (column.before && k >= column.before); // new units come after those that were there
        svg.append(draw("circle", {
          cx: column.place, cy: node(column, k), r: radius(column) * column.grow * Math.min(1, column.size - k), "data-column": column.key,
          class: young ? "unit young" : "unit", ...(young ? { "data-new": k } : {}),
        }));
      }
      const middle = { x: column.place, "text-anchor": "middle", opacity: column.grow };
      const text = label(column.name, space, { ...middle, y: height - 38 });
      if (column.path) text.append(draw("title", {}, column.path));
      svg.append(text);
      if (column.more) svg.append(label(column.more, space, { ...middle, y: height - 22, class: "soft" }));
      const born = column.growth ? tight ? `at ${whole(bornAt(column.growth, epoch))}` : when(bornAt(column.growth, epoch)) : "";
      const note = born || (column.before ? `${column.before} → ${column.unit.units}${tight ? "" : " units"}` : "");
      if (note) svg.append(label(note, space, { ...middle, y: height - 6, class: "fresh" }));
    }
    room("network").replaceChildren(svg);
  };
  move(wanted, paint);
};
const graphKey = () => [
  swatch("ring", "unit"), swatch("ring young", "new unit"), swatch("stroke plus", "weight above 0"), swatch("stroke minus", "below 0"), make("span", {}, "thicker: larger"),
];
const network = (frame, epoch) => {
  const units = unitsAt(epoch), film = data.films.find((f) => f.name === "grown");
  at("size").textContent = units.length ? `${whole(units.reduce((sum, u) => sum + u.parameters, 0))} parameters` : "";
  if (film) graph(film, frame, epoch);
  else if (units.length) boxes(epoch);
};
