"use strict";

/** Settings, answer and timeline of one model and method. */
class Lane {
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.element = $("#lane").content.cloneNode(true).firstElementChild;
    const find = (selector) => $(selector, this.element);
    this.model = find(".model");
    this.method = find(".method");
    this.answer = new Answer(find(".answer"));
    this.notice = find(".notice");
    this.reading = find("progress");
    this.detail = find(".detail");
    this.details = find("details");
    for (const control of [this.model, this.method]) {
      const error = control.nextElementSibling;
      control.id = `${name}-${control.className}`;
      error.id = `${control.id}-error`;
      control.setAttribute("aria-describedby", error.id);
      control.previousElementSibling.htmlFor = control.id;
    }
    this.element.setAttribute("aria-label", `Side ${name}`);
    this.answer.element.setAttribute("aria-label", "Answer. Arrow keys choose a forward.");
    find("h2").textContent = name;
    this.reply = find(".reply");
    this.copy = copyButton("Copy", () => this.answer.copy);
    this.reply.before(this.copy);
    this.timeline = new Timeline(find(".timeline"), (row) => this.choose(row));
    this.listen();
    this.reset();
  }

  listen() {
    this.model.addEventListener("change", () => { this.pick(this.model.value, this.method.value); this.changed(); });
    this.method.addEventListener("change", () => { this.pick(this.model.value, this.method.value); this.changed(); });
    this.reply.addEventListener("click", () => this.changed("reply", this));
    const pane = this.answer.element;
    const over = (event) => {
      const piece = event.target.closest(".piece");
      this.choose(piece ? piece.row : null);
    };
    pane.addEventListener("pointerover", over);
    pane.addEventListener("click", over);
    pane.addEventListener("pointerleave", () => this.choose(null));
    pane.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
      const rows = [...new Set(this.trace.fills)].filter((row) => row !== GIVEN).sort((one, other) => one - other);
      if (!move || !rows.length || this.answer.rendered || event.target !== pane) return;
      event.preventDefault();
      this.choose(rows[Math.min(Math.max(rows.indexOf(this.chosen) + move, 0), rows.length - 1)]);
      $(".chosen", pane)?.scrollIntoView({ block: "nearest" });
    });
  }

  /** List the models of the server. */
  offer(models) {
    this.models = models;
    this.model.replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  }

  get entry() { return this.models.find(({ id }) => id === this.model.value).outpace; }
  /** Whether there is an answer to a message. */
  get hasReply() { return Boolean(this.sent?.messages && this.answer.parts.length); }

  /** Method, model and figures of the answer. */
  get summary() {
    const { sent, tokens, forwards, figures } = this;
    const speed = figures ? `, ${figures.tokens_per_second.toFixed(0)} tokens/s` : "";
    return `${sent.outpace.method} on ${sent.model}: ${plural(tokens, "token")} in ${plural(forwards, "forward")}${speed}`;
  }

  get title() { return `${this.method.value} on ${this.model.value}`; }

  /** Select a model and a method; falls back to the default method. */
  pick(model, method, texts = {}) {
    this.model.value = this.model.title = model;
    const { methods, method: usual } = this.entry;
    this.method.replaceChildren(...Object.keys(methods).map((name) => make("option", { value: name }, name)));
    this.method.value = method in methods ? method : usual;
    const chosen = methods[this.method.value];
    $(".about", this.element).textContent = chosen.about ?? "";
    this.options = (chosen.options ?? []).map((option) => new Option(option));
    for (const option of this.options) if (option.option.name in texts) option.text = texts[option.option.name];
    $(".options", this.element).replaceChildren(...this.options.map((option) => option.element));
    this.details.hidden = !this.options.length;
    this.accept();
  }

  /** Build the request of this lane from the fields that all lanes share; throws a Fault for invalid values. */
  request({ fill, ...shared }) {
    const chosen = this.entry.methods[this.method.value];
    const options = {};
    for (const option of this.options) {
      const value = option.value();
      if (value !== undefined) options[option.option.name] = value;
    }
    return {
      model: this.model.value,
      ...shared,
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
      outpace: {
        method: this.method.value, options, trace: true,
        ...(chosen.provisional ? { provisional: true } : {}), ...(fill ? { fill } : {}),
      },
    };
  }

  reset() {
    this.trace = new Trace();
    this.tokens = this.forwards = 0;
    this.sent = this.signal = this.began = this.first = this.figures = this.finished = this.fault = this.reason = null;
    this.reading.hidden = true;
    this.shown = 0; // tokens that the answer has
    this.chosen = null;
    this.answer.reset();
    this.accept();
    this.figure();
    this.choose(null);
  }

  /** Decode; resolves when the answer is complete, stopped or failed. */
  async run(path, request, signal, started) {
    this.started = started;
    this.signal = signal;
    this.sent = request;
    this.trace.cloze = Boolean(request.outpace.fill);
    if (this.trace.cloze) { // the answer begins after the first hole
      const fixed = request.prompt.slice(0, request.prompt.indexOf("{{"));
      this.answer.push([fixed], [GIVEN]);
      this.answer.write("text", fixed);
    }
    try {
      for await (const chunk of answer(path, request, signal)) {
        if (this.signal !== signal) return;
        this.take(chunk);
      }
      this.finished = (performance.now() - started) / 1000;
    } catch (error) {
      if (this.signal !== signal) return;
      if (signal.aborted) this.reason = "stopped";
      else if (error instanceof Fault) this.fault = error;
      else throw error;
    }
    this.put([]);
    this.reading.hidden = true;
    this.figure();
    if (this.fault) this.refuse(this.fault);
  }

  take(chunk) {
    const { outpace = {}, usage, prompt_progress: read, choices: [choice] = [] } = chunk;
    if (read) {
      this.reading.hidden = read.time_ms < 1000 || read.processed === read.total;
      this.reading.max = read.total;
      this.reading.value = read.processed;
    }
    if (usage && !this.trace.cloze) this.trace.prompt = usage.prompt_tokens;
    if (outpace.steps) this.push(outpace.steps, outpace.texts);
    const delta = choice?.delta ?? {}, write = (...part) => {
      this.first ??= (performance.now() - this.started) / 1000;
      this.answer.write(...part);
    };
    if (delta.reasoning_content) write("thoughts", delta.reasoning_content);
    const text = delta.content ?? choice?.text;
    if (text) write("text", text);
    for (const { id, function: { name, arguments: text } } of delta.tool_calls ?? []) write("call", text, { id, name });
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    this.tokens = outpace.tokens ?? this.tokens;
    this.forwards = outpace.forwards ?? this.forwards;
    if (outpace.canvas) this.put(outpace.canvas);
    if (outpace.tokens_per_second !== undefined) this.figures = outpace;
    this.changed("steps");
  }

  /** Take steps, and the texts of the tokens that they committed. */
  push(steps, texts = []) {
    const now = performance.now() / 1000;
    this.began ??= now - steps.reduce((sum, step) => sum + step.seconds, 0);
    this.trace.push(steps);
    const fills = this.trace.fills.slice(this.shown);
    if (!fills.length) return;
    this.shown += fills.length;
    this.answer.push(texts, fills);
    this.put(this.trace.canvas.slice(fills.length)); // committed text was the beginning of the canvas
  }

  /** Show the canvas after the committed text: dimmed tokens, and boxes for holes. */
  put(canvas) {
    this.trace.canvas = canvas;
    const { first, holed } = this.trace;
    this.answer.put(canvas.map((token, index) => {
      const row = holed[first + this.shown + index];
      return token === null ? make("span", { className: "hole" }) : make("span", { className: row === undefined ? "" : `filled p${row % 6}` }, token);
    }));
  }

  /** Show current statistics, or the final ones of the server. */
  figure() {
    const { tokens, forwards, figures } = this;
    const seconds = this.began === null ? 0 : performance.now() / 1000 - this.began;
    const show = (name, value) => { $(`.${name}`, this.element).textContent = value; };
    const known = forwards > 0 || figures;
    show("speed", !known ? "–" : (figures?.tokens_per_second ?? tokens / seconds).toFixed(0));
    show("rate", !known ? "–" : (figures?.tokens_per_forward ?? tokens / forwards).toFixed(2));
    show("forwards", known ? figures?.forwards ?? forwards : "–");
    show("tokens", known ? figures?.tokens ?? tokens : "–");
    show("first", this.first === null ? "–" : duration(this.first));
  }

  /** Highlight a forward in the text and in the timeline. */
  choose(row) {
    if (row === this.chosen && row !== null) return;
    this.chosen = row;
    this.answer.choose(row);
    const parts = row === null ? null : this.trace.describe(row);
    const place = this.answer.rendered ? "a row of the timeline" : "a piece of the answer, or at a row of the timeline,";
    const hint = this.trace.forwards.length ? `Point at ${place} to see its forward.` : "";
    this.detail.replaceChildren(...(parts ? [make("b", {}, parts[0]), parts[1]] : [hint]));
    if (this.scale) this.timeline.show(this.trace, this.scale, row);
  }

  /** Draw the timeline on a scale, and the answer. */
  draw(scale) {
    this.scale = scale;
    const began = performance.now();
    this.answer.refresh();
    this.cost = performance.now() - began;
    this.timeline.show(this.trace, scale, this.chosen);
  }

  /** Show a fault at its field, or above the answer; returns the control if it is in this lane. */
  refuse(fault) {
    const name = fault.param?.split(".").pop();
    const option = /options|^[a-z_]+$/.test(fault.param ?? "") && this.options.find(({ option: { name: own } }) => own === name);
    const control = option ? option.control : fault.param === "model" ? this.model : /(^|\.)(method|fill)$/.test(fault.param ?? "") ? this.method : null;
    if (control) {
      mark(control, $(`#${CSS.escape(control.id)}-error`), fault.plain);
      if (option) this.details.open = true;
    } else if (!fieldOf(fault.param)) {
      this.warn(fault.param && fault.status === 400 ? `${fault.param}: ${fault.plain}` : fault.message);
    }
    return control;
  }

  warn(message) {
    this.notice.hidden = false;
    this.notice.textContent = message;
  }

  /** Clear all errors. */
  accept() {
    this.notice.hidden = true;
    for (const control of this.element.querySelectorAll("[aria-invalid]"))
      mark(control, $(`#${CSS.escape(control.id)}-error`), null);
  }
}
