"use strict";

const $ = (selector, root = document) => root.querySelector(selector);

/** An element with properties and children; strings become text, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
const duration = (seconds) =>
  seconds < 0.01 ? `${(seconds * 1000).toFixed(1)} ms` : seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
const lastOf = (list) => list[list.length - 1];

/** An error of the server or the connection; `param` names the field of the request. */
class Fault extends Error {
  constructor(message, { param = null, status = 0 } = {}) {
    super(message);
    this.param = param;
    this.status = status;
  }

  /** The message without the field name, for display next to the field. */
  get plain() { return this.message.startsWith(`${this.param}: `) ? this.message.slice(this.param.length + 2) : this.message; }
}

/** A button that copies a text and reports the result on its face for a moment. */
function copyButton(label, read) {
  const button = make("button", { type: "button", className: "plain", ariaLive: "polite" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(read())) ? "Copied" : "Not copied: the browser refused";
    button.focus();
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

/** Copy a text to the clipboard; returns whether it could. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Browsers offer `navigator.clipboard` only over TLS and for this machine.
  const area = make("textarea", { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
