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
