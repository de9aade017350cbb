"use strict";

// The lexer is `lib/marked.umd.js` of the npm package marked 18.2.1, unchanged; its renderer is not used.
// An answer becomes nodes of the few elements below, whose content is text: its markup is never parsed
// as HTML. Images are not loaded, and only addresses of the web are links.

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", "#39": "'" };
const decode = (text) => text.replace(/&(amp|lt|gt|quot|nbsp|#39);/g, (_, name) => ENTITIES[name]);
const DEEPEST = 24; // levels of lists and quotations; deeper ones are text
const LEXING_MS = 500; // for one text; emphasis takes the lexer quadratic time and more
const MAX_LENGTH = 100_000; // characters; a list of that length takes the lexer a second

/** A tokenizer whose lexer fails once it has taken too long. */
class TimedTokenizer extends marked.Tokenizer {
  end = performance.now() + LEXING_MS;

  check() { if (performance.now() > this.end) throw new Error("this text takes too long"); }

  // Lexers begin each attempt at a block with `space`, and at a part of a line with `escape`.
  space(text) { this.check(); return super.space(text); }
  escape(text) { this.check(); return super.escape(text); }
}

/** The node of a token of the Markdown lexer. */
function markdownNode(token, depth = 0) {
  const inner = (tokens = token.tokens) => (tokens ?? []).map((each) => markdownNode(each, depth + 1));
  if (depth > DEEPEST) return document.createTextNode(token.raw);
  switch (token.type) {
    case "space": case "def": return document.createTextNode("");
    case "heading": return make(`h${Math.min(token.depth + 2, 6)}`, {}, ...inner());
    case "paragraph": return make("p", {}, ...inner());
    case "blockquote": case "strong": case "em": case "del": return make(token.type, {}, ...inner());
    case "br": case "hr": return make(token.type);
    case "codespan": return make("code", {}, token.text);
    case "code": return codeBlock(token.text, token.lang?.match(/\S*/)[0] ?? "");
    case "list": {
      const items = token.items.map((item) => make("li", {}, ...inner(item.tokens)));
      return token.ordered ? make("ol", { start: token.start }, ...items) : make("ul", {}, ...items);
    }
    case "table": {
      const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { className: cell.align ?? "" }, ...inner(cell.tokens))));
      const table = make("table", {}, row("th", token.header), ...token.rows.map((cells) => row("td", cells)));
      return make("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" }, table);
    }
    case "link": return markdownLink(token, inner());
    case "image": return markdownLink(token, [token.text || token.href]);
    case "checkbox": return document.createTextNode(token.checked ? "☑ " : "☐ ");
    case "text": return token.tokens ? make("span", {}, ...inner()) : document.createTextNode(decode(token.text));
    case "escape": return document.createTextNode(token.text);
    case "html": if (/^<br\s*\/?>$/i.test(token.text)) return make("br");
  }
  return document.createTextNode(token.raw);
}

function markdownLink({ href, raw }, children) {
  if (!/^https?:\/\//i.test(href)) return document.createTextNode(raw);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** Code in a box that scrolls sideways, with its language and a button to copy it. */
function codeBlock(text, name) {
  const caption = make("figcaption", {}, make("span", {}, name), copyButton("Copy code", () => text));
  const pre = make("pre", { tabIndex: 0, role: "group", ariaLabel: name ? `Code, ${name}` : "Code" }, make("code", {}, text));
  return make("figure", { className: "code" }, caption, pre);
}

/** The tokens of a text, or null if it is too long, takes the lexer too long, or is nested too deeply. */
function lexMarkdown(text) {
  if (text.length > MAX_LENGTH) return null;
  try {
    return marked.lexer(text, { gfm: true, breaks: true, tokenizer: new TimedTokenizer() });
  } catch {
    return null;
  }
}

/** Render Markdown into an element; keeps the nodes of blocks that are unchanged since the last time.
 *
 * A text without tokens is shown as it is, and so are those that continue it.
 */
function renderMarkdown(text, element) {
  const tokens = element.isPlain ? null : lexMarkdown(text);
  if (!tokens) {
    element.isPlain = true;
    element.replaceChildren(make("div", { className: "plain-text" }, text));
    return;
  }
  let same = 0;
  const raws = element.raws ?? [];
  while (same < Math.min(raws.length, tokens.length) && raws[same] === tokens[same].raw) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const token of tokens.slice(same)) element.append(markdownNode(token));
  element.raws = tokens.map(({ raw }) => raw);
}
