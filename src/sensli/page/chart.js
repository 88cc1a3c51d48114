// The curves of the metric.
const known = data.curves.flatMap((curve) => curve.values.filter((value) => value !== null)).sort((a, b) => a - b);
const shortTick = (value) => Number(value.toPrecision(3)).toString();
const round = (rough) => { const power = 10 ** Math.floor(Math.log10(rough)); return [1, 2, 2.5, 5, 10].find((n) => n * power >= rough) * power; }; // a step between ticks
const straight = (lines) => { // from near the least value to a little above the others; single spikes must not flatten the curves
  const least = known[0], high = known[Math.floor(0.98 * (known.length - 1))] - least, whole = known[known.length - 1] - least;
  const firsts = data.curves.map((curve) => curve.values.find((value) => value !== null) - least).filter((value) => value <= 4 * high);
  const usual = Math.max(high, ...firsts), span = (whole <= 1.5 * usual ? whole : usual) || Math.abs(least) || 1;
  const from = least >= 0 && least < 0.25 * span ? 0 : least - 0.06 * span, until = least + 1.06 * span;
  const step = round((until - from) / lines);
  const ticks = [];
  for (let k = Math.ceil(from / step); k * step <= until; k += 1) ticks.push(k * step);
  return { ticks, until, part: (value) => (value - from) / (until - from) };
};
const logarithmic = (lines) => {
  const [low, high] = [known[0], known[known.length - 1]].map(Math.log10), margin = 0.05 * (high - low) || 0.1, from = low - margin, until = high + margin;
  const every = Math.max(1, Math.ceil((until - from) / lines)), ticks = [];
  for (let power = Math.floor(from); power <= until; power += every) {
    for (const digit of until - from < 2 ? [1, 2, 3, 5] : [1]) { const value = digit * 10 ** power; if (Math.log10(value) >= from && Math.log10(value) <= until) ticks.push(value); }
  }
  return { ticks, until: 10 ** until, part: (value) => (Math.log10(value) - from) / (until - from) };
};
const chartKey = (epoch) => [
  ...data.curves.filter((curve) => curve.name !== data.measure || valueAt(curve, epoch) !== null).map((curve) => {
    const value = valueAt(curve, epoch), sign = make("b", { style: { color: colour(curve.role) } }, "━ "), alone = curve.name === data.measure;
    return make("span", { "data-curve": curve.name, "data-value": String(value) }, sign, `${alone ? "" : curve.name} ${value === null ? "" : short(value)}`);
  }),
  ...(data.looks.some((look) => look.inserted.length) ? [swatch("look grew", "grew")] : []),
  ...(data.looks.some((look) => !look.inserted.length) ? [swatch("look", "nothing grew")] : []),
];
const chart = (epoch) => {
  at("legend").replaceChildren(...chartKey(epoch));
  if (!known.length) {
    room("loss").replaceChildren(make("p", { class: "hint" }, "No metric was recorded. Call grower.step(batches, loss_fn, metric=loss), or give a GrowthCallback monitor=\"eval_loss\" or the like, to see it here."));
    return;
  }
  const width = widthOf("loss"), height = narrow.matches ? 104 : Math.max(110, room("loss").clientHeight - 2), bottom = 22, top = 8, lines = Math.max(2, Math.floor(height / 42));
  const scale = at("log").checked ? logarithmic(lines) : straight(lines);
  const left = 10 + Math.max(...scale.ticks.map((value) => lengthOf(shortTick(value))));
  const x = (c) => left + (c / Math.max(data.calls, 1)) * (width - left - 8), y = (value) => top + (1 - Math.min(1, scale.part(value))) * (height - top - bottom);
  const svg = drawing(width, height, `${data.measure} by ${data.unit}. At ${when(epoch)}: ${data.curves.map((c) => `${c.name} ${short(valueAt(c, epoch) || 0)}`).join(", ")}`);
  for (const value of scale.ticks) {
    svg.append(draw("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft tick" }, shortTick(value)));
  }
  const every = Math.max(1, Math.ceil(round(data.calls / 5))), end = when(data.calls), time = (c, anchor, text) => svg.append(draw("text", { x: x(c), y: height - 5, "text-anchor": anchor, class: "soft time" }, text));
  for (let c = 0; c < data.calls; c += every) {
    if (x(c) + lengthOf(whole(c)) / 2 < width - 16 - lengthOf(end)) time(c, c ? "middle" : "start", whole(c)); // where there is room beside the last
  }
  time(data.calls, "end", end);
  for (const look of data.looks) svg.append(draw("line", { x1: x(look.call), x2: x(look.call), y1: top, y2: height - bottom, class: look.inserted.length ? "look grew" : "look" }));
  for (const curve of [...data.curves].sort((a, b) => (a.role === "grown") - (b.role === "grown"))) { // the grown one on top
    const skip = Math.max(1, Math.floor(curve.calls.length / 800));
    const points = curve.calls.map((c, i) => [c, curve.values[i], i]).filter(([, value]) => value !== null);
    const path = (test) => points.filter(([c, , i]) => test(c) && (i % skip === 0 || c === epoch)).map(([c, value]) => `${x(c).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const line = { fill: "none", stroke: colour(curve.role), "stroke-linejoin": "round" };
    svg.append(draw("polyline", { ...line, points: path(() => true), "stroke-width": 1, opacity: 0.3 }));
    svg.append(draw("polyline", { ...line, points: path((c) => c <= epoch), "stroke-width": 2.2, "data-past": curve.name }));
    for (const [c, value] of points.filter(([, v]) => v > scale.until)) { // a value above the chart is a mark at its upper edge
      const mark = draw("path", { d: `M${x(c)} ${top - 6} l4 6 h-8 Z`, fill: colour(curve.role), "data-above": value });
      mark.append(draw("title", {}, `${when(c)}: ${short(value)}, above the chart`));
      svg.append(mark);
    }
    const value = valueAt(curve, epoch);
    if (value !== null) svg.append(draw("circle", { cx: x(Math.min(epoch, curve.calls[curve.calls.length - 1])), cy: y(value), r: 4, fill: colour(curve.role) }));
  }
  svg.append(draw("line", { x1: x(epoch), x2: x(epoch), y1: top, y2: height - bottom, class: "cursor", id: "cursor" }));
  room("loss").replaceChildren(svg);
};
