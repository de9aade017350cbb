"use strict";

const [ABSENT, HOLE, FILLED, FULL, KEPT, AHEAD, DRAFT] = [0, 1, 2, 3, 4, 5, 6];
const GIVEN = -1; // in place of a forward: fixed tokens of a text with holes

/** Steps as they arrive, and the state of each answer slot in each forward of the target. */
class Trace {
  steps = [];     // all steps; each with `row`, the target forward that it belongs to
  forwards = [];  // steps of the target, one row of the timeline each
  prompt = null;  // tokens of the prompt
  cloze = false;  // whether the prompt is a text with holes
  holed = [];     // for each slot of the text, the last forward in which it was a hole
  kept = 0;       // committed tokens
  canvas = [];    // texts after the committed tokens, null for a hole
  fills = [];     // for each of them, the forward that filled it

  push(steps) {
    for (const step of steps) {
      const target = step.model === "target";
      // A draft runs before the target forward it belongs to, a verifier after it.
      const row = target || step.model === "draft" ? this.forwards.length : this.forwards.length - 1;
      if (target) this.forwards.push(step);
      this.steps.push(Object.assign(step, { row: Math.max(row, 0) }));
      if (target) for (const [begin, end] of step.holes) for (let slot = begin; slot < end; slot++) this.holed[slot] = row;
      for (let count = 0; count < step.committed; count++) {
        const hole = this.holed[this.first + this.kept++];
        this.fills.push(Math.min(hole ?? (this.cloze ? GIVEN : step.row), step.row));
      }
    }
  }

  /** Prompt tokens; estimated from the first holes or rows until the server reports them. */
  get first() {
    const [step] = this.steps;
    return this.prompt ?? (this.forwards[0]?.holes[0]?.[0] ?? (step ? step.start + step.rows : 0));
  }

  /** Answer slots that were fed or committed so far. */
  get slots() {
    return Math.max(this.kept, ...this.forwards.map((step) => step.start + step.rows - this.first), 0);
  }

  /** Ends of blocks as answer slots; empty if rows are not fed in blocks. */
  get edges() {
    const ends = new Set();
    for (const { start, pattern } of this.forwards) {
      if (!Array.isArray(pattern)) continue;
      pattern.reduce((end, length) => { ends.add(end + length); return end + length; }, start - this.first);
    }
    return [...ends].filter((end) => end > 0);
  }

  /** Committed tokens at the end of each forward. */
  fronts() {
    const fronts = new Array(this.forwards.length).fill(0);
    let sum = 0;
    for (const step of this.steps) {
      sum += step.committed;
      fronts[step.row] = sum;
    }
    return fronts;
  }

  /** States of the slots for each forward: those of `outpace.api.trace.slot_states`, and two more for
   * tokens fed before holes and for rejected drafts. */
  states() {
    const { forwards, first, kept, slots } = this;
    const rows = forwards.map(() => new Uint8Array(slots));
    const filled = new Int32Array(slots).fill(forwards.length);
    forwards.forEach((step, row) => {
      for (const [begin, end] of step.holes) {
        rows[row].fill(HOLE, Math.max(begin - first, 0), end - first);
        filled.fill(row, Math.max(begin - first, 0), end - first);
      }
    });
    this.fills.forEach((row, slot) => { filled[slot] = row; });
    const token = new Uint8Array(slots).fill(1, 0, kept), there = token.slice();
    // Slots filled by the last forward appear only in the canvas.
    this.canvas.forEach((text, index) => { if (text !== null && kept + index < slots) token[kept + index] = 1; });
    for (let row = forwards.length - 1; row >= 0; row--) {
      const step = forwards[row], states = rows[row];
      const low = Math.max(step.start - first, 0), high = Math.max(step.start + step.rows - first, 0);
      let hole = false;
      there.fill(1, low, high);
      for (let slot = 0; slot < slots; slot++) {
        if (slot >= low && slot < high && states[slot] !== HOLE) token[slot] = 1;
        if (slot < low) states[slot] = KEPT;
        else if (token[slot] && filled[slot] === row) { states[slot] = FILLED; hole = true; }
        else if (token[slot] && filled[slot] < row && there[slot])
          states[slot] = hole && slot < high && step.pattern === "causal" ? AHEAD : FULL;
        else if (states[slot] === HOLE) hole = true;
        else if (slot >= low && slot < high) states[slot] = DRAFT;
      }
    }
    return rows;
  }

  /** Describe a forward: a title, and details. */
  describe(row) {
    const step = this.forwards[row], { first } = this;
    if (!step) return null;
    const others = this.steps.filter((other) => other.row === row && other !== step);
    const kept = others.reduce((sum, other) => sum + other.committed, step.committed);
    const holes = step.holes.reduce((sum, [begin, end]) => sum + end - begin, 0);
    const prompt = Math.min(Math.max(first - step.start, 0), step.rows);
    const low = Math.max(step.start - first, 0), high = step.start + step.rows - first - 1;
    const parts = [`target fed ${plural(step.rows, "row")}: ` + [
      prompt ? `${prompt} of the prompt` : "", high >= low ? `answer slots ${low}–${high}` : "",
    ].filter(Boolean).join(", ")];
    if (holes) parts.push(plural(holes, "hole"));
    if (Array.isArray(step.pattern)) parts.push(`blocks of ${step.pattern.join(", ")}`);
    parts.push(duration(step.seconds));
    for (const role of new Set(others.map((other) => other.model))) {
      const passes = others.filter((other) => other.model === role);
      const total = (name) => passes.reduce((sum, pass) => sum + pass[name], 0);
      const runs = passes.length > 1 ? `${plural(passes.length, "pass")}, ` : "";
      parts.push(`${role}: ${runs}${plural(total("rows"), "row")}, ${duration(total("seconds"))}`);
    }
    const filled = this.fills.reduce((sum, fill) => sum + (fill === row), 0);
    const did = filled === kept ? "" : `filled ${plural(filled, "slot")} of the answer and `;
    return [`Forward ${row + 1} ${did}committed ${plural(kept, "token")}`, ` · ${parts.join(" · ")}`];
  }
}
