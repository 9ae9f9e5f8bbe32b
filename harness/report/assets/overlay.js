"use strict";
// The timelines of several runs over each other. Runs whose last steps go through the same phases are laid so
// that each phase takes the same width in all; others by the fraction of their events.
function drawOverlay(element, runs, histories_) {
  const found = histories_.map((history, i) => ({ history, name: runs[i].name })).filter((run) => run.history?.events);
  if (!found.length) {
    element.parentElement.hidden = true;
    return;
  }

  // The [phase, start, end] of the last step: it begins after an optimizer step, and setup is no part of it.
  function lastStep(history) {
    let step = [];
    for (const run of history.phases) {
      if (step.length && step.at(-1)[0] === "optimizer_step") step = [];
      if (run[0] !== "setup") step.push(run);
    }
    return step;
  }

  for (const run of found) run.stretches = lastStep(run.history);
  const names = (run) => JSON.stringify(run.stretches.map(([phase]) => phase));
  const aligned = found.every((run) => run.stretches.length && names(run) === names(found[0]));
  if (!aligned) for (const run of found) run.stretches = [[null, 0, run.history.events]];

  // Each stretch's share of the width: the mean over the runs of its share of the step's events.
  const widths = found[0].stretches.map((_, k) => {
    const share = ({ stretches }) => (stretches[k][2] - stretches[k][1]) / (stretches.at(-1)[2] - stretches[0][1]);
    return found.reduce((sum, run) => sum + share(run), 0) / found.length;
  });
  const edges = widths.reduce((sums, width) => [...sums, sums.at(-1) + width], [0]);
  const view = { from: 0, to: 1 };

  function line(run, i, unit) {
    const x = [];
    const y = [];
    const text = [];
    const pixels = Math.max(200, element.clientWidth);
    run.stretches.forEach(([, start, end], k) => {
      const [low, high] = [edges[k], edges[k + 1]];
      const [from, to] = [Math.max(low, view.from), Math.min(high, view.to)];
      if (from >= to || start === end) return;
      const event = (at) => start + ((at - low) / (high - low)) * (end - start);
      const room = Math.ceil((pixels * (to - from)) / (view.to - view.from));
      const first = Math.max(start, Math.floor(event(from)));
      for (const picked of histories.highest(run.history, first, Math.min(end - 1, Math.ceil(event(to))), room)) {
        x.push(low + ((picked - start) / (end - start)) * (high - low));
        y.push(run.history.total[picked] / unit.size);
        text.push(harness.bytes(run.history.total[picked]));
      }
    });
    return {
      x, y, text, name: harness.escape(run.name), mode: "lines", hovertemplate: "%{text}",
      line: { color: harness.colours[[0, 3, 5, 1, 2, 4][i % 6]], width: 2, dash: harness.dashes[i % 6], shape: "hv" },
    };
  }

  function make() {
    const unit = harness.axisUnit(Math.max(...found.map((run) => run.history.peak.bytes)));
    const bands = found[0].stretches.map(([phase], k) => ({ phase, from: edges[k], to: edges[k + 1], k }));
    return {
      data: found.map((run, i) => line(run, i, unit)),
      layout: {
        hovermode: "x unified",
        margin: { t: 28 },
        shapes: bands.filter(({ phase }) => phase).map(({ from, to, k }) => ({
          type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
          fillcolor: harness.colour("--line"), opacity: k % 2 ? 0.55 : 0.2, line: { width: 0 },
        })),
        annotations: bands.filter(({ phase, from, to }) => phase && (to - from) * element.clientWidth > 8 * phase.length).map((band) => ({
          x: (band.from + band.to) / 2, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
          text: harness.escape(band.phase), font: { size: 12, color: harness.colour("--muted") },
        })),
        xaxis: {
          range: [view.from, view.to], tickformat: ".0%",
          title: {
            text: aligned ? "last recorded step, each phase at one width in all runs" : "share of each recording's events",
            standoff: 4,
          },
        },
        yaxis: { title: { text: unit.name }, rangemode: "tozero", fixedrange: true },
      },
    };
  }

  const again = harness.draw(element, make, () => {
    element.on("plotly_relayout", (change) => {
      const whole = change["xaxis.autorange"];
      if (!whole && change["xaxis.range[0]"] === undefined) return;
      const wanted = whole ? [0, 1] : [Math.max(0, change["xaxis.range[0]"]), Math.min(1, change["xaxis.range[1]"])];
      if (wanted[0] === view.from && wanted[1] === view.to) return;
      [view.from, view.to] = wanted;
      again();
    });
  });
}
