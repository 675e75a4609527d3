// What the page asks the server: JSON with the key that this tab holds, and chats over one WebSocket.

const KEY = "headrace.key";
const PROTOCOL = "headrace"; // a socket cannot send headers: its key travels as a second protocol

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function getJson(path) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const answer = await fetch(new URL(path, document.baseURI), { headers, cache: "no-store" });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body.error?.message ?? `the server answered ${answer.status}`);
  return body;
}

export class Chats {
  // Many chats on one socket, which opens when it is needed and again after it was lost.
  #socket = null;
  #takers = new Map();
  #count = 0;

  // Sends a request; `take` gets its frames, of which the last is `done` or `error`.
  ask(request, take) {
    const id = String(++this.#count);
    this.#takers.set(id, take);
    this.#send({ type: "request", id, request });
    return id;
  }

  cancel(id) {
    if (this.#takers.has(id)) this.#send({ type: "cancel", id });
  }

  #send(frame) {
    const text = JSON.stringify(frame);
    const socket = this.#opened();
    if (socket.readyState === WebSocket.OPEN) socket.send(text);
    else socket.addEventListener("open", () => socket.send(text), { once: true });
  }

  #opened() {
    if (this.#socket) return this.#socket;
    const url = new URL("v1/chat/completions", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, key.get() ? [PROTOCOL, `${PROTOCOL}.key.${base64url(key.get())}`] : []);
    socket.addEventListener("open", () => (socket.opened = true));
    socket.addEventListener("message", (event) => this.#take(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => this.#lost(socket, event.reason));
    this.#socket = socket;
    return socket;
  }

  #take(frame) {
    const take = this.#takers.get(frame.id);
    if (frame.type === "done" || frame.type === "error") this.#takers.delete(frame.id);
    take?.(frame);
  }

  #lost(socket, reason) {
    if (this.#socket === socket) this.#socket = null;
    const takers = [...this.#takers.values()];
    this.#takers.clear();
    const message = reason || (socket.opened ? "the connection to the server was lost" : "server not reachable");
    for (const take of takers) take({ type: "error", error: { message, code: "disconnected" } });
  }
}

function base64url(text) {
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
