// The playground: joins the controls, the conversation and the server. Keeps both in this tab, so that a reload loses
// neither; closing the tab forgets them.

import { Message } from "./messages.js";
import { watch } from "./panel.js";
import { Chats, getJson, key } from "./server.js";

const CHAT = "headrace.chat";
const SETTINGS = "headrace.settings";
const find = (id) => document.getElementById(id);

const log = find("log");
const prompt = find("prompt");
const sampling = find("sampling");
const chats = new Chats();
let messages = []; // {role, content, name, note}
let running = null; // the answer that streams: {id, message, stopped}

// -- the conversation ------------------------------------------------------------------------------------------------

function send(text) {
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  show(messages.at(-1));
  keep();
  ask();
}

function ask() {
  const name = find("adapter").value || find("model").value;
  const system = sampling.elements.system.value.trim();
  const history = messages.map(({ role, content }) => ({ role, content }));
  const request = {
    model: name,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true,
    stream_options: { include_usage: true },
    ...chosen(),
  };
  const message = new Message(log, "assistant", name);
  message.busy = true;
  const times = { asked: performance.now(), first: 0, last: 0 };
  const answer = { message, name, stopped: false, usage: null, reason: null };
  running = answer;
  controls();
  scroll(true);
  answer.id = chats.ask(request, (frame) => {
    if (frame.type === "chunk") take(answer, frame.data, times);
    else end(answer, frame.error, times);
  });
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
  keepAnswer(answer, "interrupted");
}

function end(answer, error, times) {
  const { message } = answer;
  const failed = error && !answer.stopped;
  const note = failed ? error.message : answer.stopped ? "stopped" : summary(answer, times);
  message.draw();
  message.busy = false;
  if (failed) message.fail(note);
  else message.note(note);
  if (message.text || !error) keepAnswer(answer, note);
  else if (running === answer) messages.pop(); // the question: chats take turns, and this one had no answer
  if (running === answer) running = null;
  find("announcement").textContent = failed ? "" : `The answer has ended: ${note}`;
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
    parts.push(`first after ${(times.first - times.asked).toFixed(0)} ms`);
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

function clear() {
  stop();
  running = null;
  messages = [];
  log.replaceChildren();
  keep();
  controls();
  prompt.focus();
}

// -- what the tab keeps ----------------------------------------------------------------------------------------------

function keep() {
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem(CHAT); // too long to be kept: it goes on, but a reload will lose it
  }
}

// Keeps an answer as far as it came: a reload in its middle shows it with `note`.
function keepAnswer(answer, note) {
  if (running !== answer) return; // of a chat that was cleared
  if (messages.at(-1)?.role !== "assistant") messages.push({ role: "assistant", name: answer.name });
  Object.assign(messages.at(-1), { content: answer.message.text, note });
  clearTimeout(keepAnswer.timer);
  keepAnswer.timer = setTimeout(keep, 200);
}

function restore() {
  messages = JSON.parse(sessionStorage.getItem(CHAT) ?? "[]");
  messages.forEach(show);
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

function health(well, text) {
  find("health").textContent = text;
  find("health").classList.toggle("well", well);
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
  find("clear").addEventListener("click", clear);
  find("suggestions").addEventListener("click", ({ target }) => target.matches("button") && send(target.textContent));
  sampling.addEventListener("input", settle);
  sampling.addEventListener("submit", (event) => event.preventDefault());
  sampling.addEventListener("reset", () => setTimeout(settle));
  for (const id of ["model", "adapter"]) find(id).addEventListener("change", settle);
  log.addEventListener("drawn", () => scroll());
  window.addEventListener("pagehide", keep);
}

// Until the server answers, it is asked again every few seconds.
async function connect(wanted) {
  try {
    await admitted(wanted);
  } catch (error) {
    health(false, error.status ? error.message : "no answer");
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
