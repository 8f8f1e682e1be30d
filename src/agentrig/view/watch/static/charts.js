// Curves that can be pointed at: the values of a step, a click leads to its traces, dragging zooms.

import { show } from "./watch.js";

const SVG = "http://www.w3.org/2000/svg";

class Chart {
  constructor(element) {
    this.element = element;
    this.svg = element.querySelector("svg");
    this.output = element.closest("figure").querySelector("output");
    this.runs = JSON.parse(element.dataset.runs);
    Object.assign(this, JSON.parse(element.dataset.points));
    this.points = this.lines.flatMap((line) => line.points.map(([step, x, y, value]) => ({ line, step, x, y, value })));
    this.points.sort((a, b) => a.x - b.x);
    this.seen = null;
    this.began = null;
    element.addEventListener("pointermove", (event) => this.move(event));
    element.addEventListener("pointerdown", (event) => { if (event.button === 0) this.began = this.at(event).x; });
    element.addEventListener("pointerup", (event) => this.up(event));
    element.addEventListener("click", (event) => this.click(event));
    element.addEventListener("pointerleave", () => { this.began = null; this.clear(); });
    element.addEventListener("dblclick", reset);
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("blur", () => this.clear());
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  }

  value(x) {
    const inside = Math.min(this.right, Math.max(this.left, x));
    return this.from + ((inside - this.left) / (this.right - this.left)) * (this.to - this.from);
  }

  draw(name, attributes, kind) {
    let drawn = this.svg.querySelector(`.${kind}`);
    if (!drawn) {
      drawn = document.createElementNS(SVG, name);
      drawn.setAttribute("class", kind);
      this.svg.append(drawn);
    }
    for (const [key, value] of Object.entries(attributes)) drawn.setAttribute(key, value);
  }

  clear() {
    this.seen = null;
    for (const drawn of this.svg.querySelectorAll(".cursor, .seen, .chosen")) drawn.remove();
  }

  // Says the values of all lines at a point, and marks it.
  point(found) {
    this.seen = found;
    const beside = this.lines.map((line) => [line, line.points.find(([, x]) => Math.abs(x - found.x) < 0.6)]);
    const values = beside.filter(([, point]) => point).map(([line, point]) => `${line.label} ${point[3]}`);
    const link = document.createElement("a");
    link.href = this.address(found);
    link.textContent = `traces of step ${found.step}`;
    const where = this.of > 1 ? `about step ${found.step} (means of ${this.of})` : `step ${found.step}`;
    this.output.replaceChildren(`${where}: ${[...new Set(values)].join(", ")} · `, link);
    this.draw("line", { x1: found.x, x2: found.x, y1: 0, y2: this.bottom }, "cursor");
    this.draw("circle", { cx: found.x, cy: found.y, r: 6 }, "seen");
  }

  address(found) {
    return `${this.runs[found.line.run]}/traces?mode=${found.line.mode}&step=${found.step}`;
  }

  move(event) {
    const { x, y } = this.at(event);
    if (this.began !== null && Math.abs(x - this.began) > 8) {
      const [low, high] = [Math.min(x, this.began), Math.max(x, this.began)];
      this.draw("rect", { x: low, width: high - low, y: 0, height: this.bottom }, "chosen");
      return;
    }
    const far = (point) => 4 * Math.abs(point.x - x) + Math.abs(point.y - y);
    this.point(this.points.reduce((best, point) => (far(point) < far(best) ? point : best)));
  }

  up(event) {
    const { x } = this.at(event), began = this.began;
    this.began = null;
    this.dragged = began !== null && Math.abs(x - began) > 8;
    if (this.dragged) zoom(this.value(Math.min(x, began)), this.value(Math.max(x, began)));
  }

  // A second click may follow: both are a double click, which shows the whole axis. A finger uses the link below.
  click(event) {
    clearTimeout(this.leaving);
    if (this.dragged || event.detail > 1 || event.pointerType === "touch" || !this.seen) return;
    const address = this.address(this.seen);
    this.leaving = setTimeout(() => { location.href = address; }, 300);
  }

  key(event) {
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (way) {
      const trained = this.points.filter((point) => point.line.mode === "train");
      const points = trained.length ? trained : this.points;
      const on = points.filter((point) => this.seen === null || (point.x - this.seen.x) * way > 0.6);
      const next = way > 0 ? on[0] : on.at(-1);
      if (next) this.point(next);
    } else if (event.key === "Enter" && this.seen) location.href = this.address(this.seen);
    else if (event.key === "+" || event.key === "-") {
      const middle = this.seen ? this.value(this.seen.x) : (this.from + this.to) / 2;
      const half = (this.to - this.from) * (event.key === "+" ? 0.25 : 1);
      zoom(middle - half, middle + half);
    } else if (event.key === "0" || event.key === "Escape") reset();
    else return;
    event.preventDefault();
  }
}

const form = () => document.getElementById("axes");

function query(changed = {}) {
  const asked = new URLSearchParams([...new FormData(form())].filter(([, value]) => value !== ""));
  for (const [name, value] of Object.entries(changed)) value === "" ? asked.delete(name) : asked.set(name, value);
  return asked;
}

function zoom(from, to) {
  const digits = Math.max(0, 3 - Math.floor(Math.log10(to - from)));
  if (to > from && digits < 12) show(query({ from: Number(from.toFixed(digits)), to: Number(to.toFixed(digits)) }));
}

function reset() {
  const asked = new URLSearchParams(location.search);
  if (asked.has("from") || asked.has("to")) show(query({ from: "", to: "" }));
}

function charts() {
  for (const element of document.querySelectorAll(".chart")) if (!element.chart) element.chart = new Chart(element);
}

document.addEventListener("refreshed", charts);
document.addEventListener("click", (event) => { if (event.target.closest("button[data-reset]")) reset(); });
document.addEventListener("submit", (event) => {
  if (event.target !== form()) return;
  event.preventDefault();
  show(query());
});
document.addEventListener("change", (event) => {
  if (!event.target.closest("#axes") || !event.target.matches("select, [type=checkbox]")) return;
  // Another x axis has other numbers.
  show(query(event.target.name === "x" ? { from: "", to: "" } : {}));
});
charts();
