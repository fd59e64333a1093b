const DEEPEST = 4000;

// What part of the time is in sight; charts that share one move together.
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

// A canvas whose horizontal axis is the time that a view shows.
class TimeChart {
  constructor(canvas, view) {
    Object.assign(this, { canvas, view, all: "the whole step" });
    view.charts.push(this);
    this.listen();
    new ResizeObserver(() => this.queue()).observe(canvas.parentElement);
  }

  tell(time) { return seconds(time); }

  // A round time, not below a rough one.
  apart(rough) {
    const scale = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((s) => s * scale).find((s) => s >= rough);
  }

  queue() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  x(time) {
    return this.left + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.wide - this.left);
  }
  time(x) {
    return this.view.from + ((x - this.left) / (this.wide - this.left)) * (this.view.to - this.view.from);
  }

  drawAxis(pen) {
    const muted = colour("muted"), rule = colour("line");
    const fonts = getComputedStyle(document.body).fontFamily;
    pen.font = `11px ${fonts}`;
    this.fonts = fonts;
    const span = this.view.to - this.view.from;
    const room = Math.max(2, Math.floor((this.wide - this.left) / 90));
    const step = this.apart(span / room);
    pen.textBaseline = "middle";
    for (let i = Math.ceil(this.view.from / step); i * step <= this.view.to; i += 1) {
      const x = this.x(i * step);
      const text = this.tell(Number((i * step).toPrecision(9)));
      const half = pen.measureText(text).width / 2;
      pen.fillStyle = muted;
      pen.textAlign = "center";
      if (x + half <= this.wide && x - half >= this.left - 30) pen.fillText(text, x, 9);
      pen.fillStyle = rule;
      pen.fillRect(x, 17, 1, 5);
    }
  }

  say() {
    const told = this.canvas.closest("figure").querySelector("output");
    const { from, to, whole } = this.view;
    if (told) told.textContent = to - from >= whole * 0.9999
      ? `${this.all}, ${this.tell(whole)}`
      : `${this.tell(from)} to ${this.tell(to)} of ${this.tell(whole)}`;
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
