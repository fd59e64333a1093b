const PAGE = 50;

// The list of jobs: picked, sorted, a page at a time.
class JobsTable {
  constructor(outcomes, policies) {
    Object.assign(this, { outcomes, policies, page: 0, key: "number", down: false });
    this.body = document.querySelector("table.jobs tbody");
    this.heads = [...document.querySelectorAll("table.jobs [data-sort]")];
    this.picks = {};
    for (const select of document.querySelectorAll("[data-pick]")) {
      this.picks[select.dataset.pick] = select;
      select.addEventListener("change", () => { this.page = 0; this.draw(); });
    }
    for (const head of this.heads) head.addEventListener("click", () => this.sort(head.dataset.sort));
    for (const button of document.querySelectorAll("[data-page]")) {
      button.addEventListener("click", () => { this.page += Number(button.dataset.page); this.draw(); });
    }
  }

  show(runs) {
    this.runs = runs;
    const { run, model } = this.picks, first = runs[0];
    if (run) run.replaceChildren(...runs.map((one, i) => option(i, one.name)));
    const before = model.value;
    model.replaceChildren(option("", "all"), ...first.models.map((name, i) => option(i, name)));
    if (first.models[before] !== undefined) model.value = before;
    this.page = 0;
    this.draw();
  }

  sort(key) {
    this.down = this.key === key ? !this.down : false;
    this.key = key;
    this.page = 0;
    this.draw();
  }

  value(run, index) {
    const { jobs } = run;
    switch (this.key) {
      case "model": return run.models[jobs.model[index]];
      case "outcome": return this.outcomes[jobs.outcome[index]];
      case "plan": return run.plans[jobs.plan[index]] || "";
      case "held": return heldBy(run, jobs.set[index]);
      case "where": return jobs.set[index] < 0 ? -1 : run.sets[jobs.set[index]][0];
      default: return jobs[this.key][index];
    }
  }

  picked(run) {
    const { outcome, model } = this.picks, found = [];
    for (let i = 0; i < run.jobs.number.length; i += 1) {
      if (outcome.value !== "" && run.jobs.outcome[i] !== Number(outcome.value)) continue;
      if (model.value !== "" && run.jobs.model[i] !== Number(model.value)) continue;
      found.push(i);
    }
    const keys = new Map(found.map((i) => [i, this.value(run, i)])), way = this.down ? -1 : 1;
    const order = (a, b) => (a < b ? -way : a > b ? way : 0);
    return found.sort((a, b) => order(keys.get(a), keys.get(b)) || a - b);
  }

  draw() {
    const run = this.runs[this.picks.run ? Number(this.picks.run.value) : 0];
    const found = this.picked(run), pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const shown = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    this.body.replaceChildren(...shown.map((index) => this.line(run, index)));
    const told = run.jobs.number.length < run.all ? `, a sample of ${run.all.toLocaleString("en")}` : "";
    document.querySelector('[data-jobs="count"]').textContent =
      `${found.length.toLocaleString("en")} of ${run.jobs.number.length.toLocaleString("en")} jobs${told}`;
    document.querySelector('[data-jobs="page"]').textContent = `page ${this.page + 1} of ${pages}`;
    for (const button of document.querySelectorAll("[data-page]")) {
      button.disabled = Number(button.dataset.page) < 0 ? !this.page : this.page === pages - 1;
    }
    for (const head of this.heads) {
      const mine = head.dataset.sort === this.key;
      head.parentElement.setAttribute("aria-sort", mine ? (this.down ? "descending" : "ascending") : "none");
    }
  }

  line(run, index) {
    const { jobs } = run, outcome = this.outcomes[jobs.outcome[index]];
    const time = (value) => (value < 0 ? "" : clock(value));
    const cells = {
      number: `${jobs.number[index]}`, model: run.models[jobs.model[index]], outcome: called(outcome),
      arrival: clock(jobs.arrival[index]), allowed: clock(jobs.allowed[index]), waited: time(jobs.waited[index]),
      ran: time(jobs.ran[index]), asked: jobs.asked[index] ? `${jobs.asked[index]}` : "",
      held: jobs.set[index] < 0 ? "" : `${heldBy(run, jobs.set[index])}`,
      where: devicesOf(run, jobs.set[index]), plan: run.plans[jobs.plan[index]] || "",
    };
    const row = document.createElement("tr");
    for (const head of this.heads) {
      const key = head.dataset.sort, cell = document.createElement(key === "number" ? "th" : "td");
      if (key === "number") cell.scope = "row"; else cell.dataset.name = head.textContent;
      cell.className = head.parentElement.className;
      if (key === "outcome") {
        const mark = document.createElement("span");
        mark.className = `swatch o-${outcome}`;
        cell.append(mark, " ");
      }
      cell.append(cells[key]);
      if (!cells[key]) cell.replaceChildren();
      row.append(cell);
    }
    return row;
  }
}

function option(value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  return made;
}
