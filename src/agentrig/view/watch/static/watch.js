// Keeps an open page up to date: when the server says that a run changed, parts of the page are fetched again.

const live = document.querySelector(".live");
let waiting = null;

async function refresh(chosen = "[data-part]") {
  waiting = null;
  for (const old of document.querySelectorAll(chosen)) {
    const answer = await fetch(old.dataset.part, { headers: { "agentrig-part": "1" } });
    if (!answer.ok) continue;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.body.firstElementChild;
    if (!fresh) continue;
    for (const hole of fresh.querySelectorAll("[data-part]")) {
      const kept = old.querySelector(`[data-part="${CSS.escape(hole.dataset.part)}"]`);
      if (kept) hole.replaceWith(kept);  // it is fetched by itself
    }
    for (const closed of fresh.querySelectorAll("details[id]")) {
      const before = document.getElementById(closed.id);
      if (before) closed.open = before.open;
    }
    const focused = document.activeElement;
    const id = old.contains(focused) ? focused.id : "";
    old.replaceWith(fresh);
    if (id) document.getElementById(id)?.focus();
  }
  document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
}

function later() {
  if (waiting === null) waiting = setTimeout(() => refresh(), 100);
}

if (live) {
  const source = new EventSource(live.dataset.events);
  source.addEventListener("changed", later);
  source.addEventListener("open", () => { live.textContent = "live"; live.classList.remove("off"); });
  source.addEventListener("error", () => { live.textContent = "not connected"; live.classList.add("off"); });
}
refresh("[data-part][data-empty]");

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(location.href).then(
    () => { button.textContent = "copied"; },
    () => { button.textContent = location.href; },
  );
});

const keys = document.getElementById("keys");
document.querySelector("button[data-keys]").addEventListener("click", () => keys.showModal());

// j and k go to the next and the previous rollout, / to the search; ? shows the keys.
document.addEventListener("keydown", (event) => {
  if (keys.open || event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const way = { j: "a[rel=next]", k: "a[rel=prev]" }[event.key];
  if (way) document.querySelector(way)?.click();
  if (event.key === "?") keys.showModal();
  if (event.key === "/") {
    const search = document.querySelector("input[name=text]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});
