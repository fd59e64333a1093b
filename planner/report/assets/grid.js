const UNUSED = "not used";

// Devices in their hosts, coloured by where they stand along one axis.
class GridChart {
  constructor(canvas, plan, legend) {
    Object.assign(this, { canvas, plan, legend, cursor: 0 });
    this.decode(plan.grid);
    this.axis = this.axes()[0];
    this.listen();
    new ResizeObserver(() => this.queue()).observe(canvas.parentElement);
    this.draw();
  }

  decode(grid) {
    const spread = (runs, step) => runs.flatMap(([first, count]) =>
      Array.from({ length: count }, (_, i) => (first < 0 ? first : first + step * i)));
    this.ranks = spread(grid.ranks, 1);
    this.types = spread(grid.typeRuns, 0);
    this.hosts = [];
    let device = 0;
    for (const size of spread(grid.hosts, 0)) {
      this.hosts.push({ first: device, size });
      device += size;
    }
    this.strides = {};
    let stride = 1;
    for (const [axis, degree] of Object.entries(grid.degrees).reverse()) {
      this.strides[axis] = stride;
      stride *= degree;
    }
  }

  // Axes that tell devices apart, the pipeline first.
  axes() {
    const found = Object.entries(this.plan.grid.degrees).filter(([, degree]) => degree > 1).map(([axis]) => axis);
    if (this.plan.grid.types.length > 1) found.push("device type");
    return found.length ? found : ["pp"];
  }

  count() {
    return this.axis === "device type" ? this.plan.grid.types.length : this.plan.grid.degrees[this.axis];
  }

  // Where a device stands along the axis; -1 if the plan leaves it out.
  value(device, axis = this.axis) {
    if (axis === "device type") return this.types[device];
    const rank = this.ranks[device];
    return rank < 0 ? -1 : Math.floor(rank / this.strides[axis]) % this.plan.grid.degrees[axis];
  }

  queue() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  columns(size) {
    if (size <= 4) return size;
    const fits = [];
    for (let i = 1; i <= size; i += 1) if (size % i === 0 && i >= size / i) fits.push(i);
    const found = fits.find((i) => i <= (2 * size) / i + 1 && i >= 2) || fits[0];
    return found > 3 * (size / found) + 2 ? Math.ceil(Math.sqrt(2 * size)) : found;
  }

  layout(width) {
    const largest = this.hosts.reduce((a, b) => (b.size > a.size ? b : a));
    const columns = this.columns(largest.size);
    const lines = Math.ceil(largest.size / columns);
    const most = width < 520 ? 640 : 420;
    for (let cell = 46; cell >= 4; cell -= cell > 24 ? 2 : 1) {
      const gap = cell >= 14 ? 2 : 1, apart = cell >= 14 ? 12 : cell >= 8 ? 6 : 3;
      const head = cell >= 18 ? 17 : 0;
      const wide = columns * (cell + gap) - gap, high = lines * (cell + gap) - gap + head;
      const across = Math.max(1, Math.floor((width + apart) / (wide + apart)));
      const height = Math.ceil(this.hosts.length / across) * (high + apart) - apart;
      Object.assign(this, { cell, gap, apart, head, blockWide: wide, blockHigh: high, across, height, perRow: columns });
      if (wide <= width && height <= most) return;
    }
  }

  corner(hostIndex) {
    return [
      (hostIndex % this.across) * (this.blockWide + this.apart),
      Math.floor(hostIndex / this.across) * (this.blockHigh + this.apart),
    ];
  }

  place(device) {
    const index = this.hostOf(device), host = this.hosts[index];
    const [x, y] = this.corner(index), local = device - host.first, step = this.cell + this.gap;
    return [x + (local % this.perRow) * step, y + this.head + Math.floor(local / this.perRow) * step];
  }

  hostOf(device) {
    let low = 0, high = this.hosts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.hosts[middle].first <= device) low = middle; else high = middle - 1;
    }
    return low;
  }

  draw(width) {
    this.layout(width || this.canvas.parentElement.clientWidth);
    const { pen } = prepare(this.canvas, this.height + 2, width);
    const fonts = getComputedStyle(document.body).fontFamily, count = this.count();
    const fills = Array.from({ length: count }, (_, i) => rampColour(i, count));
    const inks = fills.map(inkOn);
    const unused = pattern(pen, colour("idle"), colour("idle-mark"), "rising");
    const edge = colour("edge");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    this.hosts.forEach((host, index) => {
      const [x, y] = this.corner(index);
      if (this.head) {
        pen.font = `11px ${fonts}`;
        pen.fillStyle = colour("muted");
        pen.textAlign = "left";
        pen.fillText(`host ${index}`, x, y + 7, this.blockWide);
      }
      const same = this.shared(host);
      if (same >= 0 && this.cell < 18) {
        this.writeHost(pen, fonts, fills[same], inks[same], same, x, y, host.size);
        return;
      }
      for (let i = 0; i < host.size; i += 1) {
        const device = host.first + i, value = this.value(device), [cx, cy] = this.place(device);
        pen.fillStyle = value < 0 ? unused : fills[value];
        pen.fillRect(cx, cy, this.cell, this.cell);
        pen.strokeStyle = edge;
        pen.strokeRect(cx + 0.5, cy + 0.5, this.cell - 1, this.cell - 1);
        if (value >= 0 && this.cell >= 18) this.write(pen, fonts, inks[value], value, cx, cy);
      }
    });
    this.listLegend(fills);
  }

  write(pen, fonts, ink, value, x, y) {
    const text = this.axis === "device type" ? "" : String(value), big = this.cell >= 38;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.font = `${big ? "600 15" : "11"}px ${fonts}`;
    pen.fillText(text, x + this.cell / 2, y + this.cell / 2 + (big ? -5 : 1), this.cell - 2);
    if (!big) return;
    const at = this.deviceAt(x + 1, y + 1);
    pen.font = `10px ${fonts}`;
    pen.fillText(`r${this.ranks[at]}`, x + this.cell / 2, y + this.cell / 2 + 11, this.cell - 2);
  }

  // Where all devices of a host stand along the axis; -1 if they differ.
  shared(host) {
    const value = this.value(host.first);
    for (let i = 1; i < host.size; i += 1) if (this.value(host.first + i) !== value) return -1;
    return value;
  }

  // A host whose devices all stand at the same place: one block, one number.
  writeHost(pen, fonts, fill, ink, value, x, y, size) {
    const lines = Math.ceil(size / this.perRow), high = lines * (this.cell + this.gap) - this.gap;
    pen.fillStyle = fill;
    pen.fillRect(x, y + this.head, this.blockWide, high);
    pen.strokeStyle = colour("edge");
    pen.strokeRect(x + 0.5, y + this.head + 0.5, this.blockWide - 1, high - 1);
    if (this.axis === "device type" || high < 10) return;
    pen.font = `600 ${Math.min(12, high - 2)}px ${fonts}`;
    pen.textAlign = "center";
    if (pen.measureText(String(value)).width + 2 > this.blockWide) return;
    pen.fillStyle = ink;
    pen.fillText(String(value), x + this.blockWide / 2, y + this.head + high / 2 + 0.5);
  }

  listLegend(fills) {
    const names = this.axis === "device type" ? this.plan.grid.types : fills.map((_, i) => `${this.axis} ${i}`);
    const entry = (text, css, fill) => {
      const item = document.createElement("li"), mark = document.createElement("span");
      mark.className = css;
      if (fill) mark.style.setProperty("--c", fill);
      item.append(mark, document.createTextNode(text));
      return item;
    };
    const items = fills.length <= 12
      ? names.map((text, i) => entry(text, "swatch", fills[i]))
      : [entry(`${names[0]} to ${names[names.length - 1]}`, "ramp")];
    if (this.ranks.some((rank) => rank < 0)) items.push(entry(UNUSED, "swatch k-bubble"));
    this.legend.replaceChildren(...items);
  }

  deviceAt(x, y) {
    const column = Math.floor(x / (this.blockWide + this.apart)), line = Math.floor(y / (this.blockHigh + this.apart));
    const index = line * this.across + column, host = this.hosts[index];
    if (!host || column >= this.across || column < 0 || line < 0) return -1;
    const [left, top] = this.corner(index), step = this.cell + this.gap;
    const across = Math.floor((x - left) / step), down = Math.floor((y - top - this.head) / step);
    const local = down * this.perRow + across;
    return across >= 0 && across < this.perRow && down >= 0 && local < host.size ? host.first + local : -1;
  }

  words(device) {
    const rank = this.ranks[device], type = this.plan.grid.types[this.types[device]];
    const where = `device ${device}, host ${this.hostOf(device)}${type ? `, ${type}` : ""}`;
    if (rank < 0) return `${UNUSED}\n${where}`;
    const lines = [`rank ${rank}`, where];
    const axes = Object.entries(this.plan.grid.degrees).filter(([, degree]) => degree > 1);
    if (axes.length) lines.push(axes.map(([axis]) => `${axis} ${this.value(device, axis)}`).join(" · "));
    const at = this.value(device, "pp");
    this.plan.stages.forEach((stage, index) => {
      if (stage.rank === at) lines.push(`stage ${index}: ${stage.units[0]} … ${stage.units[1]}${stage.recompute === "none" ? "" : `, recompute ${stage.recompute}`}`);
    });
    return (lines.length > 9 ? [...lines.slice(0, 8), `and ${lines.length - 8} more stages`] : lines).join("\n");
  }

  listen() {
    const { canvas } = this;
    const over = (event) => {
      const box = canvas.getBoundingClientRect(), scale = canvas.clientWidth ? box.width / (canvas.width / Math.max(window.devicePixelRatio || 1, 1)) : 1;
      const device = this.deviceAt((event.clientX - box.left) / scale, (event.clientY - box.top) / scale);
      if (device < 0) return hideTip();
      this.cursor = device;
      return showTip(this.words(device), event.clientX, event.clientY);
    };
    for (const name of ["pointermove", "pointerdown"]) canvas.addEventListener(name, over);
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => { hideTip(); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.perRow, ArrowDown: this.perRow }[event.key];
      if (!step) return;
      event.preventDefault();
      this.cursor = Math.min(Math.max(this.cursor + step, 0), this.ranks.length - 1);
      const [x, y] = this.place(this.cursor), box = canvas.getBoundingClientRect();
      this.draw();
      const pen = canvas.getContext("2d");
      pen.strokeStyle = colour("accent");
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, this.cell + 2, this.cell + 2);
      showTip(this.words(this.cursor), box.left + x, box.top + y);
    });
  }
}
