// From Markdown to a plain tree: what a model's text means. Makes no elements and knows no HTML, which stays text.
//
// It reads the part of GitHub's Markdown that chat models write: headings, lists, tables, quotes, rules, fenced code,
// emphasis, code, links. Every line break is kept. Text that is cut anywhere, as while it streams, reads as well as it
// can; the work grows with the length of the text, whatever is in it.

const DEPTH = 10; // of lists and quotes in each other, and of emphasis; deeper ones stay text
const LONGEST = 20000; // characters of a paragraph whose emphasis is looked for

// Returns the blocks of `text`: {type, source, ...}, where `source` is the part of the text that the block stands for.
export function blocksOf(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = READERS.map((reader) => reader(lines, at, depth)).find(Boolean);
    block.source = lines.slice(at, block.end).join("\n");
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

// -- blocks: each reader returns the block that begins at line `at`, with the line behind it as `end`, or nothing -------

function fence(lines, at) {
  const opening = lines[at].match(/^( {0,3})(`{3,}|~{3,})([^`]*)$/);
  if (!opening) return null;
  const [, indent, marks, info] = opening;
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => unindented(line, indent.length));
  const [language] = info.trim().split(/\s/);
  return { type: "code", language, text: code.join("\n"), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const found = lines[at].match(/^ {0,3}(#{1,6})[ \t]+(.*)$/);
  if (!found) return null;
  return { type: "heading", level: found[1].length, inline: inlineOf(found[2].trim().replace(/[ \t]#+$/, "")), end: at + 1 };
}

function rule(lines, at) {
  const marks = lines[at].replaceAll(/\s/g, "");
  return /^(-{3,}|\*{3,}|_{3,})$/.test(marks) ? { type: "rule", end: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (depth >= DEPTH || !isQuote(lines[at])) return null;
  let end = at;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { type: "quote", blocks: blocksOf(inner.join("\n"), depth + 1), end };
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const head = cellsOf(lines[at]);
  const marks = cellsOf(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line) => {
    const cells = cellsOf(line);
    return head.map((_, column) => inlineOf(cells[column] ?? ""));
  };
  const rows = lines.slice(at + 2, end).map(row);
  return { type: "table", head: row(lines[at]), aligned: marks.map(alignment), rows, end };
}

function list(lines, at, depth) {
  const first = markerOf(lines[at]);
  if (!first || depth >= DEPTH) return null;
  const items = [];
  let end = at;
  for (let marker = first; marker && marker.ordered === first.ordered && marker.indent < first.indent + 2; ) {
    const stop = endOfItem(lines, end, marker);
    const inner = [marker.rest, ...lines.slice(end + 1, stop).map((line) => unindented(line, marker.width))];
    items.push(blocksOf(inner.join("\n"), depth + 1));
    end = stop;
    const next = afterBlanks(lines, end);
    marker = next < lines.length && !rule(lines, next) ? markerOf(lines[next]) : null;
    if (marker && marker.ordered === first.ordered && marker.indent < first.indent + 2) end = next;
  }
  return { type: "list", ordered: first.ordered, start: first.start, items, end };
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end, depth)) end += 1;
  return { type: "paragraph", inline: inlineOf(lines.slice(at, end).join("\n").trim()), end };
}

const READERS = [fence, heading, rule, table, quote, list, paragraph];

// -- parts of blocks --------------------------------------------------------------------------------------------------

// Whether a line ends the paragraph before it.
function begins(lines, at, depth) {
  if (fence(lines.slice(at, at + 1), 0) || heading(lines, at) || rule(lines, at)) return true;
  return depth < DEPTH && (isQuote(lines[at]) || markerOf(lines[at]) !== null);
}

function isQuote(line) {
  return /^ {0,3}>/.test(line);
}

function unindented(line, most) {
  const indent = line.length - line.trimStart().length;
  return line.slice(Math.min(indent, most));
}

// A list item's marker: its indentation, the width before its text, and the text.
function markerOf(line) {
  const found = line.replaceAll("\t", "    ").match(/^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/);
  if (!found) return null;
  const [, indent, mark, rest = ""] = found;
  const ordered = mark.length > 1;
  return { indent: indent.length, width: indent.length + mark.length + 1, ordered, start: ordered ? parseInt(mark, 10) : 1, rest };
}

// The line behind an item: it goes on through indented lines, and through plain ones that follow its text at once.
function endOfItem(lines, at, { indent, rest }) {
  let end = at + 1;
  let open = rest !== "" && !/^(`{3,}|~{3,})/.test(rest);
  while (end < lines.length) {
    const line = lines[end];
    const next = line.trim() ? end : afterBlanks(lines, end);
    if (next >= lines.length) break;
    const indented = lines[next].length - lines[next].trimStart().length > indent + 1;
    if (!indented && !(open && next === end && !begins(lines, end, 0))) break;
    open = next === end;
    end = next + 1;
  }
  return end;
}

function afterBlanks(lines, at) {
  let next = at;
  while (next < lines.length && !lines[next].trim()) next += 1;
  return next;
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(mark) {
  if (mark.startsWith(":")) return mark.endsWith(":") ? "center" : "left";
  return mark.endsWith(":") ? "right" : "";
}

// -- text inside blocks -----------------------------------------------------------------------------------------------

const MARKS = /\\[!-/:-@[-`{-~]|`+|\*\*|__|~~|[*_]|!?\[|\bhttps?:\/\/[^\s<>`]+/g;
const LINK = /!?\[([^\]\n]{1,500})\]\(<?((?:[^\s()<>]|\([^\s()<>]*\)){1,2000})>?(?:[ \t]+"[^"\n]{0,500}")?\)/y;
const STYLES = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

// Returns what a line of text consists of: strings, and {type, ...} with `inline` or `text` inside.
export function inlineOf(text, depth = 0) {
  if (text.length > LONGEST || depth >= DEPTH) return [text];
  const parts = [];
  const unclosed = new Set(); // marks that close nowhere behind here
  let at = 0;
  const put = (part) => {
    if (typeof part === "string" && typeof parts.at(-1) === "string") parts[parts.length - 1] += part;
    else if (part !== "") parts.push(part);
  };
  for (let found; (found = nextMark(text, at)); ) {
    put(text.slice(at, found.index));
    const { part, end } = marked(text, found.index, found[0], depth, unclosed);
    put(part);
    at = end;
  }
  put(text.slice(at));
  return parts;
}

function nextMark(text, at) {
  MARKS.lastIndex = at;
  return MARKS.exec(text);
}

// The part that begins with a mark: the mark itself as text where nothing closes it.
function marked(text, at, mark, depth, unclosed) {
  const plain = { part: mark, end: at + mark.length };
  if (mark[0] === "\\") return { part: mark[1], end: at + 2 };
  if (mark[0] === "h") return address(mark, at);
  if (mark.endsWith("[")) return link(text, at, depth) ?? plain;
  if (unclosed.has(mark)) return plain;
  const end = mark[0] === "`" ? endOfCode(text, at, mark) : endOfStyle(text, at, mark);
  if (end === null) return plain; // a mark that opens nothing
  if (end < 0) {
    unclosed.add(mark);
    return plain;
  }
  const inner = text.slice(at + mark.length, end);
  const after = end + mark.length;
  if (mark[0] === "`") return { part: { type: "code", text: inner.replace(/^ (.*[^ ].*) $/s, "$1") }, end: after };
  return { part: { type: STYLES[mark], inline: inlineOf(inner, depth + 1) }, end: after };
}

function endOfCode(text, at, mark) {
  let end = text.indexOf(mark, at + mark.length);
  while (end >= 0 && text[end + mark.length] === "`") {
    let behind = end;
    while (text[behind] === "`") behind += 1;
    end = text.indexOf(mark, behind);
  }
  return end;
}

// Where emphasis closes; null where this mark cannot open any, -1 where none closes behind it.
function endOfStyle(text, at, mark) {
  const start = at + mark.length;
  if (!/\S/.test(text[start] ?? " ") || (mark[0] === "_" && isWord(text[at - 1]))) return null;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const [before, behind] = [text[end - 1], text[end + mark.length]];
    if (/\s/.test(before) || before === "\\" || (mark[0] === "_" && isWord(behind))) continue;
    if (mark.length === 1 && (behind === mark || before === mark)) {
      if (behind === mark) end += 1;
      continue;
    }
    return mark.length === 2 && behind === mark[0] ? end + 1 : end; // of three marks, the last two
  }
  return -1;
}

function isWord(char) {
  return char !== undefined && /[\p{L}\p{N}_]/u.test(char);
}

// A link, or an image as a link: nothing is fetched that nobody clicks on.
function link(text, at, depth) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  const href = found && safeAddress(found[2]);
  return href ? { part: { type: "link", href, inline: inlineOf(found[1], depth + 1) }, end: at + found[0].length } : null;
}

function address(found, at) {
  const shown = found.replace(/[.,;:!?"'*_)\]]+$/, (tail) => (tail[0] === ")" && found.includes("(") ? ")" : ""));
  const href = safeAddress(shown);
  if (!href) return { part: found, end: at + found.length };
  return { part: { type: "link", href, inline: [shown] }, end: at + shown.length };
}

// An address that a click may open: of the web or a mailbox, never of this server's own or a script.
function safeAddress(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  return url && ["https:", "http:", "mailto:"].includes(url.protocol) ? url.href : null;
}
