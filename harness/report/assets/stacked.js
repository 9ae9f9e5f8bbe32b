"use strict";
// A bar for each of `rows`, stacked by `parts`: bytes by name and row. `written`: words at the end of each bar.
// Here the peak by category: of the answers to one recipe, and of the cells of a sweep.
function drawStacked(element, { rows, parts, written }) {
  const names = Object.keys(parts);
  const shown = Object.entries(parts).filter(([, sizes]) => sizes.some((size) => size));
  const most = Math.max(1, ...rows.map((_, i) => shown.reduce((sum, [, sizes]) => sum + Math.max(0, sizes[i] ?? 0), 0)));
  const unit = harness.axisUnit(most);
  harness.draw(element, () => {
    const narrow = element.clientWidth < 500;
    return {
      type: "bar",
      data: {
        labels: rows,
        datasets: shown.map(([name, sizes], n) => {
          const index = name === "unexplained" ? 8 : names.indexOf(name);
          const [colour, pattern] = [harness.colours[index], name === "unexplained" ? "x" : harness.patterns[index]];
          return {
            label: name, data: sizes.map((size) => (size ?? 0) / unit.size),
            told: sizes.map((size, i) => `${rows[i]}: ${name} ${harness.bytes(size)}`),
            written: n === shown.length - 1 ? written : undefined,
            backgroundColor: harness.fill(colour, pattern), swatch: { colour, pattern },
            borderColor: harness.colour("--text"), borderWidth: name === "unexplained" ? 1 : 0,
          };
        }),
      },
      options: {
        indexAxis: "y", interaction: { mode: "nearest", intersect: true },
        scales: {
          x: harness.axis(unit.name, { stacked: true, grace: written ? "20%" : 0 }),
          y: harness.axis("", {
            stacked: true, grid: { display: false },
            ticks: { autoSkip: false, callback(value) { return shortened(this.getLabelForValue(value), narrow ? 22 : 40); } },
          }),
        },
      },
    };
  });

  function shortened(text, length) {
    return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
  }
}
