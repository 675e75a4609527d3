// One message of a chat as it is seen: a question as it was typed, an answer as Markdown; and what can be done with it.

import { blockElement, button, copy, element } from "./elements.js";
import { blocksOf } from "./markdown.js";

export class Message {
  #text = "";
  #reasoning = "";
  #drawing = false;
  #sources = []; // of the blocks that are drawn

  // `name` is who speaks; the element goes to the end of `log`. "edited", with the new text, and "again" are its events.
  constructor(log, role, name, text = "") {
    this.role = role;
    this.element = element("article", `message ${role}`);
    this.element.append(element("h3", "name", name));
    this.thoughts = element("details", "thoughts");
    this.thoughts.hidden = true;
    this.thoughts.append(element("summary", "", "Reasoning"), element("div", "plain"));
    this.body = element("div", role === "user" ? "body plain" : "body");
    this.foot = element("p", "foot");
    this.actions = element("div", "actions");
    this.actions.append(button("Copy", "copy", (pressed) => copy(this.#text, pressed)));
    if (role === "user") this.actions.append(button("Edit", "edit", () => this.#edit()));
    else this.actions.append(button("Regenerate", "again", () => this.#tell("again")));
    this.element.append(this.thoughts, this.body, this.foot, this.actions);
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
    if (this.role === "user") this.body.textContent = this.#text;
    else this.#drawBlocks(blocksOf(this.#text));
    this.#tell("drawn");
  }

  // Text grows at its end alone: blocks that were drawn before stay, and what is selected in them.
  #drawBlocks(blocks) {
    blocks.forEach((block, place) => {
      if (this.#sources[place] === block.source) return;
      const old = this.body.children[place];
      const made = blockElement(block);
      if (old) old.replaceWith(made);
      else this.body.append(made);
    });
    this.#sources = blocks.map(({ source }) => source);
    while (this.body.children.length > blocks.length) this.body.lastElementChild.remove();
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

  // Puts a field in the place of the text until it is sent or cancelled.
  #edit() {
    const form = element("form", "editor");
    const field = element("textarea");
    field.value = this.#text;
    field.setAttribute("aria-label", "Edited message");
    const send = element("button", "small send", "Send");
    const finish = () => {
      form.remove();
      this.body.hidden = this.actions.hidden = false;
    };
    form.append(field, button("Cancel", "quiet", finish), send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.#tell("edited", field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") finish();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.body.hidden = this.actions.hidden = true;
    this.body.after(form);
    field.focus();
  }

  #tell(name, detail = null) {
    this.element.dispatchEvent(new CustomEvent(name, { bubbles: true, detail }));
  }
}
