// Anything with a tip shows it when it is pointed at, tapped or reached by keyboard.
for (const element of document.querySelectorAll("[data-tip]")) {
  const show = (event) => {
    const box = element.getBoundingClientRect();
    showTip(element.dataset.tip, event.clientX || box.right, event.clientY || box.bottom);
  };
  for (const name of ["pointermove", "pointerdown", "focus"]) element.addEventListener(name, show);
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, hideTip);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// The button says what it switches to. Without a choice the system's counts.
const button = document.getElementById("theme"), root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
function redraw() {
  palette.clear();
  button.textContent = isDark() ? "Light" : "Dark";
  for (const chart of charts) chart.draw();
}
button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  redraw();
});
dark.addEventListener("change", redraw);

// Paper is white and about this wide in CSS pixels.
const PAPER = 700;
let before;
window.addEventListener("beforeprint", () => {
  before = root.dataset.theme;
  root.dataset.theme = "light";
  palette.clear();
  for (const chart of charts) chart.draw(chart.canvas.closest(".panes") ? PAPER / 2 - 12 : PAPER);
});
window.addEventListener("afterprint", () => {
  if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before;
  redraw();
});
button.textContent = isDark() ? "Light" : "Dark";
root.dataset.ready = "yes";
