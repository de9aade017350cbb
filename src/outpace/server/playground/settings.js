"use strict";

function save() {
  if (!ready) return;
  const state = new URLSearchParams();
  if (racing()) state.set("mode", "race");
  if (form.elements.raw.value) state.set("raw", form.elements.raw.value);
  const prompt = $("#prompt").value;
  if (prompt.length <= LONGEST) state.set("prompt", prompt);
  for (const name in FIELDS) state.set(name, $(`#${name}`).value);
  if (rendered) state.set("view", "rendered");
  for (const name of ["system", "tools"]) if ($(`#${name}`).value && $(`#${name}`).value.length <= LONGEST) state.set(name, $(`#${name}`).value);
  if (form.elements.tool_choice.value !== "auto") state.set("tool_choice", form.elements.tool_choice.value);
  if ($("#must").value && $("#rule").value.length <= LONGEST) for (const name of ["must", "rule"]) state.set(name, $(`#${name}`).value);
  used().forEach((lane, index) => {
    const side = "ab"[index];
    state.set(`${side}.model`, lane.model.value);
    state.set(`${side}.method`, lane.method.value);
    for (const option of lane.options) if (option.text) state.set(`${side}.options.${option.option.name}`, option.text);
  });
  history.replaceState(null, "", `#${state}`);
}

/** Restore the settings of the link, with defaults for the rest; without any, show a race. */
function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  form.elements.mode.value = state.get("mode") === "race" || (!state.size && isRace(defaults())) ? "race" : "one";
  form.elements.raw.value = ["1", "fill"].includes(state.get("raw")) ? state.get("raw") : "";
  for (const name in FIELDS) $(`#${name}`).value = state.get(name) ?? FIELDS[name];
  for (const name of ["system", "tools"]) $(`#${name}`).value = state.get(name) ?? "";
  form.elements.tool_choice.value = state.get("tool_choice") === "required" ? "required" : "auto";
  $("#chat").open = ["system", "tools"].some((name) => state.get(name));
  render(state.get("view") === "rendered");
  $("#must").value = state.get("must") in RULES ? state.get("must") : "";
  $("#rule").value = state.get("rule") ?? "";
  arrangeFields();
  const usual = defaults();
  lanes.forEach((lane, index) => {
    const side = "ab"[index], model = state.get(`${side}.model`), method = state.get(`${side}.method`);
    const known = models.some(({ id }) => id === model);
    const texts = {};
    for (const [name, text] of state) if (name.startsWith(`${side}.options.`)) texts[name.slice(10)] = text;
    lane.pick(known ? model : usual[index].model, known ? method ?? "" : usual[index].method, texts);
    if (model !== null && !known) lane.warn(`The link names the model “${model}”, which this server does not have. This is ${lane.model.value}.`);
    else if (method !== null && method !== lane.method.value) lane.warn(`The link names the method “${method}”, which this server does not offer for ${model}. This is ${lane.method.value}.`);
  });
  const model = models.find(({ id }) => id === lanes[0].model.value);
  const [example] = EXAMPLES.filter(({ fits }) => fits(model));
  $("#prompt").value = state.get("prompt") ?? example.prompt;
  if (!state.has("max_tokens") && !isTiny(model)) $("#max_tokens").value = Math.min(LONG_ANSWER, model.outpace.max_tokens ?? LONG_ANSWER);
  arrange();
}

const isRace = ([left, right]) => left.model !== right.model || left.method !== right.method;

/** Default lanes: a parallel method, and one token at a time, by the same model where it can.
 * A model named after a method was trained for it; else a model has its default method. */
function defaults() {
  const pairs = models.flatMap(({ id, outpace }) => Object.keys(outpace.methods).map((method) => ({ model: id, method })));
  const find = (...names) => names.map((name) => pairs.find(({ method }) => method === name)).find(Boolean);
  const named = pairs.find(({ model, method }) => model.includes(method));
  const usual = pairs.find(({ model, method }) => !PLAIN.includes(method) && method === models.find(({ id }) => id === model).outpace.method);
  const quick = named ?? usual ?? find("wedlm", "apd", "dflash", "speculative", "fast_dllm") ?? pairs[0];
  const plain = pairs.find(({ model, method }) => model === quick.model && method === PLAIN[0]) ?? find(...PLAIN) ?? pairs[0];
  return [quick, plain];
}

/** Show one lane or two. */
function arrange() {
  const both = racing();
  $("#lanes").className = both ? "race" : "one";
  $("#lanes").replaceChildren(...used().map(({ element }) => element));
  for (const lane of lanes) {
    $("h2", lane.element).hidden = !both;
    lane.details.open = !both && innerWidth >= 896;
  }
  suggest();
  save();
}

/** Show example prompts that suit the model. */
function suggest() {
  const model = models.find(({ id }) => id === lanes[0].model.value);
  $("#max_tokens").max = model.outpace.max_tokens ?? model.outpace.max_length ?? "";
  const buttons = EXAMPLES.filter(({ fits }) => fits(model)).map(({ name, prompt, raw = "", must = "", rule = "", tools = "" }) => {
    const button = make("button", { type: "button", className: "plain" }, name);
    button.addEventListener("click", () => {
      $("#prompt").value = prompt;
      for (const each of form.elements.raw) each.checked = each.value === raw;
      $("#must").value = must;
      $("#rule").value = rule;
      $("#tools").value = tools;
      if (tools) $("#chat").open = true;
      arrangeFields();
      save();
    });
    return button;
  });
  $("#examples").replaceChildren("Try", ...buttons);
}

/** Request an API key, which is stored in memory only. */
function askKey(message) {
  $("#key").hidden = false;
  mark($("#key-value"), $("#key-value-error"), message);
  $("#key-value").focus();
}

async function load() {
  showStatus("Loading the list of models.");
  try {
    const reply = await ask("/v1/models");
    const list = await reply.json().catch(() => null);
    if (!Array.isArray(list?.data)) throw new Fault("The server did not list its models. Is it an outpace server?");
    models = list.data.filter(({ outpace }) => Object.keys(outpace?.methods ?? {}).length);
  } catch (fault) {
    if (!(fault instanceof Fault)) throw fault;
    showStatus(fault.message, true);
    if (fault.status === 401) askKey(fault.message);
    return;
  }
  if (!models.length) { showStatus("This server has no models.", true); return; }
  for (const lane of lanes) lane.offer(models);
  $("#key").hidden = true;
  restore();
  ready = true;
  save();
  showStatus(`Ready: ${plural(models.length, "model")}.`);
}
