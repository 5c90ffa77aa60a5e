// SVG line chart with the step on the x axis. It is redrawn when its points or its width change.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const MARGIN = { left: 52, right: 10, top: 12, bottom: 20 };

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Return a few round numbers that cover a range. */
export function ticks(least, most) {
  const span = most - least || Math.abs(most) || 1;
  const power = 10 ** Math.floor(Math.log10(span / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= 4);
  const found = [];
  for (let at = Math.floor(least / step); at <= Math.ceil(most / step); at += 1) found.push(at * step);
  return found;
}

export class Chart {
  /**
   * @param {string} title
   * @param {(value: number) => string} format formatter for values
   * @param {{zero?: boolean}} options zero: whether the y axis starts at 0
   */
  constructor(title, format, { zero = false } = {}) {
    this.title = title;
    this.format = format;
    this.zero = zero;
    this.points = [];
    this.svg = node("svg", { class: "chart", role: "img" });
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.textContent = "no data yet";
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    this.figure = document.createElement("figure");
    this.figure.append(caption, this.svg, this.empty);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.figure);
  }

  /** Show points, given as [step, value]. Points with values that are not finite become gaps. */
  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const known = this.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
    this.svg.toggleAttribute("hidden", known.length < 2);
    this.empty.hidden = known.length >= 2;
    if (known.length < 2 || this.width < 100) return;
    const values = known.map(([, y]) => y);
    const marks = ticks(this.zero ? Math.min(0, ...values) : Math.min(...values), Math.max(...values));
    const [low, high] = [marks[0], marks[marks.length - 1]];
    const [first, last] = [known[0][0], known[known.length - 1][0]];
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const across = (x) => MARGIN.left + ((x - first) / (last - first || 1)) * (right - MARGIN.left);
    const up = (y) => bottom - ((y - low) / (high - low || 1)) * (bottom - MARGIN.top);
    const drawn = [];
    for (const mark of marks) {
      const y = up(mark).toFixed(1);
      drawn.push(node("line", { class: "rule", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      drawn.push(node("text", { x: MARGIN.left - 7, y: Number(y) + 4, "text-anchor": "end" }, this.format(mark)));
    }
    const step = (x) => `step ${Math.round(x).toLocaleString("en")}`;
    drawn.push(node("text", { x: MARGIN.left, y: HEIGHT - 4 }, step(first)));
    drawn.push(node("text", { x: right, y: HEIGHT - 4, "text-anchor": "end" }, step(last)));
    let path = "";
    let pen = "M";
    for (const [x, y] of this.points) {
      if (Number.isFinite(x) && Number.isFinite(y)) {
        path += `${pen}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
        pen = "L";
      } else pen = "M";
    }
    const [, value] = known[known.length - 1];
    drawn.push(node("path", { class: "curve", d: path }));
    drawn.push(node("circle", { class: "now", cx: across(last).toFixed(1), cy: up(value).toFixed(1), r: 3.5 }));
    this.svg.replaceChildren(...drawn);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute(
      "aria-label",
      `${this.title}: ${this.format(values[0])} at ${step(first)}, ${this.format(value)} at ${step(last)}, ` +
        `lowest ${this.format(Math.min(...values))}, highest ${this.format(Math.max(...values))}`,
    );
  }
}
