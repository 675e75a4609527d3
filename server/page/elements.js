// Elements for the tree that markdown.js makes. Every piece of text is set as text: no markup is ever parsed here.

import { coloured } from "./colours.js";

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export function button(name, className, act) {
  const made = element("button", `small ${className}`, name);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

// Returns the element of one block of `blocksOf`.
export function blockElement(block) {
  return MAKERS[block.type](block);
}

const MAKERS = {
  paragraph: ({ inline }) => filled("p", inline),
  heading: ({ level, inline }) => filled(`h${Math.min(level + 2, 6)}`, inline), // below those of the page itself
  rule: () => element("hr"),
  quote: ({ blocks }) => parent("blockquote", blocks.map(blockElement)),
  code: codeBox,
  list: listElement,
  table: tableElement,
};

function parent(tag, children) {
  const made = element(tag);
  made.append(...children);
  return made;
}

function filled(tag, inline) {
  return parent(tag, inline.map(inlineNode));
}

function inlineNode(part) {
  if (typeof part === "string") return document.createTextNode(part);
  if (part.type === "code") return element("code", "", part.text);
  if (part.type !== "link") return filled(part.type, part.inline);
  const link = filled("a", part.inline);
  link.href = link.title = part.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}

function listElement({ ordered, start, items }) {
  const made = parent(ordered ? "ol" : "ul", items.map(itemElement));
  if (ordered && start !== 1) made.start = start;
  return made;
}

// An item of one paragraph holds its text itself.
function itemElement(blocks) {
  const [first, ...rest] = blocks;
  if (first?.type !== "paragraph") return parent("li", blocks.map(blockElement));
  return parent("li", [...first.inline.map(inlineNode), ...rest.map(blockElement)]);
}

function tableElement({ head, aligned, rows }) {
  const row = (tag, cells) => parent("tr", cells.map((cell, column) => cellElement(tag, cell, aligned[column])));
  const body = rows.map((cells) => row("td", cells));
  const table = parent("table", [parent("thead", [row("th", head)]), parent("tbody", body)]);
  const box = parent("div", [table]);
  box.className = "table";
  box.tabIndex = 0; // so that the keyboard can scroll it
  return box;
}

function cellElement(tag, inline, aligned) {
  const made = filled(tag, inline);
  if (aligned) made.className = aligned;
  return made;
}

function codeBox({ language, text }) {
  const name = /^[\w+#.-]{1,24}$/.test(language) ? language : "";
  const code = parent("code", coloured(text, name).map(({ kind, text: part }) => (kind ? element("span", kind, part) : part)));
  const pre = parent("pre", [code]);
  pre.tabIndex = 0;
  const head = parent("figcaption", [element("span", "", name), button("Copy", "copy", (pressed) => copy(text, pressed))]);
  const box = parent("figure", [head, pre]);
  box.className = "code";
  return box;
}

// Copies `text` and says so on the button that was pressed.
export async function copy(text, pressed) {
  const done = (await copied(text)) ? "Copied" : "Not copied";
  pressed.textContent = done;
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

// Browsers give a page their clipboard over HTTPS and on the own machine only; elsewhere a selection is copied.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
