"use strict";
// The other charts of a run: the peak in boxes, segments, phases, answers, the roofline; and runs together.
const charts = (() => {
  const order = ["data", "forward", "backward", "optimizer_step", "between", "evaluation", "generation", "saving"];

  function icicle(element, boxes) {
    const names = boxes.labels.map(harness.escape);
    // The colour of a box is that of the branch it lies in.
    const branch = [];
    boxes.parents.forEach((parent, i) => {
      branch.push(parent < 0 ? -1 : parent === 0 ? boxes.parents.slice(0, i).filter((p) => p === 0).length : branch[parent]);
    });
    harness.draw(element, () => ({
      data: [{
        type: "icicle", ids: names.map((_, i) => String(i)), labels: names,
        parents: boxes.parents.map((parent) => (parent < 0 ? "" : String(parent))),
        values: boxes.bytes, branchvalues: "total", customdata: boxes.bytes.map(harness.bytes),
        texttemplate: "%{label}<br>%{customdata}", hovertemplate: "%{label}<br>%{customdata}, %{percentRoot} of the peak<extra></extra>",
        tiling: { orientation: "v" }, pathbar: { visible: true }, sort: false,
        marker: {
          colors: branch.map((b) => (b < 0 ? harness.colour("--raised") : harness.colours[b % 7])),
          line: { color: harness.colour("--ground"), width: 1 },
        },
        insidetextfont: { size: 12 },
      }],
      layout: { margin: { l: 0, r: 0, t: 4, b: 4 } },
    }));
  }

  function segments(element, found) {
    const rows = found.map((segment, i) => `${i + 1}. ${segment.kind}, ${harness.bytes(segment.size)}`);
    const used = { x: [], y: [], base: [], text: [] };
    found.forEach((segment, row) => segment.used.forEach(([start, size]) => {
      used.x.push(size / segment.size);
      used.base.push(start / segment.size);
      used.y.push(rows[row]);
      used.text.push(`${harness.bytes(size)} from ${harness.bytes(start)}`);
    }));
    element.style.height = `${Math.max(10, 4 + 1.2 * rows.length)}rem`;
    harness.draw(element, () => ({
      data: [
        {
          type: "bar", orientation: "h", name: "free", y: rows, x: found.map(() => 1), text: found.map((segment) =>
            harness.bytes(segment.size - segment.used.reduce((sum, [, size]) => sum + size, 0))),
          textposition: "none", hovertemplate: "%{text} free in all<extra></extra>",
          marker: { color: "rgba(0,0,0,0)", line: { color: harness.colour("--muted"), width: 1 } },
        },
        {
          type: "bar", orientation: "h", name: "allocated", ...used, textposition: "none",
          hovertemplate: "%{text} allocated<extra></extra>",
          marker: { color: harness.colours[0], line: { color: harness.colour("--ground"), width: 0.5 } },
        },
      ],
      layout: {
        barmode: "overlay", bargap: 0.25,
        yaxis: { autorange: "reversed", tickfont: { size: 11 } },
        xaxis: { title: { text: "share of the segment", standoff: 4 }, tickformat: ".0%", range: [0, 1] },
      },
    }));
  }

  function phaseTimes(element, phases) {
    const names = order.filter((name) => phases[name]?.time.median !== null && phases[name]);
    const times = names.map((name) => phases[name].time);
    const spread = times.some((time) => time.p10 !== null);
    const scale = Math.max(0, ...times.map((time) => time.median)) < 1e-3 ? 1e6 : 1e3;
    harness.draw(element, () => ({
      data: [{
        type: "bar", orientation: "h", x: times.map((time) => time.median * scale),
        // beside the name and not on the bar, where the percentiles are drawn
        y: names.map((name, i) => `${name}<br>${harness.milliseconds(times[i].median)}`), hovertemplate: "%{y}<extra></extra>",
        marker: { color: harness.colours[0] },
        error_x: spread ? {
          type: "data", symmetric: false, color: harness.colour("--text"),
          array: times.map((time) => (time.p90 - time.median) * scale),
          arrayminus: times.map((time) => (time.median - time.p10) * scale),
        } : undefined,
      }],
      layout: { margin: { b: 48 }, yaxis: { autorange: "reversed" }, xaxis: { title: { text: scale === 1e3 ? "ms" : "µs" }, rangemode: "tozero" } },
    }));
  }

  function phasePeaks(element, phases) {
    const names = [...order, "evaluation", "checkpoint"].filter((name) => phases[name]);
    const series = [["allocated", harness.colours[0], ""], ["reserved", harness.colours[1], "/"]];
    const most = Math.max(1, ...names.flatMap((name) => [phases[name].allocated ?? 0, phases[name].reserved ?? 0]));
    const unit = harness.axisUnit(most);
    harness.draw(element, () => ({
      data: series.filter(([key]) => names.some((name) => phases[name][key] !== null)).map(([key, color, shape]) => ({
        type: "bar", orientation: "h", name: key, y: names,
        x: names.map((name) => (phases[name][key] === null ? null : phases[name][key] / unit.size)),
        text: names.map((name) => harness.bytes(phases[name][key])), textposition: "outside", cliponaxis: false, hovertemplate: `%{y} ${key} %{text}<extra></extra>`,
        marker: { color, pattern: { shape, solidity: 0.2, fillmode: "overlay", fgcolor: harness.colour("--ground") } },
      })),
      layout: {
        barmode: "group", yaxis: { autorange: "reversed" },
        xaxis: { title: { text: unit.name, standoff: 4 }, range: [0, (most / unit.size) * 1.3] },
      },
    }));
  }

  function answers(element, found) {
    const parts = Object.entries(found.parts).filter(([, sizes]) => sizes.some((size) => size));
    const most = Math.max(1, ...found.sources.map((_, i) => parts.reduce((sum, [, sizes]) => sum + Math.max(0, sizes[i] ?? 0), 0)));
    const unit = harness.axisUnit(most);
    const names = Object.keys(found.parts);
    harness.draw(element, () => ({
      data: parts.map(([name, sizes]) => {
        const index = names.indexOf(name);
        const unexplained = name === "unexplained";
        return {
          type: "bar", orientation: "h", name, y: found.sources, x: sizes.map((size) => (size ?? 0) / unit.size),
          text: sizes.map(harness.bytes), textposition: "none", hovertemplate: `${name} %{text}<extra>%{y}</extra>`,
          marker: {
            color: unexplained ? harness.colours[8] : harness.colours[index],
            pattern: {
              shape: unexplained ? "x" : harness.patterns[index], solidity: 0.25, fillmode: "overlay", fgcolor: harness.colour("--ground"),
            },
            line: { color: harness.colour("--text"), width: unexplained ? 1 : 0 },
          },
        };
      }),
      layout: {
        barmode: "relative", margin: { b: element.clientWidth < 600 ? 220 : 80 }, yaxis: { autorange: "reversed" },
        xaxis: { title: { text: unit.name, standoff: 4 } },
      },
    }));
  }

  function roofline(element, found) {
    const ridge = found.peak_flops / found.bandwidth;
    const at = found.points.map((point) => point.intensity);
    const [low, high] = [Math.min(ridge, ...at) / 4, Math.max(ridge, ...at) * 4];
    const tera = (value) => value / 1e12;
    const decades = { type: "log", dtick: "D2", tickformat: "," }; // without a format 50 and 200 read 5 and 2
    harness.draw(element, () => ({
      data: [
        {
          x: [low, ridge, high], y: [low * found.bandwidth, found.peak_flops, found.peak_flops].map(tera), mode: "lines",
          name: "what the device allows", line: { color: harness.colour("--text"), width: 2 }, hovertemplate: "%{x:.3g} FLOP/B: %{y:.3g} TFLOP/s<extra></extra>",
        },
        ...found.points.map((point, i) => ({
          x: [point.intensity], y: [tera(point.reached)], mode: "markers+text", name: point.phase, text: [point.phase], textposition: i % 2 ? "top center" : "bottom center",
          marker: { size: 14, symbol: ["circle", "square", "diamond", "triangle-up"][i % 4], color: harness.colours[[5, 3, 1, 0][i % 4]] },
          hovertemplate: "%{text}: %{x:.3g} FLOP/B, %{y:.3g} TFLOP/s<extra></extra>",
        })),
      ],
      layout: {
        xaxis: { ...decades, title: { text: "FLOPs per byte moved", standoff: 4 } },
        yaxis: { ...decades, title: { text: "TFLOP/s" } },
      },
    }));
  }

  return { icicle, segments, phaseTimes, phasePeaks, answers, roofline };
})();
