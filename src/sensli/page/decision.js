// The last decision: the line of the log, why, and what every site was worth.
const nameInRoom = (text, space) => { // on two lines at most; the whole of it is in the tooltip
  const font = fontOf(room("decision")).replace(/\d+ [\d.]+px/, "600 13.6px"); // of the style sheet, at its boldest
  return make("span", { title: text }, cut(text, 1.8 * space, font));
};
const bars = (look) => {
  const threshold = look.mean === null ? null : look.tau * look.mean, space = widthOf("decision"), roomy = space > 420; // a merit stands beside its name, or below it
  const longest = Math.max(look.merits[0].value, threshold || 0) * 1.04 || 1;
  const entries = look.merits.map((entry, index) => ({ entry, index })), chosen = ({ index }) => look.chosen.includes(index);
  const listed = [...entries.filter(chosen), ...entries.filter((each) => each.index < 10 && !chosen(each))]; // by cost the choice may be far down: it is seen first
  const rows = listed.map(({ entry, index }) => {
    const bar = make("div", { class: "room" }, make("div", { class: "fill", style: { width: `${(100 * entry.value) / longest}%` } }));
    if (threshold) bar.append(make("div", { class: "tau", style: { left: `${(100 * threshold) / longest}%` } }));
    const ratio = entry.ratio === null ? "" : ` = ${entry.ratio.toPrecision(3)} x mean`;
    const value = make("span", { "data-merit": String(entry.value) }, `${merit(entry.value)}${ratio}`);
    return make("div", { class: look.chosen.includes(index) ? "bar won" : "bar" }, make("div", { class: "name" }, nameInRoom(entry.site, roomy ? space - 170 : space), value), bar);
  });
  const parts = [make("div", { class: roomy ? "bars roomy" : "bars", role: "img", "aria-label": `Merits: ${listed.map(({ entry }) => `${entry.site} ${merit(entry.value)}`).join("; ")}` }, ...rows)];
  const hint = (text, options = {}) => parts.push(make("p", { class: "hint", ...options }, text));
  if (look.merits.length > listed.length) hint(`${look.merits.length - listed.length} more sites are listed in the text below.`);
  if (look.per && ["auto", "largest", "smallest"].includes(look.select)) hint(`chosen by the merit per added ${look.per === "flops" ? "FLOP" : "parameter"}`);
  hint(threshold ? `dashed: tau = ${look.tau} x the mean of the existing weights, ${merit(threshold)}` : `tau = ${look.tau}`, { id: "tau", "data-tau": String(look.tau) });
  return parts;
};
let decided; // the look that is shown
const decision = (epoch, again) => {
  const look = lookAt(epoch), parts = [], space = room("decision");
  if (look === decided && look && !again) return;
  if (look !== decided) space.scrollTop = 0;
  decided = look;
  if (!look) {
    const next = data.looks[0];
    space.replaceChildren(make("p", { class: "why" }, next ? `None yet. The first look at all places is at ${when(next.call)}.` : "No places were measured in this training."));
    return;
  }
  for (const line of look.line.split("\n")) { // a number or an arrow must not break at its minus sign
    parts.push(make("p", { class: "line" }, ...line.split(/(\S*\de[-+]\d+\S*|->)/).map((part, i) => (i % 2 ? make("span", { class: "whole" }, part) : part))));
  }
  if (look.inserted.length) parts.push(make("p", { class: "why" }, make("b", {}, "Why this place: "), `${look.reason}.${look.undone.length ? " Undone later." : ""}`));
  if (look.merits.length && look.norm !== "none") parts.push(...bars(look)); // otherwise nothing was measured
  space.replaceChildren(...parts);
};
