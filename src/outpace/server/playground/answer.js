"use strict";

/** Kinds of parts, by their element. */
const PARTS = {
  /** Thoughts are open until the answer begins. */
  thoughts() {
    const plain = make("div", { className: "plain-text" });
    return { plain, element: make("details", { className: "thoughts", open: true }, make("summary", {}, "Thinking"), plain) };
  },
  text() {
    const plain = make("span", { className: "plain-text" }), rendered = make("div", { className: "rendered" });
    return { plain, rendered, element: plain, render: (text) => renderMarkdown(text, rendered) };
  },
  call({ name }) {
    const plain = make("div", { className: "plain-text" }), rendered = make("pre", { tabIndex: 0, role: "group", ariaLabel: `Arguments of ${name}` });
    const element = make("section", { className: "call" }, make("p", {}, "Call of ", make("b", {}, name)), plain);
    return { plain, rendered, element, render: (text) => { rendered.textContent = layOut(text); } };
  },
};

/** JSON with a line per field; unfinished JSON unchanged. */
function layOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The parts of an answer: thoughts, text, and calls of tools. Plain, each token has the colour of the
 * forward that filled it; rendered, text is Markdown and arguments are laid out. */
class Answer {
  parts = [];
  pending = [];   // tokens that no part shows yet: text, and the forward that filled it
  row = 0;        // forward of the last token shown
  rendered = false;
  follows = true; // whether the pane scrolls with the text

  constructor(element) {
    this.element = element;
    let top = 0;
    element.addEventListener("scroll", () => {
      const { scrollTop, clientHeight, scrollHeight } = element;
      if (scrollTop + clientHeight >= scrollHeight - 4) this.follows = true;
      else if (scrollTop < top) this.follows = false; // scrolled up; text that grows leaves it as it is
      top = scrollTop;
    });
  }

  reset() {
    this.parts = [];
    this.pending = [];
    this.row = 0;
    this.follows = true;
    this.element.replaceChildren();
  }

  /** Move the parts of another answer here. */
  adopt(other) {
    this.parts = other.parts;
    this.element.append(...this.parts.map(({ element }) => element));
    this.show(other.rendered);
  }

  /** Texts of all parts of a kind. */
  read(kind) { return this.parts.filter((part) => part.kind === kind).map(({ text }) => text).join(""); }

  /** Calls whose arguments are complete. */
  get calls() {
    const isComplete = ({ kind, text }) => { try { return kind === "call" && Boolean(JSON.parse(text)); } catch { return false; } };
    return this.parts.filter(isComplete);
  }

  /** The text, or the calls if there is none. */
  get copy() { return this.read("text") || this.parts.filter(({ kind }) => kind === "call").map(({ name, text }) => `${name}(${text})`).join("\n"); }

  /** Add committed tokens and the forwards that filled them. */
  push(texts, rows) {
    if (texts.length === rows.length) texts.forEach((text, index) => this.pending.push([text, rows[index]]));
    else this.pending.push([texts.join(""), lastOf(rows) ?? this.row]);
  }

  /** Append text to the last part if it has the same kind and no own name, else to a new one. */
  write(kind, text, { name, id } = {}) {
    let part = lastOf(this.parts);
    if (part?.kind !== kind || name) part = this.begin(kind, { name, id });
    part.text += text;
    part.isStale = true;
    for (const [piece, row] of this.align(text))
      for (const line of piece.split(/(?<=\n)/)) this.colour(part.plain, line, row, this.isCode(part, line));
  }

  begin(kind, identity) {
    const part = { kind, text: "", line: "", isFenced: false, ...identity, ...PARTS[kind](identity) };
    this.foldThoughts();
    this.parts.push(part);
    const canvas = $(".canvas", this.element);
    if (canvas) canvas.before(part.element);
    else this.element.append(part.element);
    if (this.rendered) this.swap(part);
    return part;
  }

  foldThoughts() {
    for (const { kind, element } of this.parts) {
      if (kind !== "thoughts" || $("summary", element).textContent === "Thoughts") continue;
      $("summary", element).textContent = "Thoughts";
      element.open = false;
    }
  }

  /** Split new text into the pieces of its tokens.
   *
   * Tokens that no part shows, such as the marks of thoughts, are dropped. If the text is not that of
   * its tokens, as where they share a character, all of it has the colour of the last one.
   */
  align(text) {
    const begin = this.pending.map(([piece]) => piece).join("").indexOf(text), end = begin + text.length;
    this.row = lastOf(this.pending)?.[1] ?? this.row;
    const pieces = [], rest = [];
    let at = 0;
    for (const [piece, row] of begin < 0 ? [] : this.pending) {
      const low = Math.max(begin - at, 0), high = Math.max(end - at, 0);
      if (low < Math.min(high, piece.length)) pieces.push([piece.slice(low, high), row]);
      if (high < piece.length) rest.push([piece.slice(high), row]);
      at += piece.length;
    }
    this.pending = rest;
    return begin < 0 ? [[text, this.row]] : pieces;
  }

  /** Take the next text of a line, up to its end; returns whether it is in a fenced block of code. */
  isCode(part, text) {
    part.line += text;
    const isFence = /^\s*(```|~~~)/.test(part.line), isCode = part.isFenced || isFence;
    if (text.endsWith("\n")) {
      if (isFence) part.isFenced = !part.isFenced;
      part.line = "";
    }
    return isCode;
  }

  /** Append text of one forward; merges adjacent pieces of the same forward and face. */
  colour(element, text, row, isCode) {
    const before = element.lastElementChild;
    if (before?.row === row && before.isCode === isCode) {
      before.append(text);
      return;
    }
    const className = row === GIVEN ? "given" : `piece ${row % 2 ? "odd" : "even"} p${row % 6}`;
    element.append(make("span", { className: `${className}${isCode ? " mono" : ""}`, row, isCode }, text));
  }

  /** Show texts after the committed ones, which are elements, or nothing. */
  put(elements) {
    $(".canvas", this.element)?.remove();
    if (!elements.length) return;
    const canvas = make("span", { className: "canvas" }, ...elements);
    canvas.setAttribute("aria-hidden", "true");
    this.element.append(canvas);
  }

  /** Show the plain or the rendered view. */
  show(rendered) {
    this.rendered = rendered;
    for (const part of this.parts) this.swap(part);
    this.refresh();
  }

  swap(part) {
    const [from, to] = this.rendered ? [part.plain, part.rendered] : [part.rendered, part.plain];
    if (!from || !to) return;
    from.replaceWith(to);
    if (part.element === from) part.element = to;
  }

  /** Render what changed, and scroll to the end unless the reader scrolled up. */
  refresh() {
    for (const part of this.rendered ? this.parts : []) {
      if (!part.isStale || !part.render) continue;
      part.render(part.text);
      part.isStale = false;
    }
    if (this.follows) this.element.scrollTop = this.element.scrollHeight;
  }

  choose(row) {
    for (const piece of this.element.querySelectorAll(".piece")) piece.classList.toggle("chosen", piece.row === row);
  }
}
