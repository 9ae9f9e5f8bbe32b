"use strict";
// Filters the list, and compares what is checked.
(() => {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const rows = [...document.querySelectorAll("#entries tbody tr")];
  const compare = document.getElementById("compare");
  const most = harness.data.mostCompared;

  function checked() {
    return rows.filter((row) => row.querySelector("input:checked")).map((row) => row.dataset.name);
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const seen = rows.filter((row) => !row.hidden).length;
    const count = checked().length;
    compare.disabled = count < 2 || count > most;
    compare.textContent = count ? `Compare ${count}` : "Compare";
    document.getElementById("count").textContent =
      `${seen} of ${rows.length} shown${count > most ? `; at most ${most} can be compared` : ""}`;
  }

  filter.addEventListener("input", show);
  document.getElementById("entries").addEventListener("change", show);
  compare.addEventListener("click", () => {
    location.href = `/report?${new URLSearchParams(checked().map((name) => ["run", name]))}`;
  });
  show();
  document.documentElement.dataset.ready = "true";
})();
