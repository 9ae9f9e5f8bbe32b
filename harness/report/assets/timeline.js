"use strict";
// The memory timeline of one run: stacked by group, phases as bands, the peak and the capacity marked.
// Only what is in view is drawn, at most one point a pixel: a million events stay smooth.
async function drawTimeline(id, run) {
  const element = document.getElementById(`${id}-timeline`);
  const history = await histories.read(run.history);
  const part = (name) => document.getElementById(`${id}-${name}`);
  const last = history.events - 1;
  const view = {
    from: -1, to: Math.max(last, 0), floor: false, capacity: false, moment: history.moment.event, time: histories.evenly(history.time),
  };
  let [drawn, drawnUnit] = [[], null];
  const shown = history.groups.map((_, group) => group).filter((group) =>
    history.baseline[group] > 0 || history.group.includes(group));
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

  function traces(points, unit) {
    const series = histories.groupsOver(history, points);
    const x = points.map(at);
    const areas = shown.map((group) => ({
      x,
      y: series[group].map((size) => size / unit.size),
      text: Array.from(series[group], harness.bytes),
      name: harness.escape(history.groups[group]),
      stackgroup: "allocated",
      line: { width: 0.5, color: harness.colours[group % harness.colours.length], shape: "hv" },
      fillcolor: harness.colours[group % harness.colours.length],
      fillpattern: {
        shape: harness.patterns[group % harness.colours.length], size: 6, solidity: 0.25, fillmode: "overlay",
        fgcolor: harness.colour("--ground"),
      },
      hovertemplate: "%{text}",
    }));
    if (showsReserved) {
      const sizes = points.map((event) => history.reserved[Math.max(event, 0)]);
      areas.push({
        x, y: sizes.map((size) => size / unit.size), text: sizes.map(harness.bytes), name: "reserved",
        mode: "lines", line: { color: harness.colour("--text"), width: 1.5, dash: "dot", shape: "hv" },
        hovertemplate: "%{text}",
      });
    }
    areas.push({
      x: [at(history.peak.event)], y: [history.peak.bytes / unit.size], name: "peak", mode: "markers",
      marker: { symbol: "diamond", size: 12, color: harness.colour("--text"), line: { color: harness.colour("--ground"), width: 2 } },
      hovertemplate: `peak ${harness.bytes(history.peak.bytes)}<extra></extra>`,
    });
    return areas;
  }

  function bands() {
    const shapes = [];
    const annotations = [];
    const pixels = element.clientWidth / Math.max(view.time ? 1e-9 : 1, at(view.to) - at(view.from));
    history.phases.forEach(([phase, start, end], i) => {
      // the state after event k is drawn from k to k + 1
      if (end <= view.from || start > view.to + 1) return;
      const [from, to] = [at(Math.max(start, view.from)), at(Math.min(end, view.to + 1))];
      if (phase === null || (to - from) * pixels < 2 || shapes.length > 200) return;
      shapes.push({
        type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: harness.colour("--line"), opacity: i % 2 ? 0.55 : 0.2, line: { width: 0 },
      });
      if ((to - from) * pixels > 8 * phase.length) {
        annotations.push({
          x: (from + to) / 2, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
          text: harness.escape(phase), font: { size: 12, color: harness.colour("--muted") },
        });
      }
    });
    return { shapes, annotations };
  }

  function make() {
    const points = picked();
    drawn = points;
    const totals = points.map((event) => (event < 0 ? history.start : history.total[event]));
    const most = Math.max(...totals, showsReserved ? Math.max(...points.map((event) => history.reserved[Math.max(event, 0)])) : 0);
    const top = view.capacity && run.capacity ? Math.max(run.capacity, most) : most;
    const bottom = view.floor ? Math.min(...totals) : 0;
    const unit = harness.axisUnit(top);
    drawnUnit = unit;
    const { shapes, annotations } = bands();
    shapes.push({
      type: "line", xref: "x", yref: "paper", x0: at(view.moment), x1: at(view.moment), y0: 0, y1: 1,
      line: { color: harness.colour("--text"), width: 1, dash: "dot" },
    });
    if (history.moment.ran_out && history.moment.event >= view.from && history.moment.event <= view.to + 1) {
      const x = at(history.moment.event + (view.time ? 0 : 1));
      shapes.push({
        type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: harness.colour("--warning"), width: 2 },
      });
      annotations.push({
        x, y: 0.97, xref: "x", yref: "paper", xanchor: x > (at(view.from) + at(view.to)) / 2 ? "right" : "left", showarrow: false,
        text: "out of memory", font: { color: harness.colour("--warning") }, bgcolor: harness.colour("--ground"),
      });
    }
    if (run.capacity) {
      const height = run.capacity / unit.size;
      shapes.push({
        type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: height, y1: height,
        line: { color: harness.colour("--warning"), width: 2, dash: "dash" },
      });
      if (run.capacity <= top * 1.05) {
        annotations.push({
          x: 1, y: height, xref: "paper", yref: "y", xanchor: "right", yanchor: "bottom", showarrow: false,
          text: `capacity ${harness.bytes(run.capacity)}`, font: { color: harness.colour("--warning") },
        });
      }
    }
    const margin = (top - bottom) * 0.05 || unit.size;
    return {
      data: traces(points, unit),
      layout: {
        hovermode: "x unified",
        dragmode: "zoom",
        margin: { t: 28, b: element.clientWidth < 600 ? 170 : 90 },
        legend: { traceorder: "normal" },
        shapes,
        annotations,
        xaxis: view.time
          ? { title: { text: "ms since the first event", standoff: 4 }, range: [at(view.from), at(view.to + 1)], tickformat: "," }
          : { title: { text: "allocations and frees, in order", standoff: 4 }, range: [view.from, view.to + 1], tickformat: ",d" },
        yaxis: {
          title: { text: unit.name }, fixedrange: true,
          range: [Math.max(0, bottom - margin) / unit.size, (top + margin) / unit.size],
        },
      },
    };
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
      const by = operator ? ` by the operator ${operator}` : "";
      const other = history.partner[view.moment];
      const [from, to] = change < 0 ? [other < history.events ? other : -1, view.moment] : [view.moment, other];
      line("p", `It ${verb} ${harness.bytes(Math.abs(change))} of ${what}${change < 0 ? ", allocated" : ""}${by} at`);
      line("div", stack.length ? stack.join("\n") : "(no stack was recorded)", "stack");
      line("p", `${lifetime(from, to)}.`, "note");
    }
    part("there").replaceChildren(lines);
    const slider = part("moment");
    slider.value = view.moment;
    slider.setAttribute("aria-valuetext", `${where}, ${harness.bytes(total)} allocated`);
  }

  // From which event to which an allocation is there, and how long that is.
  function lifetime(from, to) {
    const end = to < history.events ? `event ${harness.whole(to)}` : "the end";
    const start = from < 0 ? "before the recording" : `event ${harness.whole(from)}`;
    const known = history.time && from >= 0 && to < history.events;
    return `There from ${start} to ${end}${known ? `, ${harness.milliseconds((history.time[to] - history.time[from]) / 1000)}` : ""}`;
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
      const first = stack.find((frame) => frame.includes(".py:") && !frame.startsWith("torch/")) ?? stack[0] ?? "no stack";
      const [details, summary, body, life] = ["details", "summary", "div", "p"].map((tag) => document.createElement(tag));
      summary.textContent = `${harness.bytes(one.size)} of ${history.groups[one.group]}, ${first}`;
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
    let under = 0;
    for (const group of shown) {
      under += sizes[group];
      if (height < under) return group;
    }
    return null;
  }

  const eventOf = (point) => (point.data.stackgroup ? drawn[point.pointNumber] : eventAt(point.x));

  let clicked;
  const again = harness.draw(element, make, () => {
    element.on("plotly_hover", (hover) => tell(eventOf(hover.points[0])));
    element.on("plotly_click", (click) => {
      tell(eventOf(click.points[0]));
      const { yaxis } = element._fullLayout;
      const height = yaxis.p2c(click.event.clientY - element.getBoundingClientRect().top - yaxis._offset);
      list(groupAt(view.moment, height * drawnUnit.size));
      clearTimeout(clicked); // drawn at once, the second click of two would find another drawing
      clicked = setTimeout(again, 500);
    });
    element.on("plotly_doubleclick", () => clearTimeout(clicked));
    element.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) look(-1, last);
      else if (change["xaxis.range"] || change["xaxis.range[0]"] !== undefined) {
        // a double click, back to the first view, gives both ends at once
        const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (view.time) look(eventAt(from), eventAt(to));
        else look(from, to - 1);
      }
    });
  });

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
  tell(history.moment.event);
  list(null);
  element.dataset.ready = "true";
  return history;
}
