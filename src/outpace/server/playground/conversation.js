"use strict";

/** Earlier turns of a conversation: a message, its answer with figures, and results of its calls. */
class Conversation {
  turns = [];

  constructor(section) {
    this.list = $("ol", section);
  }

  /** Whether the last answer called tools, so that the next request may have no message. */
  get hasCalls() { return Boolean(lastOf(this.turns)?.calls.length); }

  /** Take the answer of a lane, and the message that it answers. Returns the field for the result of its first call, if any. */
  add(lane) {
    const number = this.turns.length + 1, { role, content } = lastOf(lane.sent.messages), prompt = role === "user" ? content : "";
    const answer = new Answer(make("div", { className: "answer", role: "group", ariaLabel: `Answer ${number}` }));
    answer.adopt(lane.answer);
    answer.foldThoughts();
    const calls = answer.calls.map(({ id, name, text }, index) => ({ id, name, text, field: make("textarea", { id: `result-${number}-${index}`, rows: 1, spellcheck: false }) }));
    const results = calls.map(({ name, field }) => make("div", { className: "result-of" },
      make("label", { className: "name", htmlFor: field.id }, `result of ${name}`), field));
    const message = prompt ? [make("p", { className: "message" }, prompt)] : [];
    const bar = make("p", { className: "bar" }, make("span", { className: "about" }, lane.summary), copyButton("Copy", () => answer.copy));
    this.list.append(make("li", {}, ...message, answer.element, bar, ...results));
    this.turns.push({ prompt, answer, calls });
    return calls[0]?.field;
  }

  scrollToEnd() { this.list.scrollTop = this.list.scrollHeight; }

  clear() {
    this.turns = [];
    this.list.replaceChildren();
  }

  show(rendered) { for (const { answer } of this.turns) answer.show(rendered); }

  /** All turns as messages of a request. */
  get messages() {
    return this.turns.flatMap(({ prompt, answer, calls }) => {
      const reasoning = answer.read("thoughts");
      return [
        ...(prompt ? [{ role: "user", content: prompt }] : []),
        {
          role: "assistant", content: answer.read("text"),
          ...(reasoning ? { reasoning_content: reasoning } : {}),
          ...(calls.length ? { tool_calls: calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } })) } : {}),
        },
        ...calls.map(({ id, field }) => ({ role: "tool", tool_call_id: id, content: field.value })),
      ];
    });
  }
}
