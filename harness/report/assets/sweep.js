"use strict";
// Memory and throughput against each swept field.
(() => {
  const symbols = ["circle", "rect", "rectRot", "triangle", "star", "crossRot"];

  // Numbers that span much are spread evenly; the ticks are the values that were asked for.
  function axis(figure, points) {
    if (!figure.numeric) return harness.axis(figure.field, { type: "category", labels: [...new Set(points.map((point) => point.text))] });
    const values = [...new Set(points.map((point) => point.value))].sort((one, other) => one - other);
    const [low, high] = [values[0], values.at(-1)];
    const log = low > 0 && high / low >= 4;
    return harness.axis(figure.field, {
      type: log ? "logarithmic" : "linear", min: log ? low / 1.15 : low, max: log ? high * 1.15 : high, offset: values.length > 1 && !log,
      afterBuildTicks: (scale) => { scale.ticks = values.map((value) => ({ value })); },
      ticks: { callback: String, autoSkip: true },
    });
  }

  const at = (figure, point) => (figure.numeric ? point.value : point.text);
  const named = (series, what, several) => (several ? `${series.name}: ${what}` : what);

  // A line or bars of what `y` says of each point that has it.
  function drawn(figure, points, colour, pattern, i, y, told, written) {
    const there = points.filter((point) => y(point) !== null);
    const data = there.map((point) => ({ x: at(figure, point), y: y(point) }));
    const said = { data, told: there.map((point) => `${figure.field} ${at(figure, point)}: ${told(point)}`), borderColor: colour };
    return figure.numeric
      ? { ...said, type: "line", borderDash: pattern ? [7, 4] : [], pointStyle: symbols[i % 6], pointRadius: 5, backgroundColor: colour, swatch: { line: pattern ? "dashed" : "solid" } }
      : { ...said, type: "bar", maxBarThickness: 90, backgroundColor: harness.fill(colour, pattern), swatch: { colour, pattern }, written: there.map(written) };
  }

  function memory(element, figure) {
    const points = figure.series.flatMap((series) => series.points);
    const capacities = [...new Set(figure.series.map((series) => series.capacity).filter((size) => size !== null))];
    const most = Math.max(1, ...points.flatMap((point) => [point.allocated ?? 0, point.reserved ?? 0]));
    const failed = points.some((point) => point.ended === "out of memory");
    // The border is drawn when the memory comes near it; otherwise it would press the curve flat.
    const shown = capacities.filter((size) => failed || most > size / 3);
    const top = Math.max(most, ...shown);
    const unit = harness.axisUnit(top);
    const several = figure.series.length > 1;
    harness.draw(element, () => {
      const datasets = [];
      figure.series.forEach((series, i) => {
        for (const [what, pattern] of [["allocated", ""], ["reserved", "/"]]) {
          if (!series.points.some((point) => point[what] !== null)) continue;
          const colour = several || what === "allocated" ? harness.colours[i % 7] : harness.colours[1];
          const size = (point) => harness.bytes(point[what]);
          const y = (point) => (point[what] === null ? null : point[what] / unit.size);
          datasets.push({ label: named(series, what, several), ...drawn(figure, series.points, colour, pattern, i, y, (point) => `${size(point)} ${what}`, size) });
        }
        if (series.line && figure.numeric) {
          const values = series.points.map((point) => point.value);
          const [low, high] = [Math.min(...values), Math.max(...values)];
          const x = Array.from({ length: 65 }, (_, n) => low * (high / low) ** (n / 64));
          const line = x.map((value) => ({ x: value, y: (series.line[0] + series.line[1] * value) / unit.size }));
          datasets.push({
            label: "fitted line", legend: i === 0, type: "line", data: line.filter((point) => point.y <= (1.1 * top) / unit.size),
            borderColor: harness.colour("--text"), borderDash: [2, 3], borderWidth: 1.5, pointRadius: 0, pointHitRadius: 0, swatch: { line: "dashed" },
          });
        }
        const out = series.points.filter((point) => point.ended === "out of memory");
        if (out.length) datasets.push({
          label: named(series, "out of memory", several), type: "line", showLine: false,
          data: out.map((point) => ({ x: at(figure, point), y: (series.capacity ?? top) / unit.size })),
          told: out.map((point) => `${figure.field} ${at(figure, point)}: out of memory`),
          pointStyle: "crossRot", pointRadius: 8, pointBorderWidth: 3, borderColor: harness.colours[3], swatch: { colour: harness.colours[3], pattern: "x" },
        });
      });
      return {
        type: figure.numeric ? "line" : "bar",
        data: { datasets },
        marks: {
          lines: shown.map((size) => ({
            y: size / unit.size, colour: "--warning", dash: [8, 5], width: 1.5, text: `memory of the device: ${harness.bytes(size)}`, places: ["top left", "bottom left"],
          })),
        },
        options: {
          interaction: { mode: "nearest", intersect: false },
          scales: { x: axis(figure, points), y: harness.axis(unit.name, { beginAtZero: true, suggestedMax: (1.1 * top) / unit.size }) },
        },
      };
    });
  }

  function speed(element, figure) {
    const points = figure.series.flatMap((series) => series.points);
    const several = figure.series.length > 1;
    const whole = (point) => harness.whole(point.speed);
    harness.draw(element, () => ({
      type: figure.numeric ? "line" : "bar",
      data: {
        datasets: figure.series.map((series, i) => ({
          label: named(series, "tokens/s", several),
          ...drawn(figure, series.points, harness.colours[several ? i % 7 : 5], "", i, (point) => point.speed, (point) => `${whole(point)} tokens/s`, whole),
        })),
      },
      options: {
        interaction: { mode: "nearest", intersect: false },
        scales: { x: axis(figure, points), y: harness.axis("tokens/s", { beginAtZero: true, grace: "10%" }) },
      },
    }));
  }

  const plane = document.getElementById("plane");
  if (plane) drawPlane(plane, harness.data.plane);
  const categories = document.getElementById("categories");
  if (categories) {
    categories.style.height = `${6 + 1.7 * harness.data.categories.rows.length}rem`;
    drawStacked(categories, harness.data.categories);
  }
  harness.data.figures.forEach((figure, i) => {
    memory(document.getElementById(`figure${i}-memory`), figure);
    speed(document.getElementById(`figure${i}-speed`), figure);
  });
  document.documentElement.dataset.ready = "true";
})();
