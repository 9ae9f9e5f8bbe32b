"use strict";
// Memory and throughput against each swept field.
(() => {
  const symbols = ["circle", "square", "diamond", "triangle-up", "star", "hexagon"];

  // Numbers that span much are spread evenly; the ticks are the values that were asked for.
  function axis(figure, points) {
    const title = { text: harness.escape(figure.field) };
    if (!figure.numeric) return { type: "category", title };
    const values = [...new Set(points.map((point) => point.value))];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const log = low > 0 && high / low >= 4;
    return { type: log ? "log" : "linear", title, tickvals: values, ticktext: values.map(String), minor: { ticks: "" } };
  }

  function at(figure, point) {
    return figure.numeric ? point.value : point.text;
  }

  function named(series, what, several) {
    return several ? `${harness.escape(series.name)}: ${what}` : what;
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
      const traces = [];
      figure.series.forEach((series, i) => {
        const colour = harness.colours[i % 7];
        for (const [what, dash] of [["allocated", "solid"], ["reserved", "dash"]]) {
          const there = series.points.filter((point) => point[what] !== null);
          if (!there.length) continue;
          const common = {
            x: there.map((point) => at(figure, point)), y: there.map((point) => point[what] / unit.size),
            name: named(series, what, several), customdata: there.map((point) => harness.bytes(point[what])),
            hovertemplate: `${harness.escape(figure.field)} %{x}: %{customdata} ${what}<extra></extra>`,
          };
          const shade = several || what === "allocated" ? colour : harness.colours[1];
          traces.push(figure.numeric
            ? { ...common, mode: "lines+markers", line: { color: shade, dash }, marker: { symbol: symbols[i % 6], size: 9 } }
            : { ...common, type: "bar", text: common.customdata, textposition: "auto", marker: { color: shade, pattern: { shape: what === "reserved" ? "/" : "", solidity: 0.2, fillmode: "overlay" } } });
        }
        if (series.line && figure.numeric) {
          const values = series.points.map((point) => point.value);
          const [low, high] = [Math.min(...values), Math.max(...values)];
          const x = Array.from({ length: 65 }, (_, n) => low * (high / low) ** (n / 64));
          const y = x.map((value) => (series.line[0] + series.line[1] * value) / unit.size);
          const inside = x.map((_, n) => n).filter((n) => y[n] <= 1.1 * top / unit.size);
          traces.push({
            x: inside.map((n) => x[n]), y: inside.map((n) => y[n]), mode: "lines", name: "fitted line",
            line: { color: harness.colour("--text"), dash: "dot", width: 1.5 }, hoverinfo: "skip", showlegend: i === 0,
          });
        }
        const out = series.points.filter((point) => point.ended === "out of memory");
        if (out.length) {
          const height = (series.capacity ?? top) / unit.size;
          traces.push({
            x: out.map((point) => at(figure, point)), y: out.map(() => height), mode: "markers", type: "scatter",
            name: named(series, "out of memory", several), marker: { symbol: "x", size: 13, color: harness.colours[3] },
            hovertemplate: `${harness.escape(figure.field)} %{x}: out of memory<extra></extra>`,
          });
        }
      });
      return {
        data: traces,
        layout: {
          barmode: "group", showlegend: true, legend: { yref: "container", y: 0, yanchor: "bottom" }, margin: { b: 90 + 16 * traces.length }, xaxis: axis(figure, points),
          yaxis: { title: { text: unit.name }, rangemode: "tozero" },
          shapes: shown.map((size) => ({
            type: "line", xref: "paper", x0: 0, x1: 1, y0: size / unit.size, y1: size / unit.size,
            line: { color: harness.colour("--warning"), dash: "dash", width: 1.5 },
          })),
          annotations: shown.map((size) => ({
            xref: "paper", x: 0, xanchor: "left", y: size / unit.size, yanchor: "bottom", showarrow: false,
            text: `memory of the device: ${harness.bytes(size)}`, font: { color: harness.colour("--warning"), size: 12 },
          })),
        },
      };
    });
  }

  function speed(element, figure) {
    const points = figure.series.flatMap((series) => series.points);
    const several = figure.series.length > 1;
    harness.draw(element, () => ({
      data: figure.series.map((series, i) => {
        const there = series.points.filter((point) => point.speed !== null);
        const common = {
          x: there.map((point) => at(figure, point)), y: there.map((point) => point.speed),
          name: named(series, "tokens/s", several), hovertemplate: `${harness.escape(figure.field)} %{x}: %{y:,.0f} tokens/s<extra></extra>`,
        };
        return figure.numeric
          ? { ...common, mode: "lines+markers", line: { color: harness.colours[several ? i % 7 : 5] }, marker: { symbol: symbols[i % 6], size: 9 } }
          : { ...common, type: "bar", text: there.map((point) => Math.round(point.speed).toLocaleString("en")), textposition: "auto", marker: { color: harness.colours[several ? i % 7 : 5] } };
      }),
      layout: {
        barmode: "group", showlegend: several, legend: { yref: "container", y: 0, yanchor: "bottom" }, margin: { b: several ? 80 + 16 * figure.series.length : 60 }, xaxis: axis(figure, points),
        yaxis: { title: { text: "tokens/s" }, rangemode: "tozero", tickformat: "," },
      },
    }));
  }

  harness.data.figures.forEach((figure, i) => {
    memory(document.getElementById(`figure${i}-memory`), figure);
    speed(document.getElementById(`figure${i}-speed`), figure);
  });
  document.documentElement.dataset.ready = "true";
})();
