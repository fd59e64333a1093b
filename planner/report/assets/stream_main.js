const told = JSON.parse(document.getElementById("streams").textContent);
const view = new View(told.streams[0].horizon);
const charts = [], gantts = [];

// Gaps become times in seconds, once a stream is looked at.
function decode(stream) {
  if (stream.decoded) return stream;
  const unit = stream.horizon / told.ticks;
  const scaled = (ticks) => Float64Array.from(ticks, (tick) => (tick < 0 ? -1 : tick * unit));
  for (const run of stream.runs) {
    for (const curve of [run.rate, run.use]) curve.time = scaled(summed(curve.time));
    const { jobs } = run;
    jobs.number = summed(jobs.number);
    jobs.arrival = scaled(summed(jobs.arrival));
    for (const name of ["allowed", "waited", "ran"]) jobs[name] = scaled(jobs[name]);
    jobs.start = jobs.arrival.map((time, i) => time + Math.max(jobs.waited[i], 0));
    jobs.ran = Array.from(jobs.ran);
  }
  stream.decoded = true;
  return stream;
}

for (const canvas of document.querySelectorAll("canvas[data-chart]")) {
  const { chart, run } = canvas.dataset;
  let made;
  if (chart === "causes") made = new CausesChart(canvas, view, told.outcomes);
  else if (chart === "gantt") {
    made = new GanttChart(canvas, view, told, canvas.closest("figure").querySelector("[data-legend]"));
    gantts.push(made);
  } else made = new LinesChart(canvas, view, chart, told.usable);
  made.place = run === undefined ? null : Number(run);
  charts.push(made);
}

const list = new JobsTable(told.outcomes, told.policies);

function show(stream) {
  const { runs } = decode(stream);
  for (const chart of charts) chart.runs = chart.place === null ? runs : runs.slice(chart.place, chart.place + 1);
  for (const pane of document.querySelectorAll("[data-pane]")) {
    const run = runs[Number(pane.dataset.pane)];
    pane.hidden = !run;
    const head = pane.querySelector("[data-name]");
    if (run && head) head.textContent = run.name;
  }
  view.whole = stream.horizon;
  view.fit();
  for (const gantt of gantts) gantt.showLegend();
  list.show(runs);
}

const choose = document.getElementById("stream");
if (choose) choose.addEventListener("change", () => show(told.streams[Number(choose.value)]));

for (const button of document.querySelectorAll("[data-colour]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-colour]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    for (const gantt of gantts) {
      gantt.by = button.dataset.colour;
      gantt.draw();
      gantt.showLegend();
    }
  });
}

const ACTS = {
  closer: () => view.zoom(1.6), farther: () => view.zoom(1 / 1.6), whole: () => view.fit(),
  left: () => view.pan(-0.3), right: () => view.pan(0.3),
};
for (const button of document.querySelectorAll("button[data-act]")) {
  button.addEventListener("click", () => ACTS[button.dataset.act]());
}
show(told.streams[0]);
