// Colours of code: which parts are comments, strings, numbers and words of the language. Knows families of languages, not
// their grammars, and makes no elements; a language that it does not know gets no colours.

const LONGEST = 50000; // characters that are coloured

const C_LIKE =
  "abstract as async await bool boolean break case catch char class const constexpr continue crate default defer delete do " +
  "double else enum export extends extern false final finally float fn for from func function go if impl implements import " +
  "in instanceof int interface let long loop match mod mut namespace new nil null nullptr of override package private " +
  "protected pub public return self short static string struct super switch template this throw throws trait true try type " +
  "typedef typename typeof undefined unsafe unsigned use using val var virtual void volatile where while yield";
const PYTHON =
  "False None True and as assert async await break case class continue def del elif else except finally for from global if " +
  "import in is lambda match nonlocal not or pass raise return self try while with yield";
const SHELL = "case do done elif else esac exit export fi for function if in local read return set shift source then until while";
const RUBY = "begin class def do else elsif end ensure false for if in module nil not or and require rescue return self then true unless until when while yield";
const SQL =
  "all alter and as asc between by case count create delete desc distinct drop else end exists from full group having in inner " +
  "insert into is join key left like limit not null offset on or order outer primary references right select set table then " +
  "union unique update values view when where with";

const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBERS = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)`;
const HASH = "#.*";
const SLASHES = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;

const FAMILIES = [
  family("c c++ cpp cs csharp dart go h hpp java javascript js jsx kotlin kt php rs rust scala swift ts tsx typescript", C_LIKE, SLASHES, "`[^`]*`?|" + STRINGS),
  family("py python python3", PYTHON, HASH, String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|` + STRINGS),
  family("bash console sh shell zsh dockerfile make makefile", SHELL, String.raw`(?<=^|\s)#.*`, STRINGS),
  family("rb ruby", RUBY, HASH, STRINGS),
  family("toml yaml yml ini", "true false null yes no on off", HASH, STRINGS),
  family("json json5 jsonc", "true false null", SLASHES, STRINGS),
  family("sql mysql postgresql sqlite", SQL, "--.*", STRINGS, true),
  family("css scss", "", String.raw`\/\*[^]*?(?:\*\/|$)`, STRINGS),
  family("html xml svg", "", "<!--[^]*?(?:-->|$)", STRINGS),
];

function family(names, words, comments, strings, anyCase = false) {
  const pattern = new RegExp(`(?<comment>${comments})|(?<string>${strings})|(?<number>${NUMBERS})|(?<word>[A-Za-z_$][\\w$]*)`, "gm");
  return { names: new Set(names.split(" ")), words: new Set(words.split(" ")), pattern, anyCase };
}

// Returns the parts of `code` in order: {kind, text}, where kind is comment, string, number, keyword, or "" for the rest.
export function coloured(code, language) {
  const known = FAMILIES.find(({ names }) => names.has(language.toLowerCase()));
  if (!known || code.length > LONGEST) return [{ kind: "", text: code }];
  const parts = [];
  let at = 0;
  for (const found of code.matchAll(known.pattern)) {
    const kind = kindOf(found, known);
    if (!kind) continue;
    if (found.index > at) parts.push({ kind: "", text: code.slice(at, found.index) });
    parts.push({ kind, text: found[0] });
    at = found.index + found[0].length;
  }
  if (at < code.length) parts.push({ kind: "", text: code.slice(at) });
  return parts;
}

function kindOf({ groups }, { words, anyCase }) {
  if (groups.word === undefined) return ["comment", "string", "number"].find((kind) => groups[kind] !== undefined);
  return words.has(anyCase ? groups.word.toLowerCase() : groups.word) ? "keyword" : "";
}
