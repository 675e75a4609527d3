// The dialog that lists the chats which the browser keeps: to open one, or to delete some.

import { button, element } from "./elements.js";
import * as history from "./history.js";

export class Drawer {
  #dialog = document.getElementById("chats-dialog");
  #list = document.getElementById("chats-list");
  #open = "";

  // `opened` and `removed` are called with the id of a chat.
  constructor({ opened, removed }) {
    this.opened = opened;
    this.removed = removed;
    document.getElementById("chats-close").addEventListener("click", () => this.#dialog.close());
    document.getElementById("chats-delete").addEventListener("click", () => this.#removeAll());
  }

  // Shows the chats; the one that is `open` is marked.
  show(open) {
    this.#open = open;
    this.#draw();
    this.#dialog.showModal();
  }

  #draw() {
    const chats = history.all();
    this.#list.replaceChildren(...chats.map((chat) => this.#row(chat)));
    document.getElementById("chats-none").hidden = chats.length > 0;
    document.getElementById("chats-delete").hidden = chats.length === 0;
  }

  #row({ id, title, changed }) {
    const row = element("li");
    const open = button(title, "quiet", () => {
      this.#dialog.close();
      if (id !== this.#open) this.opened(id);
    });
    if (id === this.#open) open.setAttribute("aria-current", "true");
    const when = new Date(changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(element("span", "when", when));
    const drop = button("Delete", "quiet", () => this.#remove(id));
    drop.setAttribute("aria-label", `Delete ${title}`);
    row.append(open, drop);
    return row;
  }

  #remove(id) {
    this.removed(id); // which keeps the chat, if it is open, for the last time
    history.remove(id);
    this.#draw();
  }

  #removeAll() {
    history.all().forEach(({ id }) => this.#remove(id));
  }
}
