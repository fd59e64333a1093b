const plans = JSON.parse(document.getElementById("plans").textContent);
const timed = plans.filter((plan) => plan.timeline);
const view = timed.length ? new View(Math.max(...timed.map((plan) => plan.timeline.step))) : null;
const charts = [];

plans.forEach((plan, index) => {
  const grid = document.querySelector(`canvas.grid[data-plan="${index}"]`);
  if (grid) {
    const figure = grid.closest("figure");
    const chart = new GridChart(grid, plan, figure.querySelector(".legend"));
    const tools = figure.querySelector(".tools");
    for (const axis of chart.axes()) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = axis;
      button.setAttribute("aria-pressed", String(axis === chart.axis));
      button.addEventListener("click", () => {
        chart.axis = axis;
        for (const other of tools.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
        chart.draw();
      });
      tools.append(button);
    }
    charts.push(chart);
  }
  const canvas = document.querySelector(`canvas.timeline[data-plan="${index}"]`);
  if (canvas && plan.timeline) charts.push(new TimelineChart(canvas, plan, view));
});

const ACTS = {
  closer: () => view.zoom(1.6), farther: () => view.zoom(1 / 1.6), whole: () => view.fit(),
  left: () => view.pan(-0.3), right: () => view.pan(0.3),
};
for (const button of document.querySelectorAll("button[data-act]")) {
  button.addEventListener("click", () => ACTS[button.dataset.act]());
}
