// The last decision: the line of the log, why, and what every site was worth.
const nameInRoom = (text, space) => { // on two lines at most; the whole of it is in the tooltip
  const font = fontOf(room("decision")).replace(/\d+ [\d.]+px/, "600 13.6px"); // of the style sheet, at its boldest
  return make("span", { title: text }, cut(text, 1.8 * space, font));
};
const called = (path, epoch) => { // what a number or "grown1" in the name of a site stands for
  const unit = unitsAt(epoch).find((u) => nameOf(u.path) === path);
  if (!unit || !/(^|\.)(\d+|grown\d+)$/.test(path)) return "";
  return unit.growth === null ? `${path}: ${pretty(unit.label)}` : `${path}: new at ${when(bornAt(unit.growth, epoch))}`;
};
const bars = (look) => {
  const threshold = look.mean === null || !look.tau || look.per ? null : look.tau * look.mean, space = widthOf("decision"), roomy = space > 420; // a merit stands beside its name, or below it
  const entries = look.merits.map((entry, index) => ({ entry, index, won: look.chosen.includes(index), worth: entry.worth === undefined ? entry.value : entry.worth, aside: entry.aside || "" }));
  const competing = entries.filter((each) => each.won || !each.aside), scale = competing.length ? competing : entries;
  const longest = Math.max(...scale.map((each) => each.worth), threshold || 0) * 1.04 || 1;
  const byWorth = (list) => (look.per ? [...list].sort((a, b) => b.worth - a.worth) : list);
  const rivals = byWorth(entries.filter((each) => !each.won && !each.aside)), others = entries.filter((each) => !each.won && each.aside);
  const chosen = entries.filter((each) => each.won); // by cost the choice may be far down: it is seen first
  const listed = [...chosen, ...rivals.slice(0, Math.max(10 - others.length, 6))], pale = others.slice(0, Math.max(3, 10 - (listed.length - chosen.length)));
  const row = ({ entry, worth, won, aside }) => {
    const part = (100 * worth) / longest, over = part > 100;
    const bar = make("div", { class: "room" }, make("div", { class: over ? "fill over" : "fill", style: { width: `${Math.min(100, part)}%` } }));
    if (threshold) bar.append(make("div", { class: "tau", style: { left: `${(100 * threshold) / longest}%` } }));
    const ratio = entry.ratio === null ? "" : ` = ${entry.ratio.toPrecision(3)} x mean`, text = look.per ? `${merit(worth)} per ${look.per === "flops" ? "FLOP" : "parameter"}` : `${merit(entry.value)}${ratio}`;
    const value = make("span", { "data-merit": String(entry.value), title: `merit ${merit(entry.value)}${ratio}` }, text), kind = entry.kind === "units" ? "" : called(entry.path, look.call - 1);
    const fits = kind && lengthOf(`${entry.site}  ${kind}  ${text}`, BOLD) * 1.15 < space; // the name of the module at the site, where there is room
    const name = make("div", { class: "name" }, nameInRoom(entry.site, roomy ? space - (look.tried ? 280 : 190) : space), ...(fits ? [make("span", { class: "kind" }, kind)] : []), value);
    const arm = look.tried && look.tried.arms.find((each) => each.name === entry.site);
    if (arm) value.prepend(make("b", { "data-trial": String(arm.score) }, `trial ${arm.score === null ? "failed" : short(arm.score)}`), " · ");
    if (kind) name.title = kind;
    return make("div", { class: `bar${won ? " won" : aside ? " aside" : ""}`, ...(aside && !won ? { title: aside, "data-aside": aside } : {}) }, name, bar);
  };
  const groups = [...new Set(pale.map((each) => each.aside))].flatMap((why) => [make("p", { class: "hint why-not" }, `Did not compete: ${why}`), ...pale.filter((each) => each.aside === why).map(row)]);
  const all = [...listed, ...pale];
  const parts = [make("div", { class: roomy ? "bars roomy" : "bars", role: "img", "aria-label": `Merits: ${all.map(({ entry, won, aside }) => `${entry.site} ${merit(entry.value)}${aside && !won ? ` (did not compete: ${aside})` : ""}`).join("; ")}` }, ...listed.map(row), ...groups)];
  const hint = (text, options = {}) => parts.push(make("p", { class: "hint", ...options }, text));
  if (look.merits.length > all.length) hint(`${look.merits.length - all.length} more sites are listed in the text below.`);
  if (look.tried) hint(`A trial decided: the ${look.tried.score} of each network after it; without a growth ${look.tried.arms[0].score === null ? "not finite" : short(look.tried.arms[0].score)}.`);
  if (look.per && ["auto", "largest", "smallest"].includes(look.select)) hint(`chosen by the merit per added ${look.per === "flops" ? "FLOP" : "parameter"}, which the bars show`);
  hint(threshold ? `mark in the bars: tau = ${look.tau} x the mean of the existing weights, ${merit(threshold)}` : look.tau ? `tau = ${look.tau}` : "", { id: "tau", "data-tau": String(look.tau), ...(look.tau ? {} : { hidden: "" }) });
  return parts;
};
const fade = (id) => { // a panel that scrolls shows that there is more
  const space = room(id);
  at(id).classList.toggle("more", space.scrollHeight > space.clientHeight + space.scrollTop + 6);
};
let decided; // the check that is shown
const decision = (epoch, again) => {
  const look = lookAt(epoch), parts = [], space = room("decision");
  if (look === decided && look && !again) return;
  if (look !== decided) space.scrollTop = 0;
  decided = look;
  if (!look) {
    const next = data.looks[0];
    space.replaceChildren(make("p", { class: "why" }, next ? `None yet. The first check of all sites is at ${when(next.call)}.` : "No sites were measured in this training."));
    return;
  }
  for (const line of look.line.split("\n")) { // a number or an arrow must not break at its minus sign
    parts.push(make("p", { class: "line" }, ...line.split(/(\S*\de[-+]\d+\S*|->)/).map((part, i) => (i % 2 ? make("span", { class: "whole" }, part) : part))));
  }
  if (look.inserted.length) parts.push(make("p", { class: "why" }, make("b", {}, look.inserted.length > 1 ? "Why these sites: " : "Why this site: "), `${look.reason}.${look.undone.length ? " Undone later." : ""}`));
  if (look.merits.length && look.norm !== "none") parts.push(...bars(look)); // otherwise nothing was measured
  space.replaceChildren(...parts);
  fade("decision");
};
