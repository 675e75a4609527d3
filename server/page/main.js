// The playground: joins the controls, the conversation, the chats that are kept, and the server. The tab keeps which
// chat is open and how to sample, so that a reload loses neither; the browser keeps the chats.

import { Drawer } from "./drawer.js";
import * as history from "./history.js";
import { Message } from "./messages.js";
import { watch } from "./panel.js";
import { Chats, getJson, key } from "./server.js";

const OPEN = "headrace.open";
const SETTINGS = "headrace.settings";
const find = (id) => document.getElementById(id);

const log = find("log");
const prompt = find("prompt");
const sampling = find("sampling");
const chats = new Chats();
const drawer = new Drawer({ opened: open, removed: (id) => id === chat && open(null) });
let chat = history.newId(); // the id of the open chat
let messages = []; // {role, content, name, note}, one for each child of the log
let running = null; // the answer that streams: {id, message, turn, stopped}

// -- the conversation ------------------------------------------------------------------------------------------------

function send(text) {
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  show(messages.at(-1));
  ask();
}

function ask() {
  const name = find("adapter").value || find("model").value;
  const request = {
    model: name,
    messages: turns(),
    stream: true,
    stream_options: { include_usage: true },
    ...chosen(),
  };
  const turn = { role: "assistant", name, content: "", note: "interrupted" }; // as a reload in its middle finds it
  messages.push(turn);
  const message = new Message(log, "assistant", name);
  message.busy = true;
  const times = { asked: performance.now(), first: 0, last: 0 };
  const answer = { message, turn, stopped: false, usage: null, reason: null };
  running = answer;
  keep();
  controls();
  scroll(true);
  answer.id = chats.ask(request, (frame) => {
    if (frame.type === "chunk") take(answer, frame.data, times);
    else end(answer, frame.error, times);
  });
}

// What the model is sent. Chats take turns: a question that got no answer is left out, but for the last one.
function turns() {
  const system = sampling.elements.system.value.trim();
  const answered = messages.filter(({ content }, place) => content && messages[place + 1]?.content !== "");
  const history = answered.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...history] : history;
}

function take(answer, chunk, times) {
  const [choice] = chunk.choices;
  if (chunk.usage) answer.usage = chunk.usage;
  if (!choice) return;
  const { content, reasoning_content: reasoning } = choice.delta;
  answer.reason = choice.finish_reason ?? answer.reason;
  if (!content && !reasoning) return;
  times.last = performance.now();
  times.first ||= times.last;
  answer.message.add(content ?? "", reasoning ?? "");
  answer.turn.content = answer.message.text;
  if (running === answer) keepSoon();
}

function end(answer, error, times) {
  const { message, turn } = answer;
  const failed = error && !answer.stopped;
  turn.note = failed ? error.message : answer.stopped ? "stopped" : summary(answer, times);
  message.draw();
  message.busy = false;
  if (failed) message.fail(turn.note);
  else message.note(turn.note);
  if (running !== answer) return; // of a chat that was closed
  running = null;
  keep();
  find("announcement").textContent = failed ? "" : `The answer has ended: ${turn.note}`;
  controls();
  scroll();
}

function summary({ usage, reason }, times) {
  const parts = [];
  if (usage) {
    const seconds = (times.last - times.first) / 1000;
    const rate = seconds > 0 ? (usage.completion_tokens - 1) / seconds : 0;
    parts.push(`${usage.completion_tokens} tokens`);
    if (rate > 0) parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
    if (times.first) parts.push(`first after ${(times.first - times.asked).toFixed(0)} ms`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens}, ${cached} from cache`);
  }
  if (reason === "length") parts.push("cut at the limit of answer tokens");
  return parts.join(" · ");
}

function stop() {
  if (!running) return;
  running.stopped = true;
  chats.cancel(running.id);
}

// Forgets the messages from a place on, and asks again: for another answer, or with other words.
function again(element, text = null) {
  const place = [...log.children].indexOf(element);
  if (running || place < 0) return;
  messages.length = place;
  while (log.children.length > place) log.lastElementChild.remove();
  if (text === null) ask();
  else send(text);
}

// Opens a chat that is kept, or a new one.
function open(id) {
  stop();
  running = null;
  if (timer) keep();
  chat = id ?? history.newId();
  restoreChat();
  controls();
  scroll(true);
  prompt.focus();
}

// -- what is kept ----------------------------------------------------------------------------------------------------

let timer = 0;

function keep() {
  clearTimeout(timer);
  timer = 0;
  history.save(chat, messages);
  sessionStorage.setItem(OPEN, chat);
}

function keepSoon() {
  clearTimeout(timer);
  timer = setTimeout(keep, 500);
}

function restoreChat() {
  messages = history.load(chat);
  log.replaceChildren();
  messages.forEach(show);
  sessionStorage.setItem(OPEN, chat);
}

function restore() {
  chat = sessionStorage.getItem(OPEN) ?? chat;
  restoreChat();
  const settings = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
  for (const input of sampling.elements) if (input.name in settings) input.value = settings[input.name];
  return settings;
}

function show({ role, content, name = "You", note = "" }) {
  new Message(log, role, name, content).note(note);
}

// -- the controls ----------------------------------------------------------------------------------------------------

function chosen() {
  const fields = {};
  for (const { name, value, dataset } of sampling.elements) {
    if (name && name !== "system" && value !== dataset.off) fields[name] = Number(value);
  }
  return fields;
}

function controls() {
  find("send").hidden = running !== null;
  find("stop").hidden = running === null;
  find("welcome").hidden = log.childElementCount > 0;
  find("clear").disabled = log.childElementCount === 0;
  log.classList.toggle("busy", running !== null);
}

function settle() {
  for (const input of sampling.querySelectorAll("input[type=range]")) {
    input.parentElement.querySelector("output").value = input.value === input.dataset.off ? "off" : input.value;
  }
  const settings = { model: find("model").value, adapter: find("adapter").value };
  for (const { name, value } of sampling.elements) if (name) settings[name] = value;
  sessionStorage.setItem(SETTINGS, JSON.stringify(settings));
  find("welcome-model").textContent = find("adapter").value || find("model").value || "the model";
}

function scroll(always = false) {
  const page = document.scrollingElement;
  if (always || page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
}

// The models that the server lists; those with a parent are adapters.
async function list(wanted = {}) {
  const { data } = await getJson("v1/models");
  const names = (select, ids, chosenId) => {
    select.replaceChildren(...ids.map(([id, text]) => new Option(text, id, false, id === chosenId)));
  };
  const adapters = data.filter(({ parent }) => parent).map(({ id }) => [id, id]);
  names(find("model"), data.filter(({ parent }) => !parent).map(({ id }) => [id, id]), wanted.model);
  names(find("adapter"), [["", "none"], ...adapters], wanted.adapter);
  find("adapter-label").hidden = adapters.length === 0;
}

// Asks for the key until the server takes it.
async function admitted(wanted) {
  for (;;) {
    try {
      return await list(wanted);
    } catch (error) {
      if (error.status !== 401) throw error;
      find("key-problem").textContent = key.get() ? "The server did not take that key." : "";
      key.forget();
      key.set(await asked());
    }
  }
}

function asked() {
  const dialog = find("key-dialog");
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(find("key").value), { once: true });
  });
}

// Shows how the server is: `reached` is false where it gave no answer at all.
function health(well, text, reached = true) {
  find("health").textContent = text;
  find("health").classList.toggle("well", well);
  find("unreachable").hidden = reached;
}

// -- the beginning ---------------------------------------------------------------------------------------------------

function listen() {
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value;
    prompt.value = "";
    send(text);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) find("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  find("stop").addEventListener("click", stop);
  find("clear").addEventListener("click", () => open(null));
  find("chats").addEventListener("click", () => drawer.show(chat));
  find("suggestions").addEventListener("click", ({ target }) => target.matches("button") && send(target.textContent));
  sampling.addEventListener("input", settle);
  sampling.addEventListener("submit", (event) => event.preventDefault());
  sampling.addEventListener("reset", () => setTimeout(settle));
  for (const id of ["model", "adapter"]) find(id).addEventListener("change", settle);
  log.addEventListener("drawn", () => scroll());
  log.addEventListener("again", ({ target }) => again(target));
  log.addEventListener("edited", ({ target, detail }) => again(target, detail));
  window.addEventListener("pagehide", () => timer && keep());
}

// Until the server answers, it is asked again every few seconds.
async function connect(wanted) {
  try {
    await admitted(wanted);
  } catch (error) {
    if (error.status) health(false, error.message);
    else health(false, "server not reachable", false);
    setTimeout(() => connect(wanted), 3000);
    return;
  }
  settle();
  watch(health);
}

function main() {
  const narrow = matchMedia("(max-width: 56rem)").matches;
  for (const id of ["live", "settings"]) find(id).open = !narrow;
  const wanted = restore();
  listen();
  controls();
  scroll(true);
  connect(wanted);
}

main();
