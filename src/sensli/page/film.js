// The slider, the play button and the keys.
// --- the film ---
let timer = 0;
const playing = () => timer !== 0;
const say = (epoch) => {
  const look = lookAt(epoch), next = data.looks.find((l) => l.call > epoch);
  const names = look && look.call === epoch ? look.chosen.map((index) => look.merits[index].site).join("; ") : null;
  const here = names === null ? "" : names ? ` | ${look.chosen.every((index) => look.merits[index].kind === "units") ? "grown" : "inserted"}: ${names}` : " | a look, nothing inserted";
  at("state").textContent = `epoch ${whole(epoch)}${here}${next ? ` | next look at epoch ${whole(next.call)}` : ""}`;
};
const show = () => {
  const frame = Number(slider.value), epoch = call();
  at("epoch").textContent = `epoch ${whole(epoch)}`;
  slider.setAttribute("aria-valuetext", `epoch ${epoch}`);
  network(frame, epoch);
  decision(epoch);
  if (data.films.length) boundary(frame, epoch);
  chart(epoch);
  if (!playing() || (lookAt(epoch) || {}).call === epoch) say(epoch); // a film must not talk all the time
};
const go = (frame) => { slider.value = String(Math.max(0, Math.min(data.frames.length - 1, frame))); show(); };
const stop = () => { clearTimeout(timer); timer = 0; face("play", "play", "Play"); say(call()); };
const pace = Math.max(50, Math.min(400, 12000 / data.frames.length));
const advance = () => {
  if (Number(slider.value) >= data.frames.length - 1) { stop(); return; }
  go(Number(slider.value) + 1);
  const look = lookAt(call());
  timer = setTimeout(advance, look && look.call === call() ? 1600 : pace);
};
const play = () => {
  if (playing()) { stop(); return; }
  if (Number(slider.value) >= data.frames.length - 1) go(0);
  face("play", "stop", "Stop");
  timer = setTimeout(advance, pace);
};
const jump = (forward) => {
  if (playing()) stop();
  const stops = data.looks.map((look) => look.call), epoch = call();
  const wanted = forward ? stops.find((c) => c > epoch) : [...stops].reverse().find((c) => c < epoch);
  go(wanted === undefined ? (forward ? data.frames.length - 1 : 0) : data.frames.indexOf(wanted));
};
const begin = () => {
  document.title = data.title;
  at("version").textContent = `sensli ${data.version}`;
  at("measure").textContent = data.measure.charAt(0).toUpperCase() + data.measure.slice(1);
  at("still").remove();
  at("words").open = false;
  slider.max = String(data.frames.length - 1);
  data.looks.forEach((look) => {
    const part = data.frames.indexOf(look.call) / Math.max(1, data.frames.length - 1);
    // a slider's knob does not reach its ends: half a knob (8 px) of room on each side
    at("ticks").append(make("i", { class: look.inserted.length ? "" : "none", style: { left: `calc(8px + ${part} * (100% - 16px))` } }));
  });
  face("play", "play", "Play");
  face("previous", "previous", "Previous decision");
  face("next", "next", "Next decision");
  screens();
  const asked = /epoch=(\d+)/.exec(location.hash);
  go(asked ? Math.max(0, last(data.frames, (c) => c <= Number(asked[1]))) : data.frames.length - 1);
  slider.addEventListener("input", () => { if (playing()) stop(); show(); });
  at("play").addEventListener("click", play);
  at("previous").addEventListener("click", () => jump(false));
  at("next").addEventListener("click", () => jump(true));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const control = ["BUTTON", "SUMMARY"].includes(event.target.tagName);
    if (event.key === " " && !control) { event.preventDefault(); play(); }
    else if (event.key === "n") jump(true);
    else if (event.key === "p") jump(false);
    else if (event.target === document.body && event.key === "ArrowRight") go(Number(slider.value) + 1);
    else if (event.target === document.body && event.key === "ArrowLeft") go(Number(slider.value) - 1);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  let width = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; show(); } }).observe(document.body);
  document.documentElement.dataset.ready = "yes";
};
begin();
