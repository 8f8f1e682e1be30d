// Keeps an open page up to date: when the server says that a run changed, parts of the page are fetched again.

const live = document.querySelector(".live");
let waiting = null;
let queue = Promise.resolve();

// One after the other: what is fetched last is what the address says.
function refresh(chosen = "[data-part]", other = false) {
  waiting = null;
  queue = queue.then(() => replace(chosen, other)).catch(() => {});  // the server has gone: the page says so
  return queue;
}

async function replace(chosen, other) {
  for (const old of document.querySelectorAll(chosen)) {
    const main = old.parentElement.localName === "main";
    const address = main ? location.pathname + location.search : old.dataset.part;
    const answer = await fetch(address, { headers: { "agentrig-part": "1" } });
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
    for (const form of other ? [] : fresh.querySelectorAll("form.filter[id]")) {
      const before = document.getElementById(form.id);
      if (before) form.replaceWith(before);  // somebody may be writing in it
    }
    for (const box of fresh.querySelectorAll("[type=checkbox][id]")) {
      const before = other ? null : document.getElementById(box.id);
      if (before) box.checked = before.checked;
    }
    for (const list of fresh.querySelectorAll("datalist[data-for]")) {  // of a field outside of the part
      const field = document.getElementById(list.dataset.for), chosen = field.value;
      field.replaceChildren(...list.cloneNode(true).children);
      field.value = chosen;
    }
    const focused = document.activeElement;
    const id = old.contains(focused) ? focused.id : "";
    old.replaceWith(fresh);
    if (id) document.getElementById(id)?.focus();
  }
  reading();
  document.dispatchEvent(new Event("refreshed"));
  document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
}

// While the server reads rollouts, a page that waits for them asks again.
function reading() {
  if (document.querySelector(".reading") && waiting === null) waiting = setTimeout(() => refresh(), 500);
}

// Shows another view of the open page, whose address somebody can copy or go back from.
export async function show(query) {
  history.pushState(null, "", `${location.pathname}?${query}`);
  await refresh("main > [data-part]", true);
}
window.addEventListener("popstate", () => { if (!location.hash) location.reload(); });

function later() {
  if (waiting === null) waiting = setTimeout(() => refresh(), 100);
}

if (live) {
  const source = new EventSource(live.dataset.events);
  const say = () => { live.textContent = live.dataset.label; live.classList.toggle("off", live.dataset.label !== live.dataset.live); };
  source.addEventListener("changed", (event) => { live.dataset.label = event.data; say(); later(); });
  source.addEventListener("open", say);
  source.addEventListener("error", () => { live.textContent = "not connected"; live.classList.add("off"); });
}
refresh("[data-part][data-empty]");
reading();

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.dataset.saved) return;
  event.preventDefault();
  const body = JSON.stringify(Object.fromEntries(new FormData(form)));
  const sent = fetch(form.dataset.saved, { method: "POST", headers: { "content-type": "application/json" }, body });
  const answer = await sent.catch(() => null);
  const said = form.querySelector("output");
  if (answer?.ok) {
    await refresh("main > [data-part]", true);
    document.querySelector("#note output").textContent = "saved";
  } else said.textContent = answer ? await answer.text() : "not saved: the page's server has ended";
});

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

// A table of many links is one stop of the Tab key; arrow keys go from cell to cell.
function oneStop() {
  for (const table of document.querySelectorAll("table.heat")) {
    for (const [i, link] of table.querySelectorAll("a").entries()) link.tabIndex = i ? -1 : 0;
  }
}
oneStop();
document.addEventListener("refreshed", oneStop);
document.addEventListener("keydown", (event) => {
  const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = event.target.closest("table.heat :is(td, th)");
  if (!way || !cell) return;
  event.preventDefault();
  const rows = cell.closest("table").rows;
  let [row, column] = [cell.parentElement.rowIndex + way[0], cell.cellIndex + way[1]];
  while (rows[row]?.cells[column]) {
    const link = rows[row].cells[column].querySelector("a");
    if (link) {
      event.target.tabIndex = -1;
      link.tabIndex = 0;
      link.focus();
      return;
    }
    [row, column] = [row + way[0], column + way[1]];
  }
});
