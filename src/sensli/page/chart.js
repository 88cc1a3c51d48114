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

// --- noisy curves: a running mean is drawn over the values themselves ---
const isNoisy = (values) => { // goes up and down all the time, and by more than a hair
  const changes = values.slice(1).map((value, i) => value - values[i]);
  const turns = changes.slice(1).filter((change, i) => change * changes[i] < 0).length / Math.max(1, changes.length - 1);
  const sorted = [...values].sort((a, b) => a - b), span = sorted[Math.floor(0.98 * (sorted.length - 1))] - sorted[0];
  const usual = changes.map(Math.abs).sort((a, b) => a - b)[Math.floor(changes.length / 2)];
  return values.length >= 60 && turns > 0.4 && usual > 0.005 * span;
};
const REACH = 4; // per cent of a curve that one value of the mean covers
const curves = data.curves.map((curve) => { // the values that are there; with their mean where they are noisy
  const points = curve.calls.map((c, i) => ({ c, cost: curve.flops ? curve.flops[i] : null, value: curve.values[i] })).filter((point) => point.value !== null);
  const noisy = isNoisy(points.map((point) => point.value)), half = noisy ? Math.max(2, Math.round((REACH * points.length) / 200)) : 0;
  points.forEach((point, i) => {
    const near = noisy ? points.slice(Math.max(0, i - half), i + half + 1) : [point];
    point.mean = near.reduce((sum, each) => sum + each.value, 0) / near.length;
  });
  return { ...curve, points, over: noisy ? 2 * half + 1 : 1 };
});

// --- the horizontal axis: calls, or what the training had cost ---
const priced = curves.length > 0 && curves.every((curve) => curve.flops) && curves.find((curve) => curve.role === "grown");
let axis = "c"; // or "cost", as the switch says
const byCost = () => axis === "cost";
const spentAt = (c) => { const index = last(priced.calls, (each) => each <= c); return index < 0 ? 0 : priced.flops[index]; };
const position = (point) => point[axis];
const limitAt = (epoch) => (byCost() ? spentAt(epoch) : epoch); // how far the film has come on that axis
const pointAt = (curve, epoch) => { const limit = limitAt(epoch); return curve.points[last(curve.points, (point) => position(point) <= limit)]; };

const chartKey = (epoch) => [
  ...curves.filter((curve) => curve.name !== data.measure || valueAt(curve, epoch) !== null).map((curve) => {
    const point = pointAt(curve, epoch), value = byCost() ? (point ? point.value : null) : valueAt(curve, epoch), alone = curve.name === data.measure;
    const sign = make("b", { style: { color: colour(curve.role) } }, "━ "), shown = curve.over > 1 && point ? point.mean : value;
    return make("span", { "data-curve": curve.name, "data-value": String(value), title: value === null ? "" : `${when(epoch)}: ${short(value)}` }, sign, `${alone ? "" : curve.name} ${shown === null ? "" : short(shown)}`);
  }),
  ...(curves.some((curve) => curve.over > 1) ? [make("span", { class: "over" }, `line: mean of ${Math.max(...curves.map((curve) => curve.over))}`)] : []),
  ...(data.looks.some((look) => look.inserted.length) ? [swatch("look grew", "grew")] : []),
  ...(data.looks.some((look) => !look.inserted.length) ? [swatch("look", "nothing grew")] : []),
];
const chart = (epoch) => {
  axis = priced && at("flops").checked ? "cost" : "c";
  at("legend").replaceChildren(...chartKey(epoch));
  if (!known.length) {
    room("loss").replaceChildren(make("p", { class: "hint" }, "No metric was recorded. Call grower.step(batches, loss_fn, metric=loss), or give a GrowthCallback monitor=\"eval_loss\" or the like, to see it here."));
    return;
  }
  const width = widthOf("loss"), height = narrow.matches ? 104 : Math.max(110, room("loss").clientHeight - 2), bottom = 22, top = 8, lines = Math.max(2, Math.floor(height / 42));
  const scale = at("log").checked ? logarithmic(lines) : straight(lines);
  const left = 10 + Math.max(...scale.ticks.map((value) => lengthOf(shortTick(value))));
  const end = byCost() ? Math.max(...curves.flatMap((curve) => curve.points.map((point) => point.cost))) : data.calls;
  const x = (where) => left + (where / Math.max(end, 1)) * (width - left - 8), y = (value) => top + (1 - Math.min(1, scale.part(value))) * (height - top - bottom);
  const svg = drawing(width, height, `${data.measure} by ${byCost() ? "FLOPs" : data.unit}. At ${when(epoch)}: ${data.curves.map((c) => `${c.name} ${short(valueAt(c, epoch) || 0)}`).join(", ")}`);
  for (const value of scale.ticks) {
    svg.append(draw("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft tick" }, shortTick(value)));
  }
  const every = byCost() ? round(end / 5) : Math.max(1, Math.ceil(round(end / 5))), tick = byCost() ? counted : whole, named = byCost() ? `${counted(end)}FLOPs per sample` : when(end);
  const time = (where, anchor, text) => svg.append(draw("text", { x: x(where), y: height - 5, "text-anchor": anchor, class: "soft time" }, text));
  for (let where = 0; where < end; where += every) {
    if (x(where) + lengthOf(tick(where)) / 2 < width - 16 - lengthOf(named)) time(where, where ? "middle" : "start", tick(where)); // where there is room beside the last
  }
  time(end, "end", named);
  const limit = limitAt(epoch);
  for (const look of data.looks) { const at = x(limitAt(look.call)); svg.append(draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: look.inserted.length ? "look grew" : "look" })); }
  for (const curve of [...curves].sort((a, b) => (a.role === "grown") - (b.role === "grown"))) { // the grown one on top
    const skip = Math.max(1, Math.floor(curve.points.length / 800)), now = pointAt(curve, epoch);
    const path = (test, name) => curve.points.filter((point, i) => test(point) && (i % skip === 0 || point === now)).map((point) => `${x(position(point)).toFixed(1)},${y(point[name]).toFixed(1)}`).join(" ");
    const line = { fill: "none", stroke: colour(curve.role), "stroke-linejoin": "round" }, past = (point) => position(point) <= limit;
    svg.append(draw("polyline", { ...line, points: path(() => true, "value"), "stroke-width": 1, opacity: 0.3 }));
    svg.append(draw("polyline", { ...line, points: path(past, "mean"), "stroke-width": 2.2, "data-past": curve.name, "data-over": curve.over }));
    for (const point of curve.points.filter((each) => each.value > scale.until)) { // a value above the chart is a mark at its upper edge
      const mark = draw("path", { d: `M${x(position(point))} ${top - 6} l4 6 h-8 Z`, fill: colour(curve.role), "data-above": point.value });
      mark.append(draw("title", {}, `${when(point.c)}: ${short(point.value)}, above the chart`));
      svg.append(mark);
    }
    if (now) svg.append(draw("circle", { cx: x(position(now)), cy: y(now.mean), r: 4, fill: colour(curve.role) }));
  }
  svg.append(draw("line", { x1: x(limit), x2: x(limit), y1: top, y2: height - bottom, class: "cursor", id: "cursor" }));
  room("loss").replaceChildren(svg);
};
