"use strict";

const ZOO = "At the zoo 3 birds eat 12 apples each. There were 23 apples and Nina brings 28 more. How many apples are left after the birds eat?";
const BASKETS = "Tom picks 4 baskets of apples with 6 apples in each basket. He gives 5 apples to Amy. How many apples does Tom have left?\n";
const isTiny = ({ id }) => id.startsWith("tiny-");
const fills = ({ outpace }) => Object.values(outpace.methods).some(({ fields }) => fields.includes("outpace.fill"));
const WEATHER = JSON.stringify([{ type: "function", function: {
  name: "get_weather", description: "Get the current weather of a city.",
  parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"] },
} }]);
const EDIT = `Rename total to result in this function, and print all of it:

\`\`\`python
def mean_of_positive(values):
    """Return the mean of the positive values, or 0 without any."""
    total, count = 0.0, 0
    for value in values:
        if value > 0:
            total += value
            count += 1
    return total / count if count else 0.0
\`\`\``;
const EXAMPLES = [
  { name: "apples at the zoo", prompt: ZOO, fits: isTiny },
  { name: "games", prompt: "Lily plays 4 games of 5 minutes each and takes a break of 6 minutes. How many minutes does it take in all?", fits: isTiny },
  { name: "only a number", prompt: ZOO, must: "regex", rule: "#### [0-9]{1,3}", fits: isTiny },
  { name: "a boat", prompt: "Omar counts 60 people on the boat. Then 39 of them get off and 43 others get on. How many people are there now?", fits: isTiny },
  { name: "a raw text", prompt: "Omar has 60 coins and gives 39 of them to Ann. ", raw: "1", fits: isTiny },
  { name: "holes", prompt: `${BASKETS}{{..30:[^.]+\\.}} After the gift he has 24-5=<<24-5={{2}}>>19 apples left.\n#### {{2}}`, raw: "fill", fits: (model) => isTiny(model) && fills(model) },
  { name: "a table", prompt: "Fill the table n+58 from 25 to 30.", fits: (model) => isTiny(model) && model.outpace.family === "wedlm" },
  { name: "counting", prompt: "Count from 41 by 2 up to 99.", fits: (model) => isTiny(model) && model.outpace.family === "wedlm" },
  { name: "an edit", prompt: EDIT, fits: (model) => !isTiny(model) },
  { name: "a sum", prompt: "A train travels 60 km in 45 minutes. How far does it travel in 3 hours? Explain each step.", fits: (model) => !isTiny(model) },
  { name: "code", prompt: "Write a Python function that merges two sorted lists.", fits: (model) => !isTiny(model) },
  { name: "a tool", prompt: "What is the weather in Paris?", tools: WEATHER, fits: (model) => !isTiny(model) && model.outpace.tools !== null },
  { name: "a raw text", prompt: "The three laws of thermodynamics are", raw: "1", fits: (model) => !isTiny(model) },
  { name: "holes", prompt: "The capital of France is{{..8}}, and that of Italy is{{..8}}.", raw: "fill", fits: (model) => !isTiny(model) && fills(model) },
];
const LONG_ANSWER = 512; // default of max_tokens, except for the bundled models with their short answers
const FIELDS = { max_tokens: 128, temperature: "", seed: 0 };
const PLAIN = ["autoregressive", "left_to_right"]; // one token per forward
const LONGEST = 4000; // maximum characters of a prompt or constraint in a link
const RULES = { // constraints: label of the text field, and the value parsed from it
  regex: { label: "regular expression (Python syntax)", read: (text) => text },
  choice: { label: "lines, one of which is the answer", read: (text) => text.split("\n").filter(Boolean) },
  json: { label: "JSON schema", read: (text) => readJson(text, "structured_outputs.json") },
};

const form = $("#form"), status = $("#status"), verdict = $("#verdict");
let models = [], running = null, frame = 0, ready = false; // running: lanes and their AbortController
const lanes = ["A", "B"].map((name) => new Lane(name, (what, lane) => (what === "steps" ? later() : what === "reply" ? reply(lane) : (save(), suggest()))));
const conversation = new Conversation($("#conversation"));
let rendered = false; // whether answers are shown as Markdown

const racing = () => form.elements.mode.value === "race";
const used = () => (racing() ? lanes : lanes.slice(0, 1));

/** The shared control for a request field, or null. */
function fieldOf(param) {
  const name = param?.replace(/^messages\b.*|^prompt\b.*/, "prompt").replace("max_completion_tokens", "max_tokens").replace(/^structured_outputs\b.*/, "rule").replace(/^tools\b.*|^tool_choice\b.*/, "tools");
  return ["prompt", "rule", "tools"].includes(name) || name in FIELDS ? $(`#${name}`) : null;
}

function readJson(text, param) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Fault(`This is not JSON: ${error.message}.`, { param });
  }
}

/** Show the fields that apply: constraint text if one is selected, no token limit for holes, turns and tools for messages. */
function arrangeFields() {
  const { label } = RULES[$("#must").value] ?? {}, raw = form.elements.raw.value, cloze = raw === "fill";
  $("#chat").hidden = raw !== "";
  $("#conversation").hidden = raw !== "" || !conversation.turns.length;
  $("#prompt").placeholder = conversation.hasCalls ? "Nothing, or a message after the results" : "";
  arrangeButtons();
  for (const field of document.querySelectorAll(".field.whole")) field.hidden = cloze;
  $(".rule").hidden = !label || cloze;
  $("label", $(".rule")).textContent = label ?? "";
}

/** Enable the buttons that have something to work on. */
function arrangeButtons() {
  for (const lane of lanes) {
    lane.copy.disabled = !lane.answer.parts.length;
    lane.reply.hidden = form.elements.raw.value !== "";
    lane.reply.disabled = running !== null || !lane.hasReply;
  }
}

function showStatus(text, bad = false) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

/** Draw at most once per frame, and only for a fraction of the time. */
function later() {
  if (frame) return;
  frame = requestAnimationFrame((now) => {
    const cost = Math.max(...lanes.map(({ timeline, cost }) => (timeline.cost ?? 0) + (cost ?? 0)));
    if (running && now - (later.last ?? 0) < 4 * cost) { frame = 0; later(); return; }
    frame = 0;
    later.last = now;
    draw();
  });
}

function draw() {
  const slots = Math.max(...used().map(({ trace }) => trace.slots), 1);
  const scale = {
    slots: running ? Math.ceil(slots / 32) * 32 : slots,
    forwards: Math.max(...used().map(({ trace }) => trace.forwards.length), 1),
  };
  for (const lane of used()) {
    if (running && lane.finished === null && !lane.fault) lane.figure();
    lane.draw(scale);
  }
}

/** Messages and tools of the request. */
function chat(prompt) {
  const system = $("#system").value, tools = $("#tools").value;
  return {
    messages: [
      ...(system ? [{ role: "system", content: system }] : []), ...conversation.messages,
      ...(prompt ? [{ role: "user", content: prompt }] : []),
    ],
    ...(tools.trim() ? { tools: readJson(tools, "tools"), tool_choice: form.elements.tool_choice.value } : {}),
  };
}

/** Fields of the request that all lanes share; throws a Fault for an invalid value. */
function shared() {
  const raw = form.elements.raw.value, prompt = $("#prompt").value;
  if (!prompt && (raw || !conversation.hasCalls)) throw new Fault("Write a prompt first.", { param: "prompt" });
  const values = raw ? { prompt, ...(raw === "fill" ? { fill: true } : {}) } : chat(prompt);
  for (const name in FIELDS) {
    const control = $(`#${name}`);
    if (raw === "fill" && name === "max_tokens") continue; // given by the holes
    if (control.validity.badInput) throw new Fault(`${name} must be a number.`, { param: name });
    if (control.value !== "") values[name] = Number(control.value);
  }
  const must = raw === "fill" ? "" : $("#must").value, rule = $("#rule").value;
  if (must && !rule) throw new Fault(`Write the ${RULES[must].label} first.`, { param: `structured_outputs.${must}` });
  if (must) values.structured_outputs = { [must]: RULES[must].read(rule) };
  return values;
}

/** Show an error at its field and scroll to it. */
function complain(fault, lane) {
  const own = lane?.refuse(fault);
  const field = fieldOf(fault.param);
  const control = own ?? field;
  if (field && !own) mark(field, $(`#${field.id}-error`), fault.plain);
  if (control) {
    if (control.closest("details")) control.closest("details").open = true;
    control.focus();
  }
  if (fault.status === 401) askKey(fault.message);
}

async function run() {
  if (!ready) return load();
  stop();
  clear();
  const began = used();
  let requests, lane = null;
  try {
    const values = shared();
    requests = began.map((each) => { lane = each; return each.request(values); });
  } catch (fault) {
    if (!(fault instanceof Fault)) throw fault;
    complain(fault, lane);
    showStatus(`Not sent: ${fault.message}`, true);
    return;
  }
  const abort = new AbortController(), { signal } = abort;
  const own = running = { abort, lanes: began };
  $("#stop").disabled = false;
  arrangeButtons();
  showStatus(began.length > 1 ? "Both are decoding." : "Decoding.");
  const path = form.elements.raw.value ? "/v1/completions" : "/v1/chat/completions";
  const started = performance.now();
  await Promise.all(began.map((each, index) => each.run(path, requests[index], signal, started)));
  if (running === own) finish(began);
}

function finish(began) {
  end();
  draw();
  for (const lane of began) lane.choose(null);
  const failed = began.filter(({ fault }) => fault);
  for (const lane of failed) complain(lane.fault, lane);
  if (began.length > 1) judge(began);
  showStatus(began.map((lane) => report(lane, began.length > 1)).join(" "), failed.length > 0);
}

/** One sentence on how a lane ended. */
function report(lane, named) {
  const who = named ? `${lane.name}: ` : "";
  if (lane.fault) {
    const why = lane.notice.hidden ? `: ${lane.fault.message}` : ".";
    return `${who}${lane.fault.status ? "Refused" : `Failed after ${plural(lane.tokens, "token")}`}${why}`;
  }
  if (lane.reason === "stopped") return `${who}Stopped after ${plural(lane.tokens, "token")}.`;
  const limit = lane.reason === "length" ? ", at the limit of max tokens" : "";
  return `${who}Finished: ${plural(lane.tokens, "token")} in ${plural(lane.forwards, "forward")}${limit}.`;
}

/** Report which lane finished first, and by how much. */
function judge([left, right]) {
  if (left.finished === null || right.finished === null) return;
  const [fast, slow] = left.finished <= right.finished ? [left, right] : [right, left];
  const times = slow.finished / fast.finished;
  const who = left.title === right.title ? (lane) => lane.name : (lane) => lane.title;
  const first = times < 1.05
    ? `A dead heat: both took about ${duration(fast.finished)}.`
    : `${who(fast)} finished first, ${times.toFixed(1)} times as fast: ${duration(fast.finished)} against ${duration(slow.finished)}.`;
  const count = (lane) => `${plural(lane.tokens, "token")} in ${plural(lane.forwards, "forward")}`;
  const same = left.answer.copy === right.answer.copy ? "Both texts are the same." : "The two texts differ.";
  verdict.replaceChildren(first, make("small", {}, `${who(fast)}: ${count(fast)}; ${who(slow)}: ${count(slow)}. ${same} They ran at the same time and shared the machine.`));
  verdict.hidden = false;
}

function stop() {
  if (!running) return;
  const { abort, lanes: began } = running;
  abort.abort();
  for (const lane of began) if (lane.finished === null && !lane.fault) lane.reason = "stopped";
  finish(began);
}

function end() {
  const button = $("#stop");
  if (document.activeElement === button) $("#run").focus();
  button.disabled = true;
  running = null;
  arrangeButtons();
}

/** Keep an answer as a turn of the conversation, and go on to the next message. */
function reply(lane) {
  if (lane.reply.hidden || lane.reply.disabled) return;
  const field = conversation.add(lane);
  $("#prompt").value = "";
  clear();
  arrangeFields();
  conversation.scrollToEnd();
  save();
  (field ?? $("#prompt")).focus();
  showStatus(field ? "Write the results of the calls, then run." : "Write the next message.");
}

function forget() {
  stop();
  conversation.clear();
  clear();
  arrangeFields();
  $("#prompt").focus();
  showStatus("A new conversation.");
}

/** Show answers as Markdown, or as text in the colours of forwards. */
function render(yes) {
  rendered = yes;
  for (const lane of lanes) {
    $(".view", lane.element).checked = yes;
    lane.answer.show(yes);
    lane.choose(null);
  }
  conversation.show(yes);
}

function clear() {
  verdict.hidden = true;
  for (const lane of lanes) lane.reset();
  for (const name of ["prompt", "rule", "tools", ...Object.keys(FIELDS)]) mark($(`#${name}`), $(`#${name}-error`), null);
  draw();
  arrangeButtons();
}
