"use strict";
// The memory timeline of one run: stacked by group, phases as bands, the peak and the capacity marked.
// Only what is in view is drawn, at most one point a pixel: a million events stay smooth.
async function drawTimeline(id, run) {
  const element = document.getElementById(`${id}-timeline`);
  const history = await histories.read(run.history);
  const part = (name) => document.getElementById(`${id}-${name}`);
  const last = history.events - 1;
  const view = { from: -1, to: Math.max(last, 0), floor: false, capacity: false, moment: history.peak.event };
  const shown = history.groups.map((_, group) => group).filter((group) =>
    history.baseline[group] > 0 || history.group.includes(group));
  const showsReserved = history.reserved.some((size, i) => size !== history.total[i]);

  function picked() {
    const from = Math.max(0, Math.floor(view.from));
    const to = Math.min(last, Math.ceil(view.to));
    const points = histories.highest(history, from, to, Math.max(200, element.clientWidth - 80));
    return view.from < 0 ? [-1, ...points] : points;
  }

  function traces(points, unit) {
    const series = histories.groupsOver(history, points);
    const areas = shown.map((group) => ({
      x: points,
      y: series[group].map((size) => size / unit.size),
      text: Array.from(series[group], harness.bytes),
      name: harness.escape(history.groups[group]),
      stackgroup: "allocated",
      line: { width: 0.5, color: harness.colours[group % 8], shape: "hv" },
      fillcolor: harness.colours[group % 8],
      fillpattern: {
        shape: harness.patterns[group % 8], size: 6, solidity: 0.25, fillmode: "overlay",
        fgcolor: harness.colour("--ground"),
      },
      hovertemplate: "%{text}",
    }));
    if (showsReserved) {
      const sizes = points.map((event) => history.reserved[Math.max(event, 0)]);
      areas.push({
        x: points, y: sizes.map((size) => size / unit.size), text: sizes.map(harness.bytes), name: "reserved",
        mode: "lines", line: { color: harness.colour("--text"), width: 1.5, dash: "dot", shape: "hv" },
        hovertemplate: "%{text}",
      });
    }
    areas.push({
      x: [history.peak.event], y: [history.peak.bytes / unit.size], name: "peak", mode: "markers",
      marker: { symbol: "diamond", size: 12, color: harness.colour("--text"), line: { color: harness.colour("--ground"), width: 2 } },
      hovertemplate: `peak ${harness.bytes(history.peak.bytes)}<extra></extra>`,
    });
    return areas;
  }

  function bands() {
    const shapes = [];
    const annotations = [];
    const pixels = element.clientWidth / Math.max(1, view.to - view.from);
    history.phases.forEach(([phase, start, end], i) => {
      // the state after event k is drawn from k to k + 1
      const [from, to] = [Math.max(start, view.from), Math.min(end, view.to + 1)];
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
    const totals = points.map((event) => (event < 0 ? history.start : history.total[event]));
    const most = Math.max(...totals, showsReserved ? Math.max(...points.map((event) => history.reserved[Math.max(event, 0)])) : 0);
    const top = view.capacity && run.capacity ? Math.max(run.capacity, most) : most;
    const bottom = view.floor ? Math.min(...totals) : 0;
    const unit = harness.axisUnit(top);
    const { shapes, annotations } = bands();
    shapes.push({
      type: "line", xref: "x", yref: "paper", x0: view.moment, x1: view.moment, y0: 0, y1: 1,
      line: { color: harness.colour("--text"), width: 1, dash: "dot" },
    });
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
        xaxis: { title: { text: "allocations and frees, in order", standoff: 4 }, range: [view.from, view.to + 1], tickformat: ",d" },
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
      line("p", `It ${verb} ${harness.bytes(Math.abs(change))} of ${what}${change < 0 ? ", allocated" : ""}${by} at`);
      line("div", stack.length ? stack.join("\n") : "(no stack was recorded)", "stack");
    }
    part("there").replaceChildren(lines);
    const slider = part("moment");
    slider.value = view.moment;
    slider.setAttribute("aria-valuetext", `${where}, ${harness.bytes(total)} allocated`);
  }

  const again = harness.draw(element, make, () => {
    element.on("plotly_hover", (hover) => tell(hover.points[0].x));
    element.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) look(-1, last);
      else if (change["xaxis.range[0]"] !== undefined) look(change["xaxis.range[0]"], change["xaxis.range[1]"] - 1);
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
    tell(history.peak.event);
    look(history.peak.event - 50, history.peak.event + 50);
    again();
  });
  part("moment").addEventListener("input", (input) => { tell(Number(input.target.value)); again(); });
  toggle("floor");
  toggle("capacity");
  tell(history.peak.event);
  element.dataset.ready = "true";
  return history;
}
