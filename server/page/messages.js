// How messages look. What a model or a person wrote is only ever set as text; code between ``` gets a box of its own.

export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export class Message {
  #text = "";
  #reasoning = "";
  #drawing = false;

  // `name` is who speaks; the element goes to the end of `log`.
  constructor(log, role, name, text = "") {
    this.element = element("article", `message ${role}`);
    this.element.append(element("h3", "name", name));
    this.thoughts = element("details", "thoughts");
    this.thoughts.hidden = true;
    this.thoughts.append(element("summary", "", "Reasoning"), element("div", "prose"));
    this.body = element("div", "body");
    this.foot = element("p", "foot");
    this.element.append(this.thoughts, this.body, this.foot);
    log.append(this.element);
    this.add(text);
    this.draw();
  }

  get text() {
    return this.#text;
  }

  // More text; it is drawn with the next picture, however many pieces come before that.
  add(text, reasoning = "") {
    this.#text += text;
    this.#reasoning += reasoning;
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.#drawing = false;
    if (this.#reasoning) {
      this.thoughts.hidden = false;
      this.thoughts.lastElementChild.textContent = this.#reasoning;
    }
    const parts = split(this.#text);
    parts.forEach((part, place) => {
      const old = this.body.children[place];
      if (old?.textContent === part.text && old.className === part.className) return; // text only grows at its end
      const made = element(part.className === "code" ? "pre" : "div", part.className, part.text);
      if (part.language) made.dataset.language = part.language;
      if (old) old.replaceWith(made);
      else this.body.append(made);
    });
    while (this.body.children.length > parts.length) this.body.lastElementChild.remove();
    this.element.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
  }

  set busy(value) {
    this.element.setAttribute("aria-busy", String(value));
  }

  note(text) {
    this.foot.textContent = text;
  }

  fail(text) {
    this.foot.classList.add("problem");
    this.foot.setAttribute("role", "alert");
    this.foot.textContent = text;
  }
}

// Prose and code, in turn; code that has not ended yet goes to the end of the text.
function split(text) {
  const parts = [];
  let rest = text;
  while (rest) {
    const start = rest.search(/(^|\n)```/);
    if (start < 0) break;
    const prose = rest.slice(0, start);
    if (prose.trim()) parts.push({ className: "prose", text: prose.trim() });
    rest = rest.slice(start).replace(/^\n/, "");
    const opening = rest.match(/^```([^\n]*)\n?/);
    rest = rest.slice(opening[0].length);
    const end = rest.search(/(^|\n)```[ \t]*(\n|$)/);
    const code = end < 0 ? rest : rest.slice(0, end);
    parts.push({ className: "code", text: code, language: opening[1].trim() });
    rest = end < 0 ? "" : rest.slice(end).replace(/^\n?```[ \t]*/, "");
  }
  if (rest.trim()) parts.push({ className: "prose", text: parts.length ? rest.trim() : rest.trimStart() });
  return parts;
}
