// The slider, the play button and the keys.
let timer = 0;
const playing = () => timer !== 0;
const say = (epoch) => {
  const look = lookAt(epoch), next = data.looks.find((l) => l.call > epoch), state = at("state");
  const names = look && look.call === epoch ? look.chosen.map((index) => look.merits[index].site).join("; ") : null;
  const counter = make("span", { class: "spoken" }, when(epoch)); // the counter beside the slider shows it
  const told = (list) => (names === null ? "" : list ? ` | grew: ${list}` : " | a check, nothing grew"), text = (list) => `${told(list)}${next ? ` | next check at ${when(next.call)}` : ""}`;
  const write = (list) => state.replaceChildren(counter, make("span", { class: "spoken" }, " | "), make("span", {}, text(list).slice(3).replace(/^./, (letter) => letter.toUpperCase()) || (data.looks.length ? "No more checks" : "No checks")));
  const font = fontOf(state), lines = narrow.matches ? 2 : 1, high = lines * parseFloat(getComputedStyle(state).lineHeight) + 3;
  write(names);
  for (let share = 0.95; names && share > 0.1 && state.clientHeight > high; share -= 0.05) write(cut(names, share * lengthOf(names, font), font));
  state.title = `${when(epoch)}${text(names)}`;
  if (!playing() || names !== null) at("said").textContent = state.title; // to a listener a film must not talk all the time
};
const show = (again = false) => {
  const frame = Number(slider.value), epoch = call();
  at("epoch").textContent = when(epoch);
  slider.setAttribute("aria-valuetext", when(epoch));
  say(epoch);
  network(frame, epoch);
  decision(epoch, again);
  if (data.films.length) boundary(frame, epoch);
  chart(epoch);
  at("start").hidden = frame > 0 || playing() || data.frames.length < 2;
  fade("network");
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
  at("start").hidden = true;
  at("network").scrollIntoView({ block: "nearest", behavior: still.matches ? "instant" : "smooth" });
  timer = setTimeout(advance, pace);
};
const jump = (forward) => {
  if (playing()) stop();
  const stops = data.looks.map((look) => look.call), epoch = call();
  const wanted = forward ? stops.find((c) => c > epoch) : [...stops].reverse().find((c) => c < epoch);
  go(wanted === undefined ? (forward ? data.frames.length - 1 : 0) : data.frames.indexOf(wanted));
};
const fill = () => { // network, check and curves on one screen
  const top = at("grid").getBoundingClientRect().top + scrollY;
  at("grid").style.setProperty("--room", `${Math.floor(innerHeight - top - 12)}px`);
};
const begin = () => {
  document.title = data.title;
  at("version").textContent = `sensli ${data.version}`;
  at("measure").textContent = data.caption;
  at("still").remove();
  at("words").open = false;
  at("scale").hidden = !(known[0] > 0);
  at("cost").hidden = !priced;
  at("key").replaceChildren(...(data.films.length ? graphKey() : boxKey()));
  slider.max = String(data.frames.length - 1);
  slider.setAttribute("aria-label", data.unit);
  data.looks.forEach((look) => {
    const part = data.frames.indexOf(look.call) / Math.max(1, data.frames.length - 1);
    // a slider's knob does not reach its ends: half a knob (8 px) of room on each side
    at("ticks").append(make("i", { class: look.inserted.length ? "" : "none", style: { left: `calc(8px + ${part} * (100% - 16px))` } }));
  });
  face("play", "play", "Play");
  face("previous", "previous", "Previous check");
  face("next", "next", "Next check");
  face("save", "save", "Save as picture");
  screens();
  fill();
  const asked = /(?:epoch|step)=(\d+)/.exec(location.hash);
  go(asked ? Math.max(0, last(data.frames, (c) => c <= Number(asked[1]))) : 0);
  slider.addEventListener("input", () => { if (playing()) stop(); show(); });
  at("log").addEventListener("change", () => show());
  at("flops").addEventListener("change", () => show());
  at("play").addEventListener("click", play);
  at("start").addEventListener("click", () => { at("play").focus(); play(); }); // the button goes, and the keyboard stays on the film
  at("save").addEventListener("click", () => { save(); });
  for (const id of ["network", "decision"]) room(id).addEventListener("scroll", () => fade(id));
  at("previous").addEventListener("click", () => jump(false));
  at("next").addEventListener("click", () => jump(true));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const control = ["BUTTON", "SUMMARY"].includes(event.target.tagName) || event.target.type === "checkbox";
    if (event.key === " " && !control) { event.preventDefault(); play(); }
    else if (event.key === "n") jump(true);
    else if (event.key === "p") jump(false);
    else if (event.target === document.body && event.key === "ArrowRight") go(Number(slider.value) + 1);
    else if (event.target === document.body && event.key === "ArrowLeft") go(Number(slider.value) - 1);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  let size = "";
  new ResizeObserver(() => {
    const now = `${document.body.clientWidth} ${innerHeight}`;
    if (now !== size) { size = now; fill(); show(true); }
  }).observe(document.documentElement);
  addEventListener("resize", () => { fill(); show(true); });
  document.documentElement.dataset.ready = "yes";
};
begin();
