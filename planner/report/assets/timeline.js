const LETTERS = ["F", "B", "I", "W", "", "", ""];
const HATCH = ["", "level", "", "rising", "falling", "dots", "upright"];
// Blocks of fewer pixels are put together to columns of so many.
const THIN = 2.5, COLUMN = 12;

class TimelineChart extends TimeChart {
  constructor(canvas, plan, view) {
    super(canvas, view);
    Object.assign(this, { plan, data: plan.timeline, width: 0 });
    this.unit = this.data.step / this.data.ticks;
    this.rows = this.data.rows.map((row) => this.decode(row));
    this.pp = plan.grid.degrees.pp;
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

  layout(width) {
    const many = this.rows.length;
    this.narrow = width < 520;
    this.row = many <= 4 ? 40 : many <= 8 ? 34 : many <= 20 ? 26 : many <= 40 ? 18 : 12;
    this.gap = this.row >= 18 ? 4 : 1;
    this.left = this.narrow ? 54 : 92;
    this.top = 24;
    this.height = this.top + many * (this.row + this.gap) + 4;
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
    this.idle = pattern(pen, colour("idle"), colour("idle-mark"), "rising");
    this.drawAxis(pen);
    this.rows.forEach((row, index) => this.drawRow(pen, row, this.top + index * (this.row + this.gap)));
    this.say();
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
}
