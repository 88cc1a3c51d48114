// What holds at a position of the slider, and how a change of the network is animated.
const slider = at("slider");
const call = () => data.frames[Number(slider.value)];
const lookAt = (epoch) => data.looks[last(data.looks, (look) => look.call <= epoch)];
const unitsAt = (epoch) => { const found = data.outlines[last(data.outlines, (o) => o.call <= epoch)]; return found ? found.units : []; };
const valueAt = (curve, epoch) => { const index = last(curve.calls, (c) => c <= epoch); return index < 0 ? null : curve.values[index]; };
const grownAt = (number, epoch) => data.looks[last(data.looks, (l) => l.call <= epoch && l.inserted.includes(number))]; // the last: what is undone gives its number back
const bornAt = (number, epoch) => { const look = grownAt(number, epoch); return look ? look.call : null; };
const changesOf = (unit, epoch) => (unit.changes || []).map((number) => data.growths[last(data.growths, (g) => g.number === number && g.call <= epoch)]).filter(Boolean);
const widthsOf = (unit, epoch) => { // how many units a widened box had at first, and has since each growth; empty if it was not widened
  const grown = changesOf(unit, epoch).filter((growth) => growth.units);
  const first = grown.length && unit.units && grown[0].units[0] < unit.units ? [grown[0].units[0]] : [];
  return first.length ? [...first, ...grown.slice(0, -1).map((growth) => growth.units[1]), unit.units] : [];
};
const unitsBefore = (unit, epoch) => widthsOf(unit, epoch)[0] || null;
const sizesOf = (unit, units) => { // the parameters that a resized box had at first, and has now with the boxes of its parts
  const start = data.outlines[0].units.find((u) => nameOf(u.path) === nameOf(unit.path));
  const now = units.filter((u) => u.growth === null && inside(nameOf(u.path), nameOf(unit.path))).reduce((sum, u) => sum + u.parameters, 0);
  return start && start.parameters < now ? [start.parameters, now] : null;
};
const resizedBy = (unit, epoch) => (unit.resized || []).map((number) => data.growths[last(data.growths, (g) => g.number === number && g.call <= epoch)]).filter(Boolean);
const nameOf = (path) => path.split(".").filter((part) => part !== "anchor").join(".") || "model"; // as it was called before something was inserted beside it

// --- what each box is, in words ---
const notesOf = (unit, epoch) => {
  const before = unitsBefore(unit, epoch), notes = [];
  if (unit.growth !== null) notes.push(`inserted at ${when(bornAt(unit.growth, epoch))}`);
  if (before) notes.push(`widened from ${whole(before)} to ${whole(unit.units)} units`);
  if (unit.growth === null) for (const growth of resizedBy(unit, epoch)) notes.push(`resized at ${when(growth.call)}`);
  for (const growth of changesOf(unit, epoch)) if (!growth.units) notes.push(`${when(growth.call)}: ${growth.site}`);
  return notes;
};
const inWords = (unit, epoch) => { const notes = notesOf(unit, epoch); return `${unit.path || "model"} ${unit.label}${notes.length ? ` (${notes.join(", ")})` : ""}`; };
const describe = (units, epoch) => `The network at ${when(epoch)}: ${units.map((unit) => inWords(unit, epoch)).join(", ")}`;

// --- a change is animated: boxes and columns move apart, and the new one comes in between ---
let shown = new Map(); // box or column -> where it is now
let moving = 0;
const move = (wanted, paint, scroll = () => {}) => {
  cancelAnimationFrame(moving);
  const known = [...wanted].every(([key, to]) => shown.has(key) && shown.get(key).size === to.size) && shown.size === wanted.size;
  if (known || shown.size === 0 || still.matches) { shown = wanted; paint(wanted); scroll(1); return; }
  const from = new Map([...wanted].map(([key, to]) => [key, shown.get(key) || { ...to, grow: 0 }]));
  const began = performance.now();
  const step = (now) => {
    const part = Math.min(1, Math.max(0, now - began) / 300), ease = part * part * (3 - 2 * part);
    const mixed = new Map([...wanted].map(([key, to]) => {
      const start = from.get(key), mix = (name) => start[name] + (to[name] - start[name]) * ease;
      return [key, { ...to, place: mix("place"), grow: mix("grow"), size: mix("size") }];
    }));
    shown = mixed;
    paint(mixed);
    scroll(ease);
    if (part < 1) moving = requestAnimationFrame(step);
  };
  moving = requestAnimationFrame(step);
};
