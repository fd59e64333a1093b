const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const ROUND = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
// How lines are told apart without colour.
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 4], [12, 4], [2, 6], [6, 2, 2, 2]];

// Seconds in the largest unit of which there are one and a half, or whole days.
function clock(value) {
  const fits = ([, one]) => Math.abs(value) >= 1.5 * one || (value && value === one);
  const [unit, size] = UNITS.find(fits) || ["s", 1];
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

// Running sums of gaps; -1 stays what it is where a column has no gaps.
function summed(gaps) {
  let now = 0;
  return Float64Array.from(gaps, (gap) => (now += gap));
}

// The last index whose value is not above a bound, or -1.
function upTo(values, bound) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= bound) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// A chart of the stream that is shown; `runs` are those of it that it draws.
class StreamChart extends TimeChart {
  constructor(canvas, view) {
    super(canvas, view);
    this.all = "the whole stream";
    this.runs = [];
  }
  tell(time) { return clock(time); }
  apart(rough) {
    const days = 86400 * 10 ** Math.max(0, Math.floor(Math.log10(rough / 86400)));
    return [...ROUND, ...[1, 2, 5, 10].map((n) => n * days)].find((step) => step >= rough) || super.apart(rough);
  }
  begin(width, height) {
    const wide = width || this.canvas.parentElement.clientWidth;
    this.narrow = wide < 520;
    this.left = this.narrow ? 44 : 64;
    this.top = 24;
    this.height = height;
    const made = prepare(this.canvas, height, width);
    this.wide = made.wide;
    this.drawAxis(made.pen);
    return made.pen;
  }
  clip(pen) {
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.top, this.wide - this.left, this.height - this.top);
    pen.clip();
  }
  y(value) { return this.height - 6 - (value / this.most) * (this.height - this.top - 10); }
  drawLevels(pen, form) {
    const rough = this.most / 4, scale = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * scale).find((s) => s >= rough * 0.999);
    pen.textAlign = "right";
    for (let i = 0; i * step <= this.most * 1.0001; i += 1) {
      const y = Math.round(this.y(i * step));
      pen.fillStyle = colour("grid-line");
      pen.fillRect(this.left, y, this.wide - this.left, 1);
      pen.fillStyle = colour("muted");
      pen.fillText(form(i * step), this.left - 6, y);
    }
  }
}

const asPercent = (value) => `${Number((100 * value).toPrecision(3))}%`;

// A line a policy: a rate that goes from point to point, or devices in steps.
class LinesChart extends StreamChart {
  constructor(canvas, view, key, usable) {
    super(canvas, view);
    Object.assign(this, { key, usable, stepped: key === "use" });
  }
  draw(width) {
    const pen = this.begin(width, this.narrow ? 190 : 230);
    const peak = Math.max(0.05, ...this.runs.map((run) => highest(run[this.key].value)));
    this.most = this.stepped ? this.usable : Math.min(1, peak * 1.08);
    this.drawLevels(pen, this.stepped ? (v) => `${v}` : asPercent);
    this.clip(pen);
    for (const run of this.runs) this.drawLine(pen, run, this.runs.length === 1);
    pen.restore();
    this.say();
  }
  drawLine(pen, run, alone) {
    const { time, value } = run[this.key], whole = this.view.whole;
    pen.beginPath();
    const first = Math.max(0, upTo(time, this.view.from));
    let before = 0;
    for (let i = first; i < time.length && (i === first || time[i - 1] <= this.view.to); i += 1) {
      const x = this.x(time[i]), y = this.y(value[i]);
      if (i === first) pen.moveTo(x, y);
      else if (this.stepped) { pen.lineTo(x, before); pen.lineTo(x, y); } else pen.lineTo(x, y);
      before = y;
    }
    if (time.length) pen.lineTo(this.x(whole), before);
    pen.strokeStyle = colour(`p${run.policy % 8}`);
    pen.lineWidth = this.stepped && !alone ? 1.25 : 2;
    pen.setLineDash(alone ? [] : DASHES[run.policy % 8]);
    pen.stroke();
    pen.setLineDash([]);
    if (!alone || !this.stepped || !time.length) return;
    pen.lineTo(this.x(whole), this.y(0));
    pen.lineTo(this.x(time[first]), this.y(0));
    pen.globalAlpha = 0.22;
    pen.fillStyle = colour(`p${run.policy % 8}`);
    pen.fill();
    pen.globalAlpha = 1;
  }
  at(x, y) {
    if (x < this.left || y < this.top) return "";
    const time = this.time(x), lines = [clock(time)];
    for (const run of this.runs) {
      const { time: times, value } = run[this.key], index = upTo(times, time);
      if (index < 0) continue;
      const told = this.stepped ? `${value[index]} of ${this.usable} devices` : asPercent(value[index]);
      lines.push(this.runs.length > 1 ? `${run.name}: ${told}` : told);
    }
    return lines.length > 1 ? lines.join("\n") : "";
  }
}

function highest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

// Columns of jobs blocked in windows of time, by cause, under the rate so far.
class CausesChart extends StreamChart {
  constructor(canvas, view, outcomes) {
    super(canvas, view);
    this.outcomes = outcomes;
  }
  draw(width) {
    const [run] = this.runs;
    const pen = this.begin(width, this.narrow ? 200 : 240);
    if (!run) return;
    const { arrived, causes, blocked } = run.windows;
    const shares = arrived.map((all, w) => causes.map((_, c) => (all ? blocked[c][w] / all : 0)));
    const peak = Math.max(0.05, highest(run.rate.value), ...shares.map((parts) => parts.reduce((a, b) => a + b, 0)));
    this.most = Math.min(1, peak * 1.05);
    this.drawLevels(pen, asPercent);
    this.clip(pen);
    const length = this.view.whole / arrived.length;
    shares.forEach((parts, w) => {
      const from = this.x(w * length) + 0.5, to = this.x((w + 1) * length) - 0.5;
      if (to < this.left || from > this.wide) return;
      let floor = 0;
      parts.forEach((share, c) => {
        if (!share) return;
        const top = this.y(floor + share);
        pen.fillStyle = outcomeFill(pen, this.outcomes[causes[c]], to - from > 6);
        pen.fillRect(from, top, Math.max(to - from, 0.5), this.y(floor) - top);
        floor += share;
      });
    });
    const { time, value } = run.rate;
    pen.beginPath();
    time.forEach((at, i) => (i ? pen.lineTo(this.x(at), this.y(value[i])) : pen.moveTo(this.x(at), this.y(value[i]))));
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 1.75;
    pen.stroke();
    pen.restore();
    this.say();
  }
  at(x, y) {
    const [run] = this.runs;
    if (!run || x < this.left || y < this.top) return "";
    const { arrived, causes, blocked } = run.windows, time = this.time(x);
    const length = this.view.whole / arrived.length;
    const w = Math.min(Math.floor(time / length), arrived.length - 1);
    const lines = [`${clock(w * length)} to ${clock((w + 1) * length)}`, `${arrived[w]} jobs arrived`];
    causes.forEach((cause, c) => lines.push(`${called(this.outcomes[cause])}: ${blocked[c][w]}`));
    const index = upTo(run.rate.time, time);
    if (index >= 0) lines.push(`blocked so far: ${asPercent(run.rate.value[index])}`);
    return lines.join("\n");
  }
}

const called = (outcome) => outcome.replace("_", " ");
const OUTCOME_HATCH = { met: "", late: "level", refused: "rising", no_room: "falling", unfinished: "dots", undecided: "upright" };

function outcomeFill(pen, outcome, wide) {
  const ground = colour(`o-${outcome.replace("_", "-")}`), hatch = OUTCOME_HATCH[outcome];
  return hatch && wide ? hatched(pen, ground, hatch) : ground;
}

// Patterns are made once for each colour and kind.
const tiles = new Map();
function hatched(pen, ground, kind) {
  const key = `${ground} ${kind} ${window.devicePixelRatio}`;
  if (!tiles.has(key)) tiles.set(key, pattern(pen, ground, "rgba(0, 0, 0, 0.3)", kind));
  return tiles.get(key);
}
