"use strict";

const CELLS = [
  [HOLE, "hole", "hole"], [FILLED, "filled", "filled by this forward"], [FULL, "full", "filled before"],
  [AHEAD, "ahead", "token fed before the holes"], [DRAFT, "draft", "rejected draft"], [KEPT, "kept", "cached, not fed"],
];
const LEFT = 46, BOTTOM = 22, PROMPT = 7;

/** Slots by forwards on a canvas: one row per forward of the target. */
class Timeline {
  constructor(figure, choose) {
    this.figure = figure;
    this.canvas = $("canvas", figure);
    this.legend = $(".legend", figure);
    this.choose = choose;
    this.swatches = new Map();
    for (const [state, name, label] of CELLS) this.explain(state, name, label);
    this.explain("edge", "edge", "end of a block");
    this.explain("front", "front", "committed up to here");
    this.legend.append(make("li", {}, "P: the prompt"));
    this.canvas.addEventListener("pointermove", (event) => choose(this.rowAt(event)));
    this.canvas.addEventListener("click", (event) => choose(this.rowAt(event)));
    this.canvas.addEventListener("pointerleave", () => choose(null));
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
      if (!move || !this.trace) return;
      event.preventDefault();
      choose(Math.min(Math.max((this.chosen ?? -1) + move, 0), this.trace.forwards.length - 1));
    });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  explain(state, name, label) {
    const swatch = make("i", { className: `swatch-${name}` });
    this.swatches.set(state, swatch);
    this.legend.append(make("li", {}, swatch, label));
  }

  /** Show a trace on a scale of slots and forwards, which both lanes of a race share. */
  show(trace, scale, chosen) {
    Object.assign(this, { trace, scale, chosen });
    this.draw();
  }

  rowAt(event) {
    const row = Math.floor((event.clientY - this.canvas.getBoundingClientRect().top) / this.height);
    return this.trace && row >= 0 && row < this.trace.forwards.length ? row : null;
  }

  draw() {
    const { trace } = this;
    this.figure.hidden = !trace?.forwards.length;
    if (this.figure.hidden) return;
    const began = performance.now();
    const width = this.canvas.clientWidth, ratio = devicePixelRatio || 1;
    this.height = Math.min(Math.max(460 / this.scale.forwards, 3), 15);
    const tall = trace.forwards.length * this.height + BOTTOM;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(tall * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.cell = (width - LEFT - PROMPT - 3) / this.scale.slots;
    this.snap = (value) => Math.round(value * ratio) / ratio;
    const states = trace.states();
    const colours = new Map([...this.swatches].map(([state, swatch]) => [state, getComputedStyle(swatch).backgroundColor]));
    const style = getComputedStyle(this.canvas);
    this.drawCells(pen, states, colours);
    this.drawEdges(pen, style.color);
    this.drawFront(pen, style.color);
    this.drawAxes(pen, getComputedStyle(this.legend).color, style);
    this.drawHues(pen, states);
    this.drawChosen(pen, style.color, width);
    this.name(states);
    this.cost = performance.now() - began;
  }

  x(slot) { return this.snap(LEFT + PROMPT + 3 + slot * this.cell); }
  y(row) { return this.snap(row * this.height); }

  /** Draw runs of equal state as one rectangle, with a gap between rows if there is room. */
  drawCells(pen, states, colours) {
    const gap = this.height >= 8 ? 1 : 0;
    states.forEach((row, index) => {
      const top = this.y(index), high = this.y(index + 1) - top - gap;
      pen.fillStyle = colours.get(this.trace.forwards[index].start < this.trace.first ? FULL : KEPT);
      pen.fillRect(LEFT, top, PROMPT, high);
      for (let begin = 0, end = 0; begin < row.length; begin = end) {
        while (end < row.length && row[end] === row[begin]) end++;
        if (row[begin] === ABSENT) continue;
        pen.fillStyle = colours.get(row[begin]);
        pen.fillRect(this.x(begin), top, this.x(end) - this.x(begin), high);
      }
    });
  }

  drawEdges(pen, ink) {
    pen.fillStyle = ink;
    for (const edge of this.trace.edges) pen.fillRect(this.x(edge) - 0.5, 0, 1, this.y(this.trace.forwards.length));
  }

  /** Draw a staircase of the committed text at the end of each forward. */
  drawFront(pen, ink) {
    pen.beginPath();
    pen.moveTo(this.x(0), 0);
    this.trace.fronts().forEach((front, row) => {
      pen.lineTo(this.x(front), this.y(row));
      pen.lineTo(this.x(front), this.y(row + 1));
    });
    pen.strokeStyle = ink;
    pen.lineWidth = this.height < 6 ? 1 : 2;
    pen.stroke();
  }

  drawAxes(pen, dim, style) {
    const count = this.trace.forwards.length, bottom = this.y(count);
    pen.font = `11px ${style.fontFamily}`;
    pen.fillStyle = dim;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const tall = nice(14 / this.height);
    for (let row = tall === 1 ? 0 : tall - 1; row < count; row += tall) pen.fillText(row + 1, LEFT - 15, this.y(row) + this.height / 2);
    pen.textBaseline = "top";
    pen.textAlign = "center";
    pen.fillText("P", LEFT + PROMPT / 2, bottom + 6);
    const wide = nice(44 / this.cell);
    for (let slot = 0; slot <= this.scale.slots; slot += wide) {
      pen.fillRect(this.x(slot), bottom, 1, 3);
      if (slot + wide / 3 <= this.scale.slots) pen.fillText(slot, this.x(slot) + (slot ? 0 : 4), bottom + 6);
    }
  }

  /** Draw the text colour of each forward next to its row. */
  drawHues(pen, states) {
    const hues = [...$("#hues").children].map((probe) => getComputedStyle(probe).color);
    states.forEach((row, index) => {
      if (!row.includes(FILLED)) return;
      pen.fillStyle = hues[index % hues.length];
      pen.fillRect(LEFT - 10, this.y(index), 6, Math.max(this.height - 1, 2));
    });
  }

  drawChosen(pen, ink, width) {
    if (this.chosen === null || this.chosen === undefined) return;
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(LEFT - 12, this.y(this.chosen) + 0.5, width - LEFT + 11, this.height - 1);
  }

  /** Set the description, and a legend of the states that occur. */
  name(states) {
    const there = new Set(states.flatMap((row) => [...new Set(row)]));
    if (this.trace.edges.length) there.add("edge");
    there.add("front");
    for (const [state, swatch] of this.swatches) swatch.parentElement.hidden = !there.has(state);
    const counts = `${plural(this.trace.forwards.length, "forward")} by ${plural(this.trace.slots, "slot")}`;
    this.canvas.setAttribute("aria-label", `Timeline, ${counts}. Arrow keys choose a forward.`);
  }
}

/** The smallest of 1, 2, 5, 10, 20, … that is at least this. */
function nice(least) {
  let step = 1;
  for (let index = 0; step < least; index++) step *= index % 3 === 1 ? 2.5 : 2;
  return step;
}
