// The decision, the boundary and the curves.
// --- the decision ---
const decision = (epoch) => {
  const look = lookAt(epoch), parts = [];
  if (!look) {
    const next = data.looks[0];
    parts.push(make("p", { class: "why" }, next ? `None yet. The first look at all places is at epoch ${whole(next.call)}.` : "No places were measured in this training."));
    room("decision").replaceChildren(...parts);
    return;
  }
  for (const line of look.line.split("\n")) { // a number must not break at its minus sign
    parts.push(make("p", { class: "line" }, ...line.split(/(\S*\de[-+]\d+\S*)/).map((part, i) => (i % 2 ? make("span", { class: "whole" }, part) : part))));
  }
  if (look.merits.length) {
    const threshold = look.mean === null ? null : look.tau * look.mean;
    const most = Math.max(look.merits[0].value, threshold || 0) * 1.04 || 1;
    const listed = look.merits.map((entry, index) => ({ entry, index })).filter(({ index }) => index < 10 || look.chosen.includes(index));
    const rows = listed.map(({ entry, index }) => {
      const fill = make("div", { class: "fill", style: { width: `${(100 * entry.value) / most}%` } });
      const bar = make("div", { class: "room" }, fill);
      if (threshold) bar.append(make("div", { class: "tau", style: { left: `${(100 * threshold) / most}%` } }));
      const ratio = entry.ratio === null ? "" : ` = ${entry.ratio.toPrecision(3)} x mean`;
      const value = make("span", { "data-merit": String(entry.value) }, `${merit(entry.value)}${ratio}`);
      return make("div", { class: look.chosen.includes(index) ? "bar won" : "bar" }, make("div", { class: "name" }, make("span", {}, entry.site), value), bar);
    });
    parts.push(make("div", { class: "bars", role: "img", "aria-label": `Merits: ${listed.map(({ entry }) => `${entry.site} ${merit(entry.value)}`).join("; ")}` }, ...rows));
    if (look.merits.length > listed.length) parts.push(make("p", { class: "hint" }, `${look.merits.length - listed.length} more sites are listed in the text below.`));
    if (look.per && ["largest", "smallest"].includes(look.select)) parts.push(make("p", { class: "hint" }, `chosen by the merit per added ${look.per === "flops" ? "FLOP" : "parameter"}`));
    if (threshold) parts.push(make("p", { class: "hint", id: "tau", "data-tau": String(look.tau) }, `dashed: tau = ${look.tau} x the mean of the existing weights, ${merit(threshold)}`));
    else parts.push(make("p", { class: "hint", id: "tau", "data-tau": String(look.tau) }, `tau = ${look.tau}`));
  }
  if (look.inserted.length) parts.push(make("p", { class: "why" }, make("b", {}, "Why this place: "), `${look.reason}.${look.undone.length ? " Undone later." : ""}`));
  room("decision").replaceChildren(...parts);
};

// --- the boundary ---
const rgb = (text) => [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16));
const pictures = new Map();
const boundary = (frame, epoch) => {
  const low = rgb(colour("class0")), middle = rgb(colour("middle")), high = rgb(colour("class1"));
  for (const film of data.films) {
    const canvas = pictures.get(film.name), scale = 360, context = canvas.getContext("2d");
    const bytes = Uint8Array.from(atob(film.pictures[frame]), (letter) => letter.charCodeAt(0));
    const small = new OffscreenCanvas(film.side, film.side), pixels = small.getContext("2d"), image = pixels.createImageData(film.side, film.side);
    bytes.forEach((value, i) => {
      const signed = (value - 127.5) / 127.5, share = Math.abs(signed) * 0.75, end = signed > 0 ? high : low;
      for (let k = 0; k < 3; k += 1) image.data[4 * i + k] = middle[k] + (end[k] - middle[k]) * share;
      image.data[4 * i + 3] = 255;
    });
    pixels.putImageData(image, 0, 0);
    canvas.width = canvas.height = scale;
    context.imageSmoothingQuality = "high";
    context.drawImage(small, 0, 0, scale, scale);
    for (const [x, y, label] of data.points) {
      context.fillStyle = label ? colour("class1") : colour("class0");
      context.strokeStyle = colour("page");
      context.beginPath();
      context.arc(((x / film.extent + 1) * scale) / 2, ((1 - y / film.extent) * scale) / 2, 2.6, 0, 7);
      context.fill();
      context.lineWidth = 0.6;
      context.stroke();
    }
    canvas.setAttribute("aria-label", `Where the ${film.name} network draws the line at epoch ${epoch}`);
  }
};
const screens = () => {
  if (!data.films.length) { document.body.classList.add("plain"); return; }
  const list = data.films.map((film) => {
    const canvas = make("canvas", { role: "img" });
    pictures.set(film.name, canvas);
    return make("div", film.name === "grown" ? { class: "main" } : {}, canvas, film.name);
  });
  room("boundary").append(make("div", { class: "films" }, ...list));
  at("boundary").hidden = false;
};

// --- the curves ---
const chart = (epoch) => {
  const width = widthOf("loss"), height = data.films.length && width > 420 ? 320 : 240, left = 44, bottom = 26, top = 8;
  const values = data.curves.flatMap((c) => c.values.filter((v) => v !== null)).sort((a, b) => a - b);
  at("legend").replaceChildren(...data.curves.map((c) => {
    const value = valueAt(c, epoch), sign = make("b", { style: { color: colour(c.role) } }, "━ ");
    return make("span", { "data-curve": c.name, "data-value": String(value) }, sign, `${c.name} ${value === null ? "" : short(value)}`);
  }));
  if (!values.length) {
    room("loss").replaceChildren(make("p", { class: "hint" }, "No metric was recorded. Call grower.step(batches, loss_fn, metric=loss) to see it here."));
    return;
  }
  // Single spikes must not flatten the curves: the chart ends a little above the 98th percentile, or the first value.
  const firsts = data.curves.map((c) => c.values.find((v) => v !== null)).filter((v) => v !== undefined);
  const most = 1.1 * Math.max(values[Math.floor(0.98 * (values.length - 1))], ...firsts) || 1, least = Math.min(0, values[0]);
  const x = (c) => left + (c / Math.max(data.calls, 1)) * (width - left - 8), y = (v) => top + (1 - (v - least) / (most - least)) * (height - top - bottom);
  const svg = drawing(width, height, `${data.measure} by epoch. At epoch ${epoch}: ${data.curves.map((c) => `${c.name} ${short(valueAt(c, epoch) || 0)}`).join(", ")}`);
  const clip = draw("clipPath", { id: "window" });
  clip.append(draw("rect", { x: left, y: top - 4, width: width - left - 4, height: height - top - bottom + 8 }));
  svg.append(clip);
  const rough = (most - least) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].find((n) => n * power >= rough) * power;
  for (let value = Math.ceil(least / step) * step; value <= most; value += step) {
    svg.append(draw("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), stroke: colour("line") }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft" }, Number(value.toPrecision(3)).toString()));
  }
  for (let k = 0; k <= 4; k += 1) {
    const when = Math.round((data.calls * k) / 4);
    svg.append(draw("text", { x: x(when), y: height - 6, "text-anchor": k === 4 ? "end" : "middle", class: "soft" }, whole(when)));
  }
  for (const look of data.looks) svg.append(draw("line", { x1: x(look.call), x2: x(look.call), y1: top, y2: height - bottom, stroke: look.inserted.length ? colour("grown") : colour("soft"), "stroke-dasharray": "2 4" }));
  for (const curve of [...data.curves].sort((a, b) => (a.role === "grown") - (b.role === "grown"))) { // the grown one on top
    const skip = Math.max(1, Math.floor(curve.calls.length / 800));
    const path = (test) => curve.calls.map((c, i) => [c, curve.values[i], i]).filter(([c, v, i]) => v !== null && test(c) && (i % skip === 0 || c === epoch)).map(([c, v]) => `${x(c).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
    const line = { fill: "none", stroke: colour(curve.role), "clip-path": "url(#window)", "stroke-linejoin": "round" };
    svg.append(draw("polyline", { ...line, points: path(() => true), "stroke-width": 1, opacity: 0.3 }));
    svg.append(draw("polyline", { ...line, points: path((c) => c <= epoch), "stroke-width": 2.2, "data-past": curve.name }));
    const value = valueAt(curve, epoch);
    if (value !== null) svg.append(draw("circle", { cx: x(Math.min(epoch, curve.calls[curve.calls.length - 1])), cy: y(Math.min(value, most)), r: 4, fill: colour(curve.role) }));
  }
  svg.append(draw("line", { x1: x(epoch), x2: x(epoch), y1: top, y2: height - bottom, stroke: colour("ink"), opacity: 0.5, id: "cursor" }));
  room("loss").replaceChildren(svg);
};
