const MODEL_COLOURS = ["forward", "backward-input", "optimizer", "backward-weight", "transfer", "backward", "communication", "reserve"];
const MODEL_HATCH = ["", "rising", "level", "dots", "upright", "falling"];
// Devices have rows of their own up to so many; above, their hosts have.
const MOST_DEVICE_ROWS = 64;

// The cluster's rows: of each device the row that it is in and its place in there.
class Rows {
  constructor(hosts, occupied) {
    this.sizes = hosts.flatMap(([many, size]) => Array(many).fill(size));
    this.firsts = summed([0, ...this.sizes]);
    this.devices = this.firsts[this.sizes.length];
    this.byDevice = this.devices <= MOST_DEVICE_ROWS;
    this.count = this.byDevice ? this.devices : this.sizes.length;
    this.occupied = occupied;
  }
  host(device) { return upTo(this.firsts.subarray(0, this.sizes.length), device); }
  // Boxes of runs of devices: top and bottom in rows.
  boxes(pairs) {
    const found = [];
    for (let i = 0; i < pairs.length; i += 2) {
      let first = pairs[i];
      const last = pairs[i + 1];
      if (this.byDevice) { found.push(first, last + 1); continue; }
      while (first <= last) {
        const host = this.host(first), end = Math.min(last, this.firsts[host + 1] - 1);
        const size = this.sizes[host], from = this.firsts[host];
        found.push(host + (first - from) / size, host + (end + 1 - from) / size);
        first = end + 1;
      }
    }
    return found;
  }
  name(row, narrow) {
    const word = this.byDevice ? "device" : "host";
    return narrow ? `${row}` : `${word} ${row}`;
  }
}

// Bars of jobs on the devices that they held.
class GanttChart extends StreamChart {
  constructor(canvas, view, data, legend) {
    super(canvas, view);
    this.rows = new Rows(data.hosts, data.occupied);
    this.outcomes = data.outcomes;
    this.legend = legend;
    this.by = "model";
  }

  look(index) {
    const { jobs } = this.runs[0];
    if (this.by === "outcome") return this.outcomes[jobs.outcome[index]];
    return jobs.model[index];
  }
  fill(pen, look, wide) {
    if (this.by === "outcome") return outcomeFill(pen, look, wide);
    const ground = colour(MODEL_COLOURS[look % 8]), hatch = MODEL_HATCH[Math.floor(look / 8) % 6];
    return hatch && wide ? hatched(pen, ground, hatch) : ground;
  }

  // Which devices each set stands for, worked out once a run.
  prepareRun(run) {
    if (run.boxes) return;
    run.boxes = run.sets.map((pairs) => this.rows.boxes(pairs));
    run.bars = run.jobs.ran.map((_, i) => i).filter((i) => run.jobs.ran[i] >= 0);
  }

  draw(width) {
    const many = this.rows.count, [run] = this.runs;
    this.row = many <= 8 ? 30 : many <= 16 ? 24 : many <= 40 ? 17 : many <= 80 ? 11 : many <= 160 ? 8 : Math.max(1.5, 1200 / many);
    const pen = this.begin(width, 24 + many * this.row + 4);
    this.drawRows(pen, many);
    if (!run) return;
    this.prepareRun(run);
    this.clip(pen);
    const gap = this.row >= 8 ? 1 : 0;
    const { start, ran } = run.jobs;
    for (const index of run.bars) {
      if (start[index] >= this.view.to || start[index] + ran[index] <= this.view.from) continue;
      this.drawBar(pen, run, index, gap);
    }
    pen.restore();
    this.say();
  }

  drawRows(pen, many) {
    pen.fillStyle = colour("idle");
    pen.fillRect(this.left, this.top, this.wide - this.left, many * this.row);
    for (const [first, last] of this.rows.occupied) {
      const boxes = this.rows.boxes([first, last]);
      pen.fillStyle = hatched(pen, colour("idle"), "falling");
      for (let b = 0; b < boxes.length; b += 2) {
        pen.fillRect(this.left, this.top + boxes[b] * this.row, this.wide - this.left, (boxes[b + 1] - boxes[b]) * this.row);
      }
    }
    const every = Math.max(1, Math.ceil(13 / this.row));
    pen.textAlign = "left";
    pen.fillStyle = colour("muted");
    for (let row = 0; row < many; row += every) {
      pen.fillText(this.rows.name(row, this.narrow), 0, this.top + (row + Math.min(every, many - row) / 2) * this.row, this.left - 6);
    }
  }

  drawBar(pen, run, index, gap) {
    const { start, ran } = run.jobs, boxes = run.boxes[run.jobs.set[index]];
    const from = this.x(start[index]), wide = this.x(start[index] + ran[index]) - from;
    const look = this.look(index), room = wide - (wide > 3 ? 1 : 0);
    pen.fillStyle = this.fill(pen, look, wide > 8);
    for (let b = 0; b < boxes.length; b += 2) {
      const y = this.top + boxes[b] * this.row, high = (boxes[b + 1] - boxes[b]) * this.row - gap;
      pen.fillRect(from, y, room, Math.max(high, 0.4));
      if (high >= 12 && wide > 40) this.write(pen, run, index, from, wide, y + high / 2);
    }
  }

  write(pen, run, index, from, wide, y) {
    const text = this.by === "model" ? run.models[run.jobs.model[index]] : called(this.outcomes[run.jobs.outcome[index]]);
    const long = pen.measureText(text).width;
    const left = Math.max(from, this.left), right = Math.min(from + wide, this.wide);
    if (long + 8 > right - left) return;
    const ground = this.fill(pen, this.look(index), false);
    pen.fillStyle = ground;
    pen.fillRect((left + right - long) / 2 - 2, y - 6, long + 4, 12);
    pen.fillStyle = inkOn(ground);
    pen.textAlign = "center";
    pen.fillText(text, (left + right) / 2, y + 0.5);
  }

  at(x, y) {
    const [run] = this.runs, place = (y - this.top) / this.row;
    if (!run || x < this.left || place < 0 || place >= this.rows.count) return "";
    const time = this.time(x), slack = 2 / (this.wide - this.left) * (this.view.to - this.view.from);
    const { start, ran } = run.jobs;
    const hit = run.bars.find((i) => {
      if (start[i] - slack > time || start[i] + ran[i] + slack < time) return false;
      const boxes = run.boxes[run.jobs.set[i]];
      for (let b = 0; b < boxes.length; b += 2) if (boxes[b] <= place && place < boxes[b + 1]) return true;
      return false;
    });
    if (hit === undefined) return `${this.rows.name(Math.floor(place))}\nfree, ${clock(time)}`;
    return aboutJob(run, hit, this.outcomes).join("\n");
  }

  showLegend() {
    const [run] = this.runs;
    this.legend.replaceChildren();
    if (!run) return;
    this.prepareRun(run);
    const pen = this.canvas.getContext("2d");
    const there = [...new Set(run.bars.map((i) => this.look(i)))];
    const order = this.by === "outcome" ? this.outcomes : run.models.map((_, i) => i);
    for (const look of order.filter((one) => there.includes(one))) {
      const item = document.createElement("li"), swatch = document.createElement("canvas");
      swatch.className = "swatch";
      const { pen: brush } = prepareSwatch(swatch);
      brush.fillStyle = this.fill(pen, look, true);
      brush.fillRect(0, 0, 16, 12);
      item.append(swatch, this.by === "outcome" ? called(look) : run.models[look]);
      this.legend.append(item);
    }
  }
}

function prepareSwatch(canvas) {
  const scale = Math.max(window.devicePixelRatio || 1, 1);
  canvas.width = 16 * scale;
  canvas.height = 12 * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen };
}

// Devices of a set as one would write them.
function devicesOf(run, set) {
  const pairs = run.sets[set] || [], parts = [];
  for (let i = 0; i < pairs.length; i += 2) parts.push(pairs[i] === pairs[i + 1] ? `${pairs[i]}` : `${pairs[i]}–${pairs[i + 1]}`);
  return parts.join(", ");
}

function heldBy(run, set) {
  const pairs = run.sets[set] || [];
  let sum = 0;
  for (let i = 0; i < pairs.length; i += 2) sum += pairs[i + 1] - pairs[i] + 1;
  return sum;
}

function aboutJob(run, index, outcomes) {
  const { jobs } = run;
  const lines = [`${run.models[jobs.model[index]]}, job ${jobs.number[index]}`];
  lines.push(`${called(outcomes[jobs.outcome[index]])}; arrived at ${clock(jobs.arrival[index])}, may take ${clock(jobs.allowed[index])}`);
  lines.push(`ran ${clock(jobs.ran[index])} from ${clock(jobs.start[index])}`);
  lines.push(`${run.plans[jobs.plan[index]]}; devices ${devicesOf(run, jobs.set[index])}`);
  return lines;
}
