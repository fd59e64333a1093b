const LETTERS = ["F", "B", "I", "W", "", "", ""];
const HATCH = ["", "level", "", "falling", "rising", "dots", "upright"];
const DEEPEST = 4000;
// Blocks of fewer pixels are put together to columns of so many.
const THIN = 2.5, COLUMN = 12;

// What part of the step is in sight; charts that share one move together.
class View {
  constructor(whole) {
    Object.assign(this, { whole, from: 0, to: whole, charts: [] });
  }
  set(from, to) {
    const span = Math.min(Math.max(to - from, this.whole / DEEPEST), this.whole);
    this.from = Math.min(Math.max(from, 0), this.whole - span);
    this.to = this.from + span;
    for (const chart of this.charts) chart.queue();
  }
  zoom(factor, at) {
    const middle = at === undefined ? (this.from + this.to) / 2 : at;
    this.set(middle - (middle - this.from) / factor, middle + (this.to - middle) / factor);
  }
  pan(share) {
    const by = share * (this.to - this.from);
    this.set(this.from + by, this.to + by);
  }
  fit() { this.set(0, this.whole); }
}

class TimelineChart {
  constructor(canvas, plan, view) {
    Object.assign(this, { canvas, plan, view, data: plan.timeline, width: 0 });
    this.unit = this.data.step / this.data.ticks;
    this.rows = this.data.rows.map((row) => this.decode(row));
    this.pp = plan.grid.degrees.pp;
    view.charts.push(this);
    this.listen();
    new ResizeObserver(() => this.queue()).observe(canvas.parentElement);
    this.draw();
  }

  decode(row) {
    const count = row.spans.length / 5;
    const out = { ...row, count, kind: new Uint8Array(count), stage: new Int32Array(count),
      microbatch: new Int32Array(count), start: new Float64Array(count), end: new Float64Array(count) };
    let now = 0;
    for (let i = 0; i < count; i += 1) {
      const [kind, stage, microbatch, gap, long] = row.spans.slice(5 * i, 5 * i + 5);
      out.kind[i] = kind; out.stage[i] = stage; out.microbatch[i] = microbatch;
      out.start[i] = (now + gap) * this.unit;
      now += gap + long;
      out.end[i] = now * this.unit;
    }
    return out;
  }

  queue() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  layout(width) {
    const many = this.rows.length;
    this.narrow = width < 520;
    this.row = many <= 4 ? 40 : many <= 8 ? 34 : many <= 20 ? 26 : many <= 40 ? 18 : 12;
    this.gap = this.row >= 18 ? 4 : 1;
    this.left = this.narrow ? 54 : 92;
    this.top = 24;
    this.height = this.top + many * (this.row + this.gap) + 4;
  }

  x(time) {
    return this.left + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.wide - this.left);
  }
  time(x) {
    return this.view.from + ((x - this.left) / (this.wide - this.left)) * (this.view.to - this.view.from);
  }

  draw(width) {
    this.layout(width || this.canvas.parentElement.clientWidth);
    const { pen, wide } = prepare(this.canvas, this.height, width);
    this.wide = wide;
    this.fills = this.data.kinds.slice(0, 7).map((kind, i) => {
      const ground = colour(kind.replace(" ", "-"));
      const plain = { ground, ink: colour(`${kind.replace(" ", "-")}-ink`), fill: ground };
      return HATCH[i] ? { ...plain, fill: pattern(pen, ground, "rgba(0, 0, 0, 0.28)", HATCH[i]) } : plain;
    });
    this.idle = pattern(pen, colour("idle"), colour("idle-mark"), "falling");
    this.drawAxis(pen);
    this.rows.forEach((row, index) => this.drawRow(pen, row, this.top + index * (this.row + this.gap)));
    this.say();
  }

  drawAxis(pen) {
    const muted = colour("muted"), rule = colour("line");
    const fonts = getComputedStyle(document.body).fontFamily;
    pen.font = `11px ${fonts}`;
    this.fonts = fonts;
    const span = this.view.to - this.view.from;
    const room = Math.max(2, Math.floor((this.wide - this.left) / 90));
    const rough = span / room, scale = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * scale).find((s) => s >= rough);
    pen.textBaseline = "middle";
    for (let i = Math.ceil(this.view.from / step); i * step <= this.view.to; i += 1) {
      const x = this.x(i * step);
      const text = seconds(Number((i * step).toPrecision(9)));
      const half = pen.measureText(text).width / 2;
      pen.fillStyle = muted;
      pen.textAlign = "center";
      if (x + half <= this.wide && x - half >= this.left - 30) pen.fillText(text, x, 9);
      pen.fillStyle = rule;
      pen.fillRect(x, 17, 1, 5);
    }
  }

  drawRow(pen, row, y) {
    const h = this.row;
    pen.fillStyle = rampColour(row.rank, this.pp);
    pen.fillRect(0, y, 4, h);
    pen.textAlign = "left";
    pen.font = `11px ${this.fonts}`;
    pen.fillStyle = colour("ink");
    if (h >= 12 && (h >= 14 || row.rank % 2 === 0)) {
      const many = row.devices > 1 ? ` × ${row.devices}` : "";
      pen.fillText(this.narrow ? `${row.rank}${many}` : `rank ${row.rank}${many}`, 9, y + h / 2, this.left - 14);
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.left, y, this.wide - this.left, h);
    pen.clip();
    pen.fillStyle = this.idle;
    pen.fillRect(this.left, y, Math.min(this.x(this.data.step), this.wide) - this.left, h);
    let index = this.first(row, this.view.from);
    // Blocks too thin to tell apart: a column of what they are, each as high as its share.
    const thin = new Float64Array(7);
    let edge = -1, began = 0;
    const flush = () => {
      if (edge < 0) return;
      let floor = y + h;
      thin.forEach((spent, kind) => {
        if (!spent) return;
        const high = (h * spent) / Math.max(edge - began, 1e-9);
        pen.fillStyle = this.fills[kind].ground;
        pen.fillRect(began, floor - high, edge - began + 0.4, high);
        floor -= high;
      });
      thin.fill(0);
      edge = -1;
    };
    for (; index < row.count && row.start[index] < this.view.to; index += 1) {
      const from = this.x(row.start[index]), to = this.x(row.end[index]);
      if (to - from < THIN) {
        if (edge >= 0 && (from - edge > THIN || edge - began > COLUMN)) flush();
        if (edge < 0) began = from;
        thin[row.kind[index]] += to - from;
        edge = to;
        continue;
      }
      flush();
      this.drawSpan(pen, row, index, from, to, y);
    }
    flush();
    pen.restore();
  }

  drawSpan(pen, row, index, from, to, y) {
    const look = this.fills[row.kind[index]], wide = to - from, h = this.row;
    pen.fillStyle = wide > 8 ? look.fill : look.ground;
    pen.fillRect(from, y, wide, h);
    const talk = this.talk(row, index);
    if (talk > 0.01 && wide > 3) {
      const high = Math.max(1, talk * h);
      pen.fillStyle = wide > 8 ? this.fills[5].fill : this.fills[5].ground;
      pen.fillRect(from, y + h - high, wide, high);
    }
    if (wide > 5) {
      pen.fillStyle = colour("paper");
      pen.fillRect(to - 0.8, y, 0.8, h);
    }
    const letter = LETTERS[row.kind[index]];
    if (!letter || h < 14 || wide < 16) return;
    const text = letter + row.microbatch[index];
    pen.font = `11px ${this.fonts}`;
    const long = pen.measureText(text).width;
    if (long + 5 > wide) return;
    // A plain patch under the text, so that no hatching runs through it.
    const shown = Math.max(from, this.left), middle = (shown + Math.min(to, this.wide)) / 2;
    pen.fillStyle = look.ground;
    pen.fillRect(middle - long / 2 - 2, y + h / 2 - 7, long + 4, 14);
    pen.fillStyle = look.ink;
    pen.textAlign = "center";
    pen.fillText(text, middle, y + h / 2 + 0.5);
  }

  // Share of a forward or backward that is communication.
  talk(row, index) {
    const stage = this.plan.stages[row.stage[index]];
    if (!stage || stage.forward === null) return 0;
    const kind = row.kind[index];
    if (this.pp === 1 && kind < 2) {
      const sum = (name) => this.plan.stages.reduce((total, one) => total + one[name], 0);
      return kind === 0 ? sum("forwardTalk") / sum("forward") : sum("backwardTalk") / sum("backward");
    }
    if (kind === 0) return stage.forwardTalk / stage.forward;
    if (kind === 1 || kind === 2) return Math.min(1, stage.backwardTalk / (row.end[index] - row.start[index]));
    return 0;
  }

  // The first span that ends after a time.
  first(row, time) {
    let low = 0, high = row.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  say() {
    const told = this.canvas.closest("figure").querySelector("output");
    const { from, to, whole } = this.view;
    if (told) told.textContent = to - from >= whole * 0.9999
      ? `the whole step, ${seconds(whole)}`
      : `${seconds(from)} to ${seconds(to)} of ${seconds(whole)}`;
  }

  // What is under a point, in words; empty beside the chart.
  at(x, y) {
    const row = this.rows[Math.floor((y - this.top) / (this.row + this.gap))];
    if (!row || x < this.left || y < this.top) return "";
    const time = this.time(x), index = this.first(row, time);
    const who = row.devices > 1
      ? `each of ${row.devices} devices: ranks ${row.first} to ${row.first + row.devices - 1}`
      : `rank ${row.first}`;
    if (time > this.data.step) return "";
    if (index >= row.count || row.start[index] > time) {
      const from = index ? row.end[index - 1] : 0;
      const to = index < row.count ? row.start[index] : this.data.step;
      return `Bubble\n${seconds(to - from)}, from ${seconds(from)}\npp rank ${row.rank}, ${who}`;
    }
    const kind = this.data.kinds[row.kind[index]];
    const lines = [kind[0].toUpperCase() + kind.slice(1)];
    if (row.microbatch[index] >= 0) lines[0] += `, microbatch ${row.microbatch[index]}`;
    const long = row.end[index] - row.start[index];
    lines.push(`${seconds(long)}, from ${seconds(row.start[index])}`);
    const talk = this.talk(row, index);
    if (talk > 0.0005) lines.push(`of which communication ${seconds(talk * long)}`);
    const stage = this.plan.stages[row.stage[index]];
    if (stage && this.pp > 1) lines.push(`stage ${row.stage[index]}: ${stage.units[0]} … ${stage.units[1]}`);
    lines.push(`pp rank ${row.rank} (${row.type}), ${who}`);
    return lines.join("\n");
  }

  listen() {
    const { canvas, view } = this, fingers = new Map();
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [((event.clientX - box.left) * this.wide) / box.width, ((event.clientY - box.top) * this.height) / box.height];
    };
    // Without focus the wheel scrolls the page, as readers expect.
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        view.pan((event.deltaX || event.deltaY) / 600);
      } else {
        view.zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY)) / 300), this.time(place(event)[0]));
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, place(event));
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragging");
      canvas.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event), before = fingers.get(event.pointerId);
      const text = this.at(...now);
      text ? showTip(text, event.clientX, event.clientY) : hideTip();
      if (!before) return;
      const other = [...fingers].find(([id]) => id !== event.pointerId);
      if (other) {
        const [old, wide] = [before, now].map((at) => Math.max(12, Math.abs(at[0] - other[1][0])));
        view.zoom(wide / old, this.time((now[0] + other[1][0]) / 2));
      } else {
        view.pan((before[0] - now[0]) / (this.wide - this.left));
      }
      fingers.set(event.pointerId, now);
    });
    const up = (event) => {
      fingers.delete(event.pointerId);
      if (!fingers.size) canvas.classList.remove("dragging");
    };
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, up);
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, hideTip);
    canvas.addEventListener("dblclick", (event) => view.zoom(2.5, this.time(place(event)[0])));
    canvas.addEventListener("keydown", (event) => {
      const act = KEYS[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act(view);
    });
  }
}

const KEYS = {
  "+": (view) => view.zoom(1.6), "=": (view) => view.zoom(1.6), "-": (view) => view.zoom(1 / 1.6),
  ArrowLeft: (view) => view.pan(-0.15), ArrowRight: (view) => view.pan(0.15),
  PageUp: (view) => view.pan(-0.9), PageDown: (view) => view.pan(0.9),
  Home: (view) => view.set(0, view.to - view.from), 0: (view) => view.fit(),
  End: (view) => view.set(view.whole - (view.to - view.from), view.whole),
};
