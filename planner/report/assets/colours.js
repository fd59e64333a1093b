// Colours come from the style sheet, so that there is one place for them.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

// Asking the browser takes as long as drawing hundreds of blocks does.
const palette = new Map();

function colour(name) {
  if (!palette.has(name)) {
    probe.style.color = `var(--${name})`;
    palette.set(name, getComputedStyle(probe).color);
  }
  return palette.get(name);
}

function channels(text) {
  const found = text.match(/[\d.]+/g) || [0, 0, 0];
  return found.slice(0, 3).map(Number);
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white, whichever is told apart better: at least 4.58 to 1 on any ground.
function inkOn(text) {
  const light = luminance(channels(text));
  return 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

const RAMP = 8;

// One of `count` ordered values, from dark blue to yellow.
function rampColour(index, count) {
  const place = count > 1 ? (index / (count - 1)) * RAMP : 0;
  const low = Math.min(Math.floor(place), RAMP - 1);
  const share = place - low;
  const [from, to] = [low, low + 1].map((stop) => channels(colour(`ramp-${stop}`)));
  const mixed = from.map((value, i) => Math.round(value + share * (to[i] - value)));
  return `rgb(${mixed.join(", ")})`;
}

// A tile of lines or dots over a ground, as the legend's swatches have.
function pattern(context, ground, mark, kind) {
  const size = kind === "dots" ? 4 : 6;
  const tile = document.createElement("canvas");
  const scale = window.devicePixelRatio || 1;
  tile.width = tile.height = size * scale;
  const pen = tile.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = pen.fillStyle = mark;
  pen.lineWidth = 1;
  pen.beginPath();
  if (kind === "dots") pen.arc(2, 2, 0.9, 0, 7);
  for (const shift of [-size, 0, size]) {
    if (kind === "rising") { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
    if (kind === "falling") { pen.moveTo(shift, 0); pen.lineTo(shift + size, size); }
  }
  if (kind === "upright") { pen.moveTo(size / 2, 0); pen.lineTo(size / 2, size); }
  if (kind === "level") { pen.moveTo(0, size / 2); pen.lineTo(size, size / 2); }
  kind === "dots" ? pen.fill() : pen.stroke();
  const made = context.createPattern(tile, "repeat");
  made.setTransform(new DOMMatrix().scale(1 / scale));
  return made;
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 1) return `${Number(value.toPrecision(4))} s`;
  if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(4))} ms`;
  return size ? `${Number((value * 1e6).toPrecision(4))} µs` : "0 s";
}

// A canvas as wide as its box, sharp on any screen; returns its pen and its width.
function prepare(canvas, height, width) {
  const scale = Math.max(window.devicePixelRatio || 1, 1);
  const wide = Math.max(width || canvas.parentElement.clientWidth, 120);
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.aspectRatio = `${wide} / ${height}`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, height);
  return { pen, wide };
}

const tip = document.getElementById("tip");

// The first line of a tip is its title.
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = Math.min(x + 14, window.innerWidth - box.width - 10);
  const below = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
  tip.style.left = `${Math.max(10, right)}px`;
  tip.style.top = `${Math.max(10, below)}px`;
}

function hideTip() {
  tip.hidden = true;
}
