// The chats that this browser keeps, each under a key of its own, so that tabs do not overwrite each other's.

const PREFIX = "headrace.chat.";
const MOST = 100; // chats; the oldest go first

export function newId() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return `${high.toString(36)}${low.toString(36)}`;
}

// Returns the messages of a chat; none where it is not kept.
export function load(id) {
  return read(PREFIX + id)?.messages ?? [];
}

// Keeps a chat; older ones go where the browser has no room, and where it has none at all this one is not kept.
export function save(id, messages) {
  if (messages.length === 0) return;
  const value = JSON.stringify({ changed: Date.now(), title: titleOf(messages), messages });
  const others = all().filter((chat) => chat.id !== id);
  others.slice(MOST - 1).forEach((chat) => remove(chat.id));
  others.length = Math.min(others.length, MOST - 1);
  while (!stored(PREFIX + id, value) && others.length > 0) remove(others.pop().id);
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

// Returns {id, title, changed} of every chat, the latest first.
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const chats = keys.map((key) => ({ id: key.slice(PREFIX.length), ...read(key) }));
  return chats.filter(({ changed }) => changed).sort((one, other) => other.changed - one.changed);
}

function titleOf(messages) {
  return messages[0].content.trim().split("\n")[0].slice(0, 80);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // another program's
  }
}

function stored(key, value) {
  try {
    localStorage.setItem(key, value);
    return true;
  } catch {
    return false;
  }
}
