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

  const dashes = [[], [8, 4], [2, 3], [8, 4, 2, 4], [14, 5], [14, 4, 2, 4]];

  function line(run, i, unit) {
    const [data, told] = [[], []];
    const pixels = Math.max(200, element.clientWidth);
    run.stretches.forEach(([, start, end], k) => {
      const [low, high] = [edges[k], edges[k + 1]];
      const [from, to] = [Math.max(low, view.from), Math.min(high, view.to)];
      if (from >= to || start === end) return;
      const event = (at) => start + ((at - low) / (high - low)) * (end - start);
      const room = Math.ceil((pixels * (to - from)) / (view.to - view.from));
      const first = Math.max(start, Math.floor(event(from)));
      for (const picked of histories.highest(run.history, first, Math.min(end - 1, Math.ceil(event(to))), room)) {
        data.push({ x: low + ((picked - start) / (end - start)) * (high - low), y: run.history.total[picked] / unit.size });
        told.push(`${run.name}: ${harness.bytes(run.history.total[picked])}`);
      }
    });
    return {
      label: run.name, data, told, stepped: true, pointRadius: 0, borderWidth: 2, borderDash: dashes[i % 6],
      borderColor: harness.colours[[0, 3, 5, 1, 2, 4][i % 6]], swatch: { line: i % 6 ? "dashed" : "solid" },
    };
  }

  function make() {
    const unit = harness.axisUnit(Math.max(...found.map((run) => run.history.peak.bytes)));
    const bands = found[0].stretches.map(([phase], k) => ({ text: phase, from: edges[k], to: edges[k + 1], strong: k % 2 === 1 }));
    const title = aligned ? "last recorded step, each phase at one width in all runs" : "share of each recording's events";
    return {
      type: "line",
      data: { datasets: found.map((run, i) => line(run, i, unit)) },
      marks: { bands: bands.filter(({ text, to, from }) => text && to > view.from && from < view.to) },
      options: {
        parsing: false, normalized: true, layout: { padding: { top: 22 } },
        interaction: { mode: "nearest", axis: "x", intersect: false },
        scales: {
          x: harness.axis(title, { type: "linear", min: view.from, max: view.to, ticks: { callback: (value) => `${Math.round(100 * value)} %` } }),
          y: harness.axis(unit.name, { beginAtZero: true }),
        },
      },
    };
  }

  const look = (from, to) => {
    [view.from, view.to] = [from, to];
    again();
  };
  const again = harness.draw(element, make, (chart) => harness.dragging(chart, { chosen: look, reset: () => look(0, 1) }));
}
