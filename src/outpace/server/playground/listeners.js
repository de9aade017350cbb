"use strict";

const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function dress() {
  $("#theme").textContent = isDark() ? "Light" : "Dark";
  if (ready) draw();
}

form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
form.addEventListener("change", ({ target }) => {
  if (target.name === "mode") {
    stop();
    clear();
    showStatus("Ready.");
    if (racing() && lanes[0].title === lanes[1].title) {
      const other = defaults().find(({ model, method }) => `${method} on ${model}` !== lanes[0].title);
      if (other) lanes[1].pick(other.model, other.method);
    }
    arrange();
  } else {
    if (target.id === "must") mark($("#rule"), $("#rule-error"), null);
    arrangeFields();
    save();
  }
});
document.addEventListener("input", ({ target }) => {
  if (target.getAttribute("aria-invalid")) mark(target, $(`#${CSS.escape(target.id)}-error`), null);
  if (target.id !== "key-value") save();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (event.shiftKey) reply(used().find(({ element }) => element.contains(document.activeElement)) ?? lanes[0]);
    else run();
  }
  if (event.key === "Escape" && running) { event.preventDefault(); stop(); }
});
$("#stop").addEventListener("click", stop);
$("#new").addEventListener("click", forget);
for (const { element } of lanes) $(".view", element).addEventListener("change", ({ target }) => { render(target.checked); save(); });
$("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("#key-value").value.trim();
  if (ready) { $("#key").hidden = true; showStatus("The key is set."); } else load();
});
$("#theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  dress();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
addEventListener("hashchange", () => { if (ready) { stop(); clear(); restore(); } });

document.body.append(
  make("div", { id: "lists", hidden: true }),
  make("div", { id: "hues", hidden: true }, ...[0, 1, 2, 3, 4, 5].map((index) => make("i", { className: `hue p${index}` }))),
);
dress();
load();
