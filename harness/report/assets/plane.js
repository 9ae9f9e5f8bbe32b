"use strict";
// All cells of a sweep in one plane: tokens per second against memory, with the device's limit. Better is up
// and to the left.
function drawPlane(element, plane) {
  const most = Math.max(1, ...plane.cells.map((cell) => cell.peak));
  const capacity = plane.capacities.filter((size) => size < 3 * most || plane.out.length);
  const unit = harness.axisUnit(Math.max(most, ...capacity));
  const base = plane.cells.find((cell) => cell.base);
  // A difference with its sign, and speeds as a ratio.
  const beside = (cell) => {
    if (!base || cell === base) return "";
    const difference = cell.peak - base.peak;
    const ratio = cell.speed / base.speed;
    return `${difference < 0 ? "−" : "+"}${harness.bytes(Math.abs(difference))}, ${ratio.toFixed(2)} ×`;
  };
  const shapes = ["rectRot", "circle", "rect", "triangle", "star", "crossRot"];
  const fields = [...new Set(plane.cells.map((cell) => cell.field))];
  const set = (field) => {
    const cells = plane.cells.filter((cell) => cell.field === field);
    const n = fields.indexOf(field) % 7;
    return {
      label: field, data: cells.map((cell) => ({ x: cell.peak / unit.size, y: cell.speed })),
      told: cells.map((cell) => [cell.label, `${harness.bytes(cell.peak)}, ${harness.whole(cell.speed)} tokens/s`, beside(cell) && `${beside(cell)} of the base recipe`].filter(Boolean)),
      written: cells.map((cell) => [beside(cell) && `${cell.label}  ${beside(cell)}`, cell.label.length < 40 && cell.label, cell.short].filter(Boolean)),
      writtenAt: ["right", "left", "bottom right", "top right", "bottom left", "top left", "top", "bottom"],
      backgroundColor: harness.colours[n], borderColor: harness.colours[n], pointStyle: shapes[n % 6], pointRadius: 6, pointHoverRadius: 9,
      pointBorderWidth: n % 6 > 3 ? 2 : 1, swatch: { colour: harness.colours[n] },
    };
  };
  // The Pareto front: from the smallest to the fastest.
  const front = () => {
    const cells = plane.best.map((label) => plane.cells.find((cell) => cell.label === label));
    return {
      label: "none is faster with as little memory", data: cells.map((cell) => ({ x: cell.peak / unit.size, y: cell.speed })),
      showLine: true, borderColor: harness.colour("--muted"), borderWidth: 1.5, borderDash: [4, 4], pointRadius: 0, pointHitRadius: 0,
      swatch: { line: "dashed" },
    };
  };
  harness.draw(element, () => ({
    type: "scatter",
    data: { datasets: [...fields.map(set), ...(plane.best.length ? [front()] : [])] },
    marks: {
      lines: capacity.map((size) => ({
        x: size / unit.size, colour: "--warning", dash: [8, 5], width: 2, text: `memory of the device: ${harness.bytes(size)}`, places: ["left", "right"],
      })),
    },
    options: {
      interaction: { mode: "nearest", intersect: true },
      scales: {
        x: harness.axis(`peak allocated, ${unit.name}`, { grace: "8%", suggestedMax: Math.max(0, ...capacity) / unit.size }),
        y: harness.axis("tokens/s", { beginAtZero: true, grace: "10%" }),
      },
    },
  }));
}
