"use strict";

let controls = 0;

/** Control for one option of a method; `value()` is undefined for the default. */
class Option {
  constructor(option) {
    this.option = option;
    const id = `option-${++controls}`;
    this.control = this.build(option);
    Object.assign(this.control, { id, name: option.name });
    this.error = make("p", { className: "error", id: `${id}-error`, hidden: true });
    const label = make("label", { className: "name", htmlFor: id }, make("b", {}, option.name.replaceAll("_", " ")));
    const box = this.control.type === "checkbox" ? make("div", { className: "check" }, this.control, option.default ? "on by default" : "off by default") : this.control;
    this.element = make("div", { className: "field" }, label, box);
    this.element.append(this.error);
    this.element.title = this.control.title = [option.help, this.range()].filter(Boolean).join("; ");
    this.control.setAttribute("aria-describedby", this.error.id);
  }

  get needed() { return !this.option.nullable && (this.option.default ?? null) === null; }

  range() {
    const { minimum: low = null, maximum: high = null } = this.option;
    if (low !== null && high !== null) return `${low} to ${high}`;
    return low !== null ? `at least ${low}` : high !== null ? `at most ${high}` : "";
  }

  build({ type, choices, nullable, default: usual, minimum, maximum }) {
    const number = type === "int" || type === "float";
    if (type === "bool" && !nullable) return make("input", { type: "checkbox", checked: Boolean(usual) });
    if (!number && (choices || type === "bool")) {
      const words = [...(choices ?? [true, false]), ...(nullable ? [null] : [])];
      const select = make("select", {}, ...words.map((word) => make("option", { value: String(word ?? "none") }, String(word ?? "none"))));
      select.value = String(usual ?? (nullable ? "none" : words[0]));
      return select;
    }
    const words = [...(choices ?? []), ...(nullable ? ["none"] : [])];
    const input = make("input", { type: number && !words.length ? "number" : "text", value: usual ?? (nullable ? "none" : "") });
    if (number) input.inputMode = words.length ? "text" : "decimal";
    if (input.type === "number") Object.assign(input, { min: minimum ?? "", max: maximum ?? "", step: type === "int" ? "1" : "any" });
    if (words.length) {
      const list = make("datalist", { id: `choices-${++controls}` }, ...words.map((word) => make("option", { value: word })));
      input.setAttribute("list", list.id);
      $("#lists").append(list);
    }
    return input;
  }

  /** Value of the control: number, word or null; throws a Fault for an invalid number. */
  read() {
    const { control, option } = this;
    if (control.type === "checkbox") return control.checked;
    const text = control.value.trim();
    if (text === "none" && option.nullable) return null;
    if (option.type === "bool") return text === "true";
    if (option.type === "str" || (option.choices ?? []).includes(text)) return text;
    if (text === "" && !control.validity.badInput) return option.default ?? null;
    if (text === "" || !Number.isFinite(Number(text))) {
      const words = ["a number", ...(option.choices ?? []), ...(option.nullable ? ["none"] : [])].join(" or ");
      throw new Fault(`${option.name} must be ${words}.`, { param: `outpace.options.${option.name}` });
    }
    return Number(text);
  }

  /** Value if it differs from the default or there is none. */
  value() {
    const value = this.read();
    return value === (this.option.default ?? null) && !this.needed ? undefined : value;
  }

  /** Text for the link, empty for the default. */
  get text() {
    try {
      return this.value() === undefined ? "" : String(this.value() ?? "none");
    } catch {
      return this.control.value;
    }
  }

  set text(text) {
    if (this.control.type === "checkbox") this.control.checked = text === "true";
    else this.control.value = text;
  }
}

/** Show an error at a control, or clear it with null. */
function mark(control, error, message) {
  error.hidden = message === null;
  error.textContent = message ?? "";
  if (message === null) control.removeAttribute("aria-invalid");
  else control.setAttribute("aria-invalid", "true");
}
