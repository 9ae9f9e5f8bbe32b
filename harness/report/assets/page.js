"use strict";
// What every page has: its data, sizes and times for reading, themes, sortable tables. drawing.js adds charts.
const harness = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const followers = []; // called when the theme changes

  // Okabe and Ito's palette and one more, and a pattern for whoever sees no colours.
  const colours = ["#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#009E73", "#999999", "#F0E442", "#882255"];
  const patterns = ["", "/", "x", "\\", "", ".", "-", "+", "/"];

  // Made once: a timeline writes thousands of numbers each time it is drawn.
  const [whole, tenths, hundredths] = [0, 1, 2].map((digits) =>
    new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven" }).format);

  // As harness/units.py writes them.
  function bytes(size) {
    if (size === null || size === undefined) return "-";
    const absolute = Math.abs(size);
    if (absolute < 2 ** 10 / 10) return `${whole(size)} B`;
    if (absolute < 2 ** 20 / 10) return `${tenths(size / 2 ** 10)} KiB`;
    if (absolute < 2 ** 30 / 10) return `${tenths(size / 2 ** 20)} MiB`;
    return `${hundredths(size / 2 ** 30)} GiB`;
  }

  // The unit of an axis that reaches to `most`: {name, size}.
  function axisUnit(most) {
    if (most < 2 ** 20 / 10) return { name: "KiB", size: 2 ** 10 };
    return most < 2 ** 30 / 10 ? { name: "MiB", size: 2 ** 20 } : { name: "GiB", size: 2 ** 30 };
  }

  function milliseconds(seconds) {
    if (seconds === null || seconds === undefined) return "-";
    if (seconds < 1e-3) return `${tenths(seconds * 1e6)} µs`;
    return seconds < 1 ? `${tenths(seconds * 1e3)} ms` : `${whole(seconds * 1e3)} ms`;
  }

  // For whoever writes HTML as text: what comes from a file must not be any.
  function escape(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  // A custom property of page.css as the colour that it is in this theme. Asking makes the browser lay out
  // the whole page, so each is asked once a theme.
  const known = new Map();
  function colour(name) {
    if (!known.has(name)) {
      const probe = document.createElement("span");
      probe.style.color = `var(${name})`;
      document.body.append(probe);
      known.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return known.get(name);
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  }

  function themed() {
    known.clear();
    document.getElementById("theme").textContent = isDark() ? "Light theme" : "Dark theme";
    for (const follow of followers) follow();
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    themed();
  });
  prefersDark.addEventListener("change", themed);
  themed();

  // Numbers are ordered by their value and not by their text; what is unknown comes last.
  function order(one, other) {
    if (one === "" || other === "") return (one === "") - (other === "");
    const numbers = [Number(one), Number(other)];
    return numbers.some(Number.isNaN) ? null : numbers[0] - numbers[1];
  }

  function sortBy(table, column, descending) {
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const sign = descending ? -1 : 1;
    const rows = [...body.rows].sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      const compared = order(one, other) ?? one.localeCompare(other);
      return one === "" || other === "" ? compared : sign * compared;
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      if (i === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => {
        // A first look at numbers wants the largest.
        const before = cell.getAttribute("aria-sort");
        sortBy(table, column, before ? before === "ascending" : cell.classList.contains("number"));
      });
    });
  }

  // a path of modules or files, to be broken into lines between its parts
  function breakable(path) {
    const parts = path.split(/(?<=[./])(?=[A-Za-z*_])/);
    return parts.flatMap((part, n) => (n ? [document.createElement("wbr"), part] : [part]));
  }

  return { data, whole, bytes, milliseconds, axisUnit, escape, breakable, colour, colours, patterns, isDark, themed, followers };
})();
