// The live panel: asks for the engine's figures once a second while somebody looks, and draws them.

import { getJson } from "./server.js";

const SECONDS = 60; // that the line shows
const show = (id, text) => {
  document.getElementById(id).textContent = text;
};

// Calls `told` with whether the server is well, what to say of it, and whether it answered at all.
export function watch(told) {
  const rates = [];
  const look = async () => {
    if (document.hidden) return;
    try {
      const load = await getJson("page/load");
      draw(load, rates);
      told(load.trouble === null, load.trouble ?? "ready");
    } catch (error) {
      if (error.status) told(false, error.message);
      else told(false, "server not reachable", false);
    }
  };
  const turn = async () => {
    await look();
    setTimeout(turn, 1000);
  };
  turn();
  document.addEventListener("visibilitychange", look);
}

function draw(load, rates) {
  rates.push(load.tokens_per_second);
  rates.splice(0, rates.length - SECONDS);
  show("tokens-per-second", load.tokens_per_second.toFixed(load.tokens_per_second < 100 ? 1 : 0));
  show("running", load.running + load.paused);
  show("queue", load.waiting);
  show("step-time", load.step_seconds ? `${(1000 * load.step_seconds).toFixed(1)} ms` : "–");
  show("pages", `${load.pages_held} of ${load.pages}`);
  show("pages-cached", load.pages_cached);
  show("cache-hits", load.cache_hit_rate === null ? "–" : `${Math.round(100 * load.cache_hit_rate)} %`);
  document.getElementById("pages-meter").value = load.pages_held / load.pages;
  document.getElementById("cache-meter").value = load.cache_hit_rate ?? 0;
  const top = Math.max(...rates, 1);
  const points = rates.map((rate, place) => {
    const x = 100 - (100 * (rates.length - 1 - place)) / (SECONDS - 1);
    return `${x.toFixed(1)},${(23 - (22 * rate) / top).toFixed(1)}`;
  });
  document.querySelector("#spark polyline").setAttribute("points", points.join(" "));
}
