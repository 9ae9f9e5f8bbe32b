"use strict";
// How the pages draw with Chart.js: charts that follow the theme, the width and the printer, with a legend of
// buttons; and what Chart.js lacks: patterns, bands, lines and words in a chart, and a stretch chosen by the mouse.
(() => {
  const root = document.documentElement;
  const paperWidth = 700; // pixels between the margins of a sheet
  const paperHeight = 380; // of a tall chart: below a few lines, on the first sheet
  const every = [];
  Chart.defaults.animation = false;
  Chart.defaults.maintainAspectRatio = false;
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.font.size = 13;
  Chart.defaults.plugins.legend.display = false;

  function merged(base, extra) {
    const result = { ...base };
    for (const [key, value] of Object.entries(extra)) {
      const both = value && base[key] && [value, base[key]].every((v) => typeof v === "object" && !Array.isArray(v));
      result[key] = both ? merged(base[key], value) : value;
    }
    return result;
  }

  // A tile of a colour with its pattern: strokes in the colour of the ground, for whoever sees no colours.
  function tile(colour, pattern) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 12;
    const context = canvas.getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 12, 12);
    context.strokeStyle = context.fillStyle = harness.colour("--ground");
    context.lineWidth = 1.2;
    const lines = {
      "/": [[-3, 3, 3, -3], [-3, 15, 15, -3], [9, 15, 15, 9]],
      "\\": [[-3, 9, 3, 15], [-3, -3, 15, 15], [9, -3, 15, 3]],
      "-": [[0, 6, 12, 6]],
      "+": [[0, 6, 12, 6], [6, 0, 6, 12]],
    };
    lines.x = [...lines["/"], ...lines["\\"]];
    for (const [x, y, toX, toY] of lines[pattern] ?? []) {
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(toX, toY);
      context.stroke();
    }
    if (pattern === ".") for (const [x, y] of [[3, 3], [9, 9]]) context.fillRect(x - 1, y - 1, 2.4, 2.4);
    return canvas;
  }

  const tiles = new Map(); // forgotten with the theme
  function tileOf(colour, pattern) {
    const key = `${colour} ${pattern}`;
    if (!tiles.has(key)) {
      const canvas = tile(colour, pattern);
      tiles.set(key, { canvas, url: `url(${canvas.toDataURL()})` });
    }
    return tiles.get(key);
  }

  // What fills an area or a bar: for Chart.js, and as a background for what is HTML.
  function fill(colour, pattern = "") {
    return pattern ? document.createElement("canvas").getContext("2d").createPattern(tileOf(colour, pattern).canvas, "repeat") : colour;
  }

  function background(colour, pattern = "") {
    return pattern ? tileOf(colour, pattern).url : `linear-gradient(${colour}, ${colour})`;
  }

  // An axis: its title and what is special of it.
  function axis(title, extra = {}) {
    const grid = { color: harness.colour("--line") };
    return merged({ title: { display: Boolean(title), text: title }, grid, border: { color: harness.colour("--muted") } }, extra);
  }

  // The text of whoever hovers: a dataset's `told`, a string a point.
  const told = (item) => item.dataset.told?.[item.dataIndex] ?? item.formattedValue;

  function options(own) {
    const [text, raised, line] = ["--text", "--raised", "--line"].map(harness.colour);
    const tooltip = {
      backgroundColor: raised, borderColor: line, borderWidth: 1, titleColor: text, bodyColor: text, footerColor: text,
      callbacks: { title: () => "", label: told },
    };
    return merged({ color: text, plugins: { tooltip }, layout: { padding: { top: 4, right: 12 } } }, own);
  }

  // Words at a place in pixels, beside it where there is room: none covers what was written before. Of several
  // texts the first that has room; `sparing`: else none at all.
  function write(context, area, written, { text, x, y, places = ["right"], colour = "--text", ground, gap = 6, sparing = false }) {
    context.font = `12px ${Chart.defaults.font.family}`;
    const height = 14;
    const corners = (width) => ({
      right: [x + gap, y - height / 2], left: [x - gap - width, y - height / 2], top: [x - width / 2, y - gap - height],
      bottom: [x - width / 2, y + gap], "top right": [x + gap, y - gap - height], "bottom right": [x + gap, y + gap],
      "top left": [x - gap - width, y - gap - height], "bottom left": [x - gap - width, y + gap],
    });
    const tried = [text].flat().flatMap((words) => {
      const width = context.measureText(words).width;
      return places.map((place) => ({ words, width, corner: corners(width)[place] }));
    });
    const inside = ({ width, corner: [left, top] }) =>
      left >= area.left - 1 && left + width <= area.right + 12 && top >= 0 && top + height <= area.bottom + 1;
    const free = ({ width, corner: [left, top] }) => written.every((box) =>
      left + width < box.left || left > box.right || top + height < box.top || top > box.bottom);
    const found = tried.find((one) => inside(one) && free(one)) ?? (sparing ? null : tried.find(inside) ?? tried[0]);
    if (!found) return;
    const { words, width, corner: [left, top] } = found;
    written.push({ left, right: left + width, top, bottom: top + height });
    if (ground) {
      context.fillStyle = harness.colour("--ground");
      context.fillRect(left - 2, top, width + 4, height);
    }
    context.fillStyle = harness.colour(colour);
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(words, left, top);
  }

  // Bands {from, to, text, strong} along x below the data; over them lines {x} or {y} {colour, dash, width, text,
  // places}; a strip {bottom, top, text} across; and each dataset's `written` beside its bars or points.
  const marks = (state) => ({
    id: "marks",
    beforeDatasetsDraw({ ctx, chartArea: area, scales: { x } }) {
      ctx.save();
      for (const band of state.marks.bands ?? []) {
        const [left, right] = [band.from, band.to].map((at) => Math.min(area.right, Math.max(area.left, x.getPixelForValue(at))));
        ctx.globalAlpha = band.strong ? 0.55 : 0.2;
        ctx.fillStyle = harness.colour("--line");
        ctx.fillRect(left, area.top, right - left, area.height);
      }
      ctx.restore();
    },
    afterDatasetsDraw(chart) {
      const { ctx, chartArea: area, scales: { x, y } } = chart;
      const written = [];
      ctx.save();
      for (const line of state.marks.lines ?? []) {
        const upright = line.x !== undefined;
        const at = upright ? x.getPixelForValue(line.x) : y.getPixelForValue(line.y);
        if (upright ? at < area.left - 1 || at > area.right + 1 : at < area.top - 1 || at > area.bottom + 1) continue;
        ctx.strokeStyle = ctx.fillStyle = harness.colour(line.colour ?? "--text");
        ctx.lineWidth = line.width ?? 1;
        ctx.setLineDash(line.dash ?? []);
        ctx.beginPath();
        ctx.moveTo(upright ? at : area.left, upright ? area.top : at);
        ctx.lineTo(upright ? at : area.right, upright ? area.bottom : at);
        ctx.stroke();
        if (upright) written.push({ left: at, right: at, top: area.top + 20, bottom: area.bottom });
        if (!line.text) continue;
        const [left, top] = upright ? [at, area.top + 10] : [area.right, at];
        write(ctx, area, written, { text: line.text, x: left, y: top, places: line.places ?? ["top left", "bottom left"], colour: line.colour, ground: true, gap: 3 });
      }
      ctx.setLineDash([]);
      for (const { from, to, text } of state.marks.bands ?? []) {
        const [left, right] = [from, to].map((at) => Math.min(area.right, Math.max(area.left, x.getPixelForValue(at))));
        ctx.font = `12px ${Chart.defaults.font.family}`;
        if (ctx.measureText(text).width + 6 > right - left) continue;
        write(ctx, area, written, { text, x: (left + right) / 2, y: area.top, places: ["top"], colour: "--muted", gap: 3, sparing: true });
      }
      if (state.marks.strip) drawStrip(ctx, area, y, state.marks.strip);
      const named = (n) => chart.data.datasets[n].written && chart.isDatasetVisible(n);
      chart.data.datasets.forEach((dataset, n) => {
        if (!named(n) || !dataset.writtenAt) return; // no words over another point
        for (const { x: at, y: height } of chart.getDatasetMeta(n).data) written.push({ left: at - 6, right: at + 6, top: height - 6, bottom: height + 6 });
      });
      chart.data.datasets.forEach((dataset, n) => {
        if (!named(n)) return;
        chart.getDatasetMeta(n).data.forEach((element, i) => {
          const text = dataset.written[i];
          if (!text || Number.isNaN(element.x)) return;
          const bar = element.width !== undefined && !element.horizontal;
          const places = dataset.writtenAt ?? (bar ? ["top", "bottom"] : ["right", "left"]);
          const [gap, sparing] = dataset.writtenAt ? [9, true] : [5, false];
          write(ctx, area, written, { text, x: element.x, y: element.y, places, gap, sparing, ground: places.includes("left") && element.width !== undefined });
        });
      });
      ctx.restore();
    },
  });

  // What the axis leaves out, as a strip at its foot with the two strokes of a broken axis.
  function drawStrip(ctx, area, y, strip) {
    const [top, bottom] = [y.getPixelForValue(strip.top), area.bottom];
    ctx.fillStyle = strip.fill;
    ctx.fillRect(area.left, top, area.width, bottom - top);
    ctx.strokeStyle = harness.colour("--ground");
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.moveTo(area.left, top);
    ctx.lineTo(area.right, top);
    ctx.stroke();
    ctx.font = `600 12px ${Chart.defaults.font.family}`;
    const texts = strip.texts.filter((text) => ctx.measureText(text).width + 20 < area.width);
    const text = texts[0] ?? strip.texts.at(-1);
    ctx.fillStyle = harness.colour("--ground");
    ctx.fillRect(area.left + 6, top + 4, ctx.measureText(text).width + 8, 16);
    ctx.fillStyle = harness.colour("--text");
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillText(text, area.left + 10, top + 12.5);
    ctx.strokeStyle = harness.colour("--text");
    ctx.lineWidth = 1.5;
    for (const up of [-3, 3]) {
      ctx.beginPath();
      ctx.moveTo(area.left - 6, top + up + 3);
      ctx.lineTo(area.left + 6, top + up - 3);
      ctx.stroke();
    }
  }

  // A button for each name that hides what has it, and shows it again.
  function drawLegend(legend, made, hidden, again) {
    const entries = made.data.datasets.filter((dataset) => dataset.label && dataset.legend !== false);
    const names = entries.map((dataset) => dataset.label);
    legend.hidden = names.length < 2;
    if (legend.childElementCount !== names.length) {
      legend.replaceChildren(...names.map((name) => {
        const [button, swatch] = ["button", "span"].map((tag) => document.createElement(tag));
        button.type = "button";
        swatch.className = "swatch";
        button.append(swatch, name);
        button.addEventListener("click", () => {
          if (!hidden.delete(name)) hidden.add(name);
          again();
        });
        return button;
      }));
    }
    entries.forEach((dataset, i) => {
      const button = legend.children[i];
      button.setAttribute("aria-pressed", String(!hidden.has(dataset.label)));
      const swatch = button.firstChild;
      swatch.className = `swatch${dataset.swatch?.line ? " line" : ""}${dataset.swatch?.line === "dashed" ? " dashed" : ""}`;
      swatch.style.backgroundImage = dataset.swatch?.line ? "" : background(dataset.swatch?.colour ?? dataset.borderColor, dataset.swatch?.pattern);
      swatch.style.borderColor = dataset.swatch?.line ? dataset.borderColor : "";
    });
  }

  // Draw make(hidden)'s {type, data, options, marks, after} into the element, when it comes near the window, and
  // again when asked. `hidden` has the labels that the legend hides. `then` is told the first chart.
  // Returns a function that draws again.
  function draw(element, make, then) {
    const hidden = new Set();
    const state = { marks: {} };
    const legend = document.createElement("div");
    legend.className = "legend";
    element.after(legend);
    let chart = null;
    let canvas = null;
    function again() {
      if (!canvas) return;
      Chart.defaults.color = harness.colour("--text");
      const made = make(hidden);
      for (const dataset of made.data.datasets) dataset.hidden = hidden.has(dataset.label);
      state.marks = made.marks ?? {};
      state.after = made.after;
      if (chart) {
        chart.data = made.data;
        chart.options = options(made.options);
        chart.update("none");
      } else chart = new Chart(canvas, { type: made.type, data: made.data, options: options(made.options), plugins: [marks(state)] });
      chart.marks = state.marks; // for whoever asks what is drawn
      drawLegend(legend, made, hidden, again);
      made.after?.(chart);
    }
    function first() {
      if (canvas) return;
      canvas = document.createElement("canvas");
      element.append(canvas);
      watcher.disconnect();
      again();
      if (then) then(chart);
    }
    const watcher = new IntersectionObserver((seen) => {
      if (seen.some((one) => one.isIntersecting)) first();
    }, { rootMargin: "600px" });
    watcher.observe(element);
    const ownHeight = element.style.height;
    every.push({
      again,
      // paper shows what was never near the window, too, and is as narrow as it is
      print() {
        first();
        const beside = element.parentElement.clientWidth - element.clientWidth;
        const height = element.classList.contains("tall") ? paperHeight : element.clientHeight;
        element.style.height = `${height}px`;
        chart.resize(Math.min(paperWidth - (beside < paperWidth / 2 ? beside : 0), element.clientWidth), height);
        state.after?.(chart);
      },
      printed() {
        element.style.height = ownHeight;
        chart.resize();
      },
    });
    return again;
  }

  // Press and drag over a chart chooses a stretch: chosen(from, to) in values of x. A press alone is
  // clicked(x, y) in pixels; two are reset().
  function dragging(chart, { chosen, clicked, reset }) {
    const { canvas } = chart;
    const shade = document.createElement("div");
    shade.className = "chosen";
    shade.hidden = true;
    canvas.parentElement.append(shade);
    canvas.style.touchAction = "pan-y";
    let start = null;
    const at = (event) => {
      const { left, right } = chart.chartArea;
      return Math.min(right, Math.max(left, event.clientX - canvas.getBoundingClientRect().left));
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = at(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const [left, right] = [start, at(event)].sort((one, other) => one - other);
      shade.hidden = right - left < 4;
      Object.assign(shade.style, {
        left: `${left}px`, width: `${right - left}px`, top: `${chart.chartArea.top}px`, height: `${chart.chartArea.height}px`,
      });
    });
    const end = (event) => {
      if (start === null) return;
      const [left, right] = [start, at(event)].sort((one, other) => one - other);
      start = null;
      shade.hidden = true;
      if (event.type !== "pointerup") return;
      if (right - left >= 4) chosen(...[left, right].map((pixel) => chart.scales.x.getValueForPixel(pixel)));
      else clicked?.(left, event.clientY - canvas.getBoundingClientRect().top);
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("dblclick", reset);
  }

  harness.followers.push(() => {
    tiles.clear();
    for (const one of every) one.again();
  });

  // Paper is light.
  let theme;
  window.addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    harness.themed();
    for (const one of every) one.print();
  });
  window.addEventListener("afterprint", () => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    harness.themed();
    for (const one of every) one.printed();
  });

  Object.assign(harness, { draw, dragging, axis, fill, background });
})();
