"use strict";
// The memory timeline of one run: stacked by group, phases as bands, the peak and the capacity marked.
// Only what is in view is drawn, at most one point a pixel: a million events stay smooth.
async function drawTimeline(id, run) {
  const element = document.getElementById(`${id}-timeline`);
  const history = await histories.read(run.history);
  const part = (name) => document.getElementById(`${id}-${name}`);
  const last = history.events - 1;
  const view = {
    from: -1, to: Math.max(last, 0), floor: false, capacity: false, moment: history.moment.event, time: !history.time_is_estimated && histories.evenly(history.time),
  };
  const column = document.createElement("div");
  column.className = "column";
  element.after(column);
  element.parentElement.classList.add("with-column");
  let [drawn, drawnAt] = [[], null];
  const timeTitle = history.time_is_estimated
    ? "ms, estimated: each phase as long as its estimate"
    : "ms since the first event";
  const shown = history.groups.map((_, group) => group).filter((group) =>
    history.baseline[group] > 0 || history.group.includes(group));
  // A wall that never moves is a strip from the beginning, and what moves has the height.
  view.floor = history.total.reduce((low, size) => Math.min(low, size), history.start) > history.peak.bytes / 3;
  const showsReserved = history.reserved.some((size, i) => size !== history.total[i]);

  // Where an event is on the axis: its number, or its milliseconds (one before the first is at the beginning).
  function at(event) {
    if (!view.time) return event;
    return history.time[Math.min(last, Math.max(0, Math.round(event)))];
  }

  // The last event that is not after a place on the axis.
  function eventAt(x) {
    if (!view.time) return Math.round(x);
    let [low, high] = [0, last];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (history.time[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function picked() {
    const from = Math.max(0, Math.floor(view.from));
    const to = Math.min(last, Math.ceil(view.to));
    const points = histories.highest(history, from, to, Math.max(200, element.clientWidth - 80));
    return view.from < 0 ? [-1, ...points] : points;
  }

  // The areas from the lowest group up, each filled down to the axis: the ones below are drawn over it.
  function areas(points, series, floors, unit, hidden) {
    const x = points.map(at);
    const sums = new Float64Array(points.length).fill(floors.reduce((sum, size) => sum + size, 0));
    return shown.map((group) => {
      const [name, colour] = [history.groups[group], harness.colours[group % harness.colours.length]];
      const pattern = harness.patterns[group % harness.colours.length];
      if (!hidden.has(name)) series[group].forEach((size, k) => { sums[k] += size - floors[group]; });
      return {
        label: name, data: x.map((place, k) => ({ x: place, y: sums[k] / unit.size })), told: Array.from(series[group], (size) => `${name} ${harness.bytes(size)}`),
        stepped: true, fill: "start", backgroundColor: harness.fill(colour, pattern), borderColor: colour, borderWidth: 0.5, pointRadius: 0,
        pointHoverRadius: 0, swatch: { colour, pattern },
      };
    });
  }

  function bands() {
    const found = [];
    const pixels = element.clientWidth / Math.max(view.time ? 1e-9 : 1, at(view.to) - at(view.from));
    history.phases.forEach(([phase, start, end], i) => {
      // the state after event k is drawn from k to k + 1
      if (phase === null || end <= view.from || start > view.to + 1) return;
      const [from, to] = [at(Math.max(start, view.from)), at(Math.min(end, view.to + 1))];
      if ((to - from) * pixels >= 2 && found.length <= 200) found.push({ from, to, text: phase, strong: i % 2 === 1 });
    });
    return found;
  }

  function make(hidden) {
    const points = picked();
    drawn = points;
    const series = histories.groupsOver(history, points);
    const reserved = points.map((event) => history.reserved[Math.max(event, 0)]);
    const seen = shown.filter((group) => !hidden.has(history.groups[group]));
    const sumOf = (k) => seen.reduce((sum, group) => sum + series[group][k], 0);
    const most = Math.max(1, ...points.map((_, k) => sumOf(k)), ...(showsReserved && !hidden.has("reserved") ? reserved : []));
    const top = view.capacity && run.capacity ? Math.max(run.capacity, most) : most;
    const lowest = view.floor ? histories.lowestOver(history, Math.max(-1, Math.floor(view.from)), Math.min(last, Math.ceil(view.to))) : [];
    const floors = history.groups.map((_, group) => (seen.includes(group) ? (lowest[group] ?? 0) : 0));
    const floor = floors.reduce((sum, size) => sum + size, 0);
    const unit = harness.axisUnit(top);
    const height = (top - floor) * 1.05 || unit.size;
    const strip = floor ? height * 0.09 : 0;
    const bottom = Math.max(0, floor - strip);
    const lines = [{ x: at(view.moment), dash: [2, 3] }];
    if (history.moment.ran_out && history.moment.event >= view.from && history.moment.event <= view.to + 1) {
      lines.push({ x: at(history.moment.event + (view.time ? 0 : 1)), width: 2, colour: "--warning", text: "out of memory", places: ["left", "right"] });
    }
    if (run.capacity) {
      lines.push({ y: run.capacity / unit.size, width: 2, dash: [8, 5], colour: "--warning", text: `capacity ${harness.bytes(run.capacity)}` });
    }
    drawnAt = { unit, floors, floor };
    const datasets = areas(points, series, floors, unit, hidden);
    if (showsReserved) {
      datasets.unshift({
        label: "reserved", data: points.map((event, k) => ({ x: at(event), y: reserved[k] / unit.size })), told: reserved.map((size) => `reserved ${harness.bytes(size)}`),
        stepped: true, borderColor: harness.colour("--text"), borderWidth: 1.5, borderDash: [2, 3], pointRadius: 0, pointHoverRadius: 0, swatch: { line: "dashed" },
      });
    }
    datasets.unshift({
      label: "peak", data: [{ x: at(history.peak.event), y: history.peak.bytes / unit.size }], told: [`peak ${harness.bytes(history.peak.bytes)}`],
      showLine: false, pointStyle: "rectRot", pointRadius: 7, pointHoverRadius: 8, backgroundColor: harness.colour("--text"),
      borderColor: harness.colour("--ground"), borderWidth: 2, swatch: { colour: harness.colour("--text") },
    });
    const held = shown.filter((group) => floors[group]).map((group) => `${history.groups[group]} ${harness.bytes(floors[group])}`);
    return {
      type: "line",
      after: showColumn,
      data: { datasets },
      marks: {
        bands: bands(), lines,
        strip: floor && {
          top: floor / unit.size, fill: harness.colour("--line"),
          texts: [`always there: ${held.join(" · ")}`, `always there: ${harness.bytes(floor)}`],
        },
      },
      options: {
        parsing: false, normalized: true, layout: { padding: { top: 22 } },
        interaction: { mode: "index", axis: "x", intersect: false },
        onResize: (chart) => requestAnimationFrame(() => showColumn(chart)),
        onHover: (event, _, chart) => {
          const { left, right } = chart.chartArea;
          if (event.type === "mousemove" && event.x >= left && event.x <= right) tell(nearest(chart.scales.x.getValueForPixel(event.x)));
        },
        plugins: { tooltip: { position: "nearest", itemSort: (one, other) => other.datasetIndex - one.datasetIndex, filter: (item) => item.dataset.label !== "peak" } },
        scales: {
          x: harness.axis(view.time ? timeTitle : "allocations and frees, in order", { type: "linear", min: at(view.from), max: at(view.to + 1), ticks: { maxRotation: 0, includeBounds: false } }),
          y: harness.axis(unit.name, {
            type: "linear", min: bottom / unit.size, max: (floor + height) / unit.size,
            ticks: { includeBounds: false, callback: (value) => (floor && value * unit.size < floor ? "" : value.toLocaleString("en")) },
          }),
        },
      },
    };
  }

  // What is there at the moment beside the timeline and at its scale: a moment itself is a pixel wide.
  function showColumn(chart = column.chart) {
    if (!chart?.chartArea) return;
    column.chart = chart;
    const { scales: { y }, chartArea: area } = chart;
    const height = (bytes) => Math.min(area.bottom, Math.max(area.top, y.getPixelForValue(bytes / drawnAt.unit.size)));
    const sizes = histories.groupsAt(history, view.moment);
    let under = drawnAt.floor;
    const name = document.createElement("div");
    name.className = "name";
    name.textContent = view.moment === history.peak.event ? "at the peak" : "at the moment";
    const pieces = shown.filter((group) => sizes[group] > drawnAt.floors[group] && chart.data.datasets.some((one) => one.label === history.groups[group] && !one.hidden)).map((group) => {
      const [bottom, top] = [height(under), height((under += sizes[group] - drawnAt.floors[group]))];
      const [piece, words] = ["button", "span"].map((tag) => document.createElement(tag));
      piece.type = "button";
      piece.title = words.textContent = `${history.groups[group]} ${harness.bytes(sizes[group])}`;
      piece.append(words);
      piece.addEventListener("click", () => list(group));
      words.hidden = bottom - top < 15;
      Object.assign(piece.style, {
        top: `${top}px`, height: `${bottom - top}px`,
        backgroundImage: harness.background(harness.colours[group % harness.colours.length], harness.patterns[group % harness.colours.length]),
      });
      return piece;
    });
    column.replaceChildren(name, ...pieces);
  }

  // The operator that Python or autograd called, where the recording has C++ frames.
  function operatorOf(stack) {
    let found = null;
    for (const frame of stack) {
      if (frame.includes(".py:") || frame.includes("::apply(")) break;
      found = /at::_ops::(\w+)::/.exec(frame)?.[1] ?? found;
    }
    return found;
  }

  // What is live at a moment, and what happened there: all text, whatever a file says.
  function tell(moment) {
    view.moment = Math.min(last, Math.max(-1, Math.round(moment)));
    const sizes = histories.groupsAt(history, view.moment);
    const total = sizes.reduce((sum, size) => sum + size, 0);
    const phase = history.phases.find(([, start, end]) => start <= view.moment && view.moment < end)?.[0];
    const lines = document.createDocumentFragment();
    const line = (tag, text, name) => {
      const made = document.createElement(tag);
      if (name) made.className = name;
      made.textContent = text;
      lines.append(made);
    };
    const where = view.moment < 0 ? "Before the first event" : `After event ${harness.whole(view.moment)}`;
    const reserved = view.moment >= 0 && showsReserved ? `, ${harness.bytes(history.reserved[view.moment])} reserved` : "";
    line("p", `${where}${phase ? `, in ${phase}` : ""}: ${harness.bytes(total)} allocated${reserved}`);
    line("p", shown.filter((group) => sizes[group]).map((group) => `${history.groups[group]} ${harness.bytes(sizes[group])}`).join(" · "), "note");
    if (view.moment >= 0) {
      const change = history.change[view.moment];
      const verb = change < 0 ? "frees" : "allocates";
      const stack = histories.stackOf(history, history.stack[view.moment]);
      const what = history.groups[history.group[view.moment]];
      const operator = operatorOf(stack);
      const module = history.modules[history.module[view.moment]];
      const by = `${module ? ` ${module.startsWith("(") ? "" : "of "}${module}` : ""}${operator ? ` by the operator ${operator}` : ""}`;
      const other = history.partner[view.moment];
      const [from, to] = change < 0 ? [other < history.events ? other : -1, view.moment] : [view.moment, other];
      line("p", `It ${verb} ${harness.bytes(Math.abs(change))} of ${what}${change < 0 ? ", allocated" : ""}${by} at`);
      line("div", stack.length ? stack.join("\n") : "(no stack was recorded)", "stack");
      line("p", `${lifetime(from, to)}.`, "note");
    }
    part("there").replaceChildren(lines);
    showColumn();
    const slider = part("moment");
    slider.value = view.moment;
    slider.setAttribute("aria-valuetext", `${where}, ${harness.bytes(total)} allocated`);
  }

  // From which event to which an allocation is there, and how long that is.
  function lifetime(from, to) {
    const end = to < history.events ? `event ${harness.whole(to)}` : "the end";
    const start = from < 0 ? "before the recording" : `event ${harness.whole(from)}`;
    const known = history.time && from >= 0 && to < history.events;
    return `There from ${start} to ${end}${known ? `, ${history.time_is_estimated ? "about " : ""}${harness.milliseconds((history.time[to] - history.time[from]) / 1000)}` : ""}`;
  }

  // The largest allocations at the moment, of one group or of all; each opens to its stack.
  function list(group) {
    const { count, largest } = histories.liveAt(history, view.moment, group, 12);
    const of = group === null ? "" : ` of ${history.groups[group]}`;
    const made = document.createDocumentFragment();
    const heading = document.createElement("p");
    const many = count === 1 ? `1 allocation${of} is` : `${harness.whole(count)} allocations${of} are`;
    const some = count > largest.length ? `; the largest ${largest.length}` : "";
    heading.textContent = count ? `${many} there at this moment${some}:` : `Nothing${of} is there at this moment.`;
    made.append(heading);
    for (const one of largest) {
      const stack = histories.stackOf(history, one.stack);
      const first = stack.find((frame) => frame.includes(".py:") && !frame.startsWith("torch/")) ?? stack[0] ?? (one.from < 0 ? "there before the recording" : "made by autograd or a library, outside Python");
      const module = one.module && (/^[\d.]+$/.test(one.module) ? `module ${one.module}` : one.module);
      const where = module && stack.length ? `${module}, ${first}` : module || first;
      const [details, summary, body, life] = ["details", "summary", "div", "p"].map((tag) => document.createElement(tag));
      summary.append(`${harness.bytes(one.size)} of ${history.groups[one.group]}, `, ...harness.breakable(where));
      life.textContent = `${lifetime(one.from, one.to)}.`;
      life.className = "note";
      body.textContent = stack.length ? stack.join("\n") : "(no stack was recorded)";
      body.className = "stack";
      details.append(summary, life, body);
      made.append(details);
    }
    part("live").replaceChildren(made);
  }

  // The group whose area is at a height, in bytes, at a moment; null above all of them.
  function groupAt(moment, height) {
    const sizes = histories.groupsAt(history, moment);
    let under = drawnAt.floor;
    if (height < under) return shown.find((group) => drawnAt.floors[group]);
    for (const group of shown) {
      under += sizes[group] - drawnAt.floors[group];
      if (height < under) return group;
    }
    return null;
  }

  // The event drawn at a place on the axis: of those that share a pixel, the one that is shown.
  function nearest(x) {
    let [low, high] = [0, drawn.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (at(drawn[middle]) <= x) low = middle;
      else high = middle - 1;
    }
    return drawn[low];
  }

  let clicked;
  const again = harness.draw(element, make, (chart) => harness.dragging(chart, {
    chosen: (from, to) => {
      clearTimeout(clicked);
      if (view.time) look(eventAt(from), eventAt(to));
      else look(from, to - 1);
    },
    clicked: (x, y) => {
      tell(nearest(chart.scales.x.getValueForPixel(x)));
      list(groupAt(view.moment, chart.scales.y.getValueForPixel(y) * drawnAt.unit.size));
      clearTimeout(clicked);
      clicked = setTimeout(again, 300);
    },
    reset: () => look(-1, last),
  }));

  function look(from, to) {
    const wanted = [Math.max(-1, Math.min(from, to)), Math.min(last, Math.max(from, to, from + 1))];
    if (wanted[0] === view.from && wanted[1] === view.to) return;
    [view.from, view.to] = wanted;
    again();
  }

  function zoom(factor) {
    const half = Math.max(4, ((view.to - view.from) * factor) / 2);
    const inside = view.moment >= view.from && view.moment <= view.to;
    const middle = inside ? view.moment : (view.from + view.to) / 2;
    look(middle - half, middle + half);
  }

  function toggle(name) {
    part(name)?.addEventListener("click", () => {
      view[name] = !view[name];
      part(name).setAttribute("aria-pressed", String(view[name]));
      again();
    });
  }

  part("in").addEventListener("click", () => zoom(1 / 3));
  part("out").addEventListener("click", () => zoom(3));
  part("all").addEventListener("click", () => look(-1, last));
  part("peak").addEventListener("click", () => {
    tell(history.moment.event);
    look(history.moment.event - 50, history.moment.event + 50);
    again();
  });
  part("moment").addEventListener("input", (input) => { tell(Number(input.target.value)); again(); });
  part("there-now").addEventListener("click", () => list(null));
  toggle("time");
  part("time")?.setAttribute("aria-pressed", String(view.time));
  toggle("floor");
  toggle("capacity");
  part("floor").setAttribute("aria-pressed", String(view.floor));
  tell(history.moment.event);
  list(null);
  element.dataset.ready = "true";
  return history;
}
