// Live pages: parts that take a while are fetched once; a run's page asks what is new, and replaces the sections that changed.
"use strict";
(() => {
  const text = async (path) => {
    const answer = await fetch(path, { cache: "no-store" }).catch(() => { throw new Error("the server does not answer"); });
    const words = await answer.text();
    if (answer.ok) return words;
    // Pages that say what is wrong say it in their first paragraph.
    const said = new DOMParser().parseFromString(words, "text/html").querySelector("p");
    throw new Error(said ? said.textContent : `${path}: ${answer.status}`);
  };
  for (const part of document.querySelectorAll("[data-part]")) {
    text(part.dataset.part).then(
      (html) => { part.innerHTML = html; },
      (error) => { part.textContent = `It cannot be shown: ${error.message}`; },
    );
  }

  // Tables: a click on a head sorts by its column, and a field above filters the rows.
  const value = (row, column) => {
    const words = row.cells[column].textContent.trim();
    const number = parseFloat(words.replace(/[\s\u202f#~]/g, ""));
    return Number.isNaN(number) ? [1, words] : [0, number];
  };
  const compare = ([kindA, a], [kindB, b]) => kindA - kindB || (a < b ? -1 : a > b ? 1 : 0);
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.title = "sort";
      const sort = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
        body.append(...(up ? rows : rows.reverse()));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
    const filter = document.createElement("input");
    Object.assign(filter, { type: "search", className: "filter", placeholder: "filter rows" });
    filter.setAttribute("aria-label", "Filter rows");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
    table.parentElement.before(filter);
  }
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
    });
  }

  const live = document.getElementById("live");
  if (!live) return;
  const run = live.dataset.run;
  const say = (state, words) => {
    live.className = state;
    live.querySelector(".text").textContent = words;
  };
  // While it runs, every second; afterwards now and then: it may be resumed.
  const OPEN = 1000, AT_REST = 10000;
  const turn = async () => {
    let wait = AT_REST;
    try {
      const news = JSON.parse(await text(`/api/run/${run}`));
      for (const [id, hash] of Object.entries(news.sections)) {
        const section = document.getElementById(id);
        if (!section) return location.reload();
        if (section.dataset.hash === hash) continue;
        section.innerHTML = await text(`/run/${run}/part/${id}`);
        section.dataset.hash = hash;
      }
      document.title = news.title;
      wait = news.state === "open" ? OPEN : AT_REST;
      say("on", `live, ${news.state}`);
    } catch (error) {
      say("off", `${error.message.replace(/\.$/, "")}; the page is as it was`);
    }
    setTimeout(turn, wait);
  };
  turn();
})();
