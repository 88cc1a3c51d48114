// The page as it is now, as a picture: title, network, check, boundaries and curves, drawn once more on a canvas.
const COLOURS = ["page", "panel", "ink", "soft", "line", "edge", "track", "grown", "baseline", "extended", "new", "class0", "class1", "middle"];
const asImage = (svg) => new Promise((done, failed) => { // a drawing for itself: the style sheet comes with it, and the colours that hold now
  const copy = svg.cloneNode(true), rules = COLOURS.map((name) => `--${name}: ${colour(name)}`).join("; ");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.prepend(draw("style", {}, `${document.querySelector("style").textContent} :root { ${rules} } svg { width: auto; }`));
  const image = new Image();
  image.onload = () => done(image);
  image.onerror = failed;
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
});
const pencil = (context, width) => ({ // writes lines that break at spaces; returns where the next one begins
  write: (text, x, y, font, ink, space = width) => {
    context.font = font;
    context.fillStyle = colour(ink);
    const high = 1.4 * parseFloat(/(\d+)px/.exec(font)[1]);
    let line = "";
    for (const word of text.split(" ")) {
      if (line && context.measureText(`${line} ${word}`).width > space) { context.fillText(line, x, y); y += high; line = word; } else line = line ? `${line} ${word}` : word;
    }
    context.fillText(line, x, y);
    return y + high;
  },
});
const drawBars = (context, pen, x, y, space) => { // the bars of the check, as they stand in the panel
  for (const bar of document.querySelectorAll("#decision .bars > *")) {
    if (!bar.classList.contains("bar")) { y = pen.write(bar.textContent, x, y + 2, `italic ${FONT}`, "soft", space) + 4; continue; } // why the next ones did not compete
    const [name, value] = [bar.querySelector(".name span:first-child").title, bar.querySelector("[data-merit]").textContent], won = bar.classList.contains("won");
    context.globalAlpha = bar.classList.contains("aside") ? 0.55 : 1;
    context.font = FONT;
    const room = space - context.measureText(value).width - 12;
    pen.write(value, x + room + 12, y, FONT, "soft", 1e9);
    pen.write(cut(name, room, won ? BOLD : FONT), x, y, won ? BOLD : FONT, "ink", 1e9);
    context.fillStyle = colour("track");
    context.fillRect(x, y + 5, space, 6);
    context.fillStyle = colour(won ? "grown" : "baseline");
    context.fillRect(x, y + 5, (space * parseFloat(bar.querySelector(".fill").style.width)) / 100, 6);
    y += 30;
  }
  context.globalAlpha = 1;
  return y;
};
const picture = async () => { // a canvas of 1200 columns, as high as it takes
  const width = 1200, edge = 24, gap = 24, half = (width - 2 * edge - gap) / 2, look = lookAt(call()), factor = 2;
  const [nets, charts] = await Promise.all(["network", "loss"].map((id) => Promise.all([...room(id).querySelectorAll("svg")].map(asImage))));
  const high = (svg) => (svg ? (half * svg.height) / svg.width : 0), canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  const paint = () => { // twice: the first time to know how high it is
    const pen = pencil(context, width - 2 * edge), right = edge + half + gap;
    context.setTransform(factor, 0, 0, factor, 0, 0);
    context.fillStyle = colour("page");
    context.fillRect(0, 0, canvas.width, canvas.height);
    let top = pen.write(data.title, edge, edge + 20, "600 24px system-ui, sans-serif", "ink");
    top = pen.write(data.subtitle || "", edge, top, "14px system-ui, sans-serif", "soft");
    top = pen.write(`${when(call())}, ${at("size").textContent}`, edge, top + 6, "600 14px system-ui, sans-serif", "ink") + 6;
    let low = top, side = top;
    for (const image of nets) { context.drawImage(image, edge, low, half, high(image)); low += high(image) + gap; }
    let x = edge;
    for (const [name, screen] of pictures) {
      const size = (half - 2 * 12) / pictures.size;
      context.drawImage(screen, x, low, size, size);
      pen.write(name, x, low + size + 16, FONT, "soft");
      x += size + 12;
    }
    if (pictures.size) low += half / pictures.size + gap;
    if (look) {
      for (const line of look.line.split("\n")) side = pen.write(line, right, side + 10, FONT, "ink", half) - 6;
      if (look.inserted.length) side = pen.write(`Why: ${look.reason}.`, right, side + 12, FONT, "soft", half);
      side = drawBars(context, pen, right, side + 10, half);
    }
    side += 14;
    pen.write(data.caption, right, side, BOLD, "ink", half);
    let key = right + context.measureText(data.caption).width + 16;
    for (const each of document.querySelectorAll("[data-curve]")) {
      const text = each.textContent.trim(), curve = curves.find(({ name }) => name === each.dataset.curve);
      pen.write(text, key, side, FONT, curve.role, 1e9);
      key += context.measureText(text).width + 16;
    }
    side += 17;
    for (const image of charts) { context.drawImage(image, right, side, half, high(image)); side += high(image) + gap; }
    return Math.max(low, side) + edge;
  };
  canvas.width = factor * width;
  canvas.height = factor * 100;
  canvas.height = Math.ceil(factor * paint());
  paint();
  return canvas;
};
const save = async () => {
  const canvas = await picture(), link = make("a", { download: `${data.title.replace(/[^\w]+/g, "-").toLowerCase()}-${data.unit}-${call()}.png`, href: canvas.toDataURL("image/png") });
  link.click();
};
