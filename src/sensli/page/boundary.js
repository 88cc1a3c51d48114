// The plane of a small network: where each one draws the line.
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
    canvas.setAttribute("aria-label", `Where the ${film.name} network draws the line at ${when(epoch)}`);
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
