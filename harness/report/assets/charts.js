"use strict";
// The other charts of a run: the peak in boxes, segments, phases, answers, the roofline.
const charts = (() => {
  const order = ["data", "forward", "backward", "optimizer_step", "between", "evaluation", "generation", "saving", "checkpoint"];

  function made(tag, name, text) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Boxes in boxes, as wide as their bytes. A click on one makes it the whole width; the path above leads back.
  function icicle(element, boxes) {
    const { labels, parents, bytes } = boxes;
    const children = labels.map(() => []);
    parents.forEach((parent, i) => { if (parent >= 0) children[parent].push(i); });
    const branch = labels.map(() => -1); // its colour is that of the branch it lies in
    children[0]?.forEach((child, n) => { branch[child] = n; });
    parents.forEach((parent, i) => { if (parent > 0) branch[i] = branch[parent]; });

    function show(root) {
      const [path, rows] = [made("div", "path"), made("div", "boxes")];
      for (let box = root; box >= 0; box = parents[box]) {
        const step = made("button", "", `${labels[box]}, ${harness.bytes(bytes[box])}`);
        step.type = "button";
        const to = box;
        step.addEventListener("click", () => show(to));
        path.prepend(step);
      }
      let deepest = 0;
      const place = (box, left, depth) => {
        const share = bytes[box] / bytes[root];
        const shown = made(children[box].length ? "button" : "div", "box");
        shown.append(made("span", "", labels[box]), made("span", "size", harness.bytes(bytes[box])));
        shown.title = `${labels[box]}\n${harness.bytes(bytes[box])}, ${((100 * bytes[box]) / bytes[0]).toFixed(1)} % of all`;
        const colour = branch[box] < 0 ? harness.colour("--raised") : harness.colours[branch[box] % 7];
        Object.assign(shown.style, {
          left: `${100 * left}%`, width: `${100 * share}%`, top: `${2.6 * depth}rem`, backgroundColor: colour,
          color: branch[box] < 0 ? "inherit" : inkOn(harness.colours[branch[box] % 7]),
        });
        if (children[box].length) {
          shown.type = "button";
          shown.addEventListener("click", () => show(box));
        }
        rows.append(shown);
        deepest = Math.max(deepest, depth);
        let from = left;
        for (const child of children[box]) {
          if (bytes[child] / bytes[root] > 0.0005) place(child, from, depth + 1);
          from += bytes[child] / bytes[root];
        }
      };
      place(root, 0, 0);
      rows.style.height = `${2.6 * (deepest + 1)}rem`;
      element.replaceChildren(path, rows);
    }
    show(0);
  }

  // Black or white, whichever can be read on a colour.
  function inkOn(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.22 ? "#000000" : "#ffffff";
  }

  // A bar a segment, as long as the segment: what is allocated is filled, and the gaps are free.
  function segments(element, found) {
    const most = Math.max(...found.map((segment) => segment.size));
    element.replaceChildren(...found.map((segment) => {
      const [row, bar] = [made("div", "segment"), made("div", "bar")];
      const times = segment.count > 1 ? `${segment.count} × ` : "";
      row.append(made("span", "name", `${times}${segment.kind}, ${harness.bytes(segment.size)}`), bar);
      row.append(made("span", "size", `${harness.bytes(segment.free * segment.count)} free`));
      bar.style.width = `${Math.max(1, (100 * segment.size) / most)}%`;
      for (const [start, size] of segment.used) {
        const piece = made("div", "piece");
        piece.title = `${harness.bytes(size)} allocated, ${harness.bytes(start)} from the beginning`;
        Object.assign(piece.style, { left: `${(100 * start) / segment.size}%`, width: `${(100 * size) / segment.size}%` });
        bar.append(piece);
      }
      return row;
    }));
  }

  const across = { indexAxis: "y", interaction: { mode: "nearest", axis: "y", intersect: false } };

  function phaseTimes(element, phases) {
    const names = order.filter((name) => phases[name] && phases[name].time.median !== null);
    const times = names.map((name) => phases[name].time);
    const scale = Math.max(0, ...times.map((time) => time.median)) < 1e-3 ? 1e6 : 1e3;
    const spread = times.map((time) => (time.p10 === null ? null : [time.p10 * scale, time.p90 * scale]));
    const range = (time) => (time.p10 === null ? "" : `, ${harness.milliseconds(time.p10)} to ${harness.milliseconds(time.p90)}`);
    const told = names.map((name, i) => `${name}: ${harness.milliseconds(times[i].median)}${range(times[i])}`);
    harness.draw(element, () => {
      const datasets = [{
        label: "median", data: times.map((time) => time.median * scale), backgroundColor: harness.colours[0], borderColor: harness.colours[0],
        told, categoryPercentage: 0.7, barPercentage: 1, grouped: false,
        written: spread.some(Boolean) ? undefined : times.map((time) => harness.milliseconds(time.median)),
      }];
      if (spread.some(Boolean)) datasets.unshift({
        label: "10th to 90th percentile", data: spread, barThickness: 5, grouped: false, told,
        backgroundColor: harness.colour("--text"), borderColor: harness.colour("--text"),
        written: times.map((time) => harness.milliseconds(time.median)),
      });
      return {
        type: "bar",
        data: { labels: names, datasets },
        options: {
          ...across,
          scales: { x: harness.axis(scale === 1e3 ? "ms" : "µs", { beginAtZero: true, grace: "25%" }), y: harness.axis("", { grid: { display: false } }) },
        },
      };
    });
  }

  function phasePeaks(element, phases) {
    const names = order.filter((name) => phases[name]);
    const kinds = [["allocated", harness.colours[0], ""], ["reserved", harness.colours[1], "/"]];
    const most = Math.max(1, ...names.flatMap((name) => [phases[name].allocated ?? 0, phases[name].reserved ?? 0]));
    const unit = harness.axisUnit(most);
    harness.draw(element, () => ({
      type: "bar",
      data: {
        labels: names,
        datasets: kinds.filter(([key]) => names.some((name) => phases[name][key] !== null)).map(([key, colour, pattern]) => ({
          label: key, data: names.map((name) => (phases[name][key] === null ? null : phases[name][key] / unit.size)),
          told: names.map((name) => `${name} ${key} ${harness.bytes(phases[name][key])}`),
          written: names.map((name) => (phases[name][key] === null ? "" : harness.bytes(phases[name][key]))),
          backgroundColor: harness.fill(colour, pattern), borderColor: colour, swatch: { colour, pattern },
        })),
      },
      options: {
        ...across,
        scales: { x: harness.axis(unit.name, { beginAtZero: true, grace: "25%" }), y: harness.axis("", { grid: { display: false } }) },
      },
    }));
  }

  // Ticks at 1, 2 and 5 of each power of ten, each as what it stands for.
  const decades = (title, extra) => harness.axis(title, {
    type: "logarithmic", ...extra,
    afterBuildTicks: (scale) => { scale.ticks = scale.ticks.filter(({ value }) => [1, 2, 5].includes(Number(value.toExponential()[0])) && value.toExponential()[1] === "e"); },
    ticks: { callback: (value) => value.toLocaleString("en") },
  });

  function roofline(element, found) {
    const ridge = found.peak_flops / found.bandwidth;
    const at = found.points.map((point) => point.intensity);
    const [low, high] = [Math.min(ridge, ...at) / 4, Math.max(ridge, ...at) * 4];
    const tera = (value) => value / 1e12;
    const short = (value) => Number(value.toPrecision(3)).toLocaleString("en");
    const ceiling = [low, ridge, high].map((x) => ({ x, y: tera(Math.min(x * found.bandwidth, found.peak_flops)) }));
    harness.draw(element, () => ({
      type: "scatter",
      data: {
        datasets: [
          {
            label: "what the device allows", type: "line", data: ceiling, borderColor: harness.colour("--text"), borderWidth: 2, pointRadius: 0,
            told: ceiling.map(({ x, y }) => `${short(x)} FLOP/B: ${short(y)} TFLOP/s`), swatch: { line: "solid" },
          },
          ...found.points.map((point, i) => ({
            label: point.phase, data: [{ x: point.intensity, y: tera(point.reached) }], pointRadius: 7, pointHoverRadius: 9,
            pointStyle: ["circle", "rect", "rectRot", "triangle"][i % 4],
            backgroundColor: harness.colours[[5, 3, 1, 0][i % 4]], borderColor: harness.colours[[5, 3, 1, 0][i % 4]],
            told: [`${point.phase}: ${short(point.intensity)} FLOP/B, ${short(tera(point.reached))} TFLOP/s`],
            written: [point.phase], writtenAt: ["right", "bottom", "left", "top"],
          })),
        ],
      },
      options: { scales: { x: decades("FLOPs per byte moved", { min: low, max: high }), y: decades("TFLOP/s", { max: tera(found.peak_flops) * 1.5 }) } },
    }));
  }

  return { icicle, segments, phaseTimes, phasePeaks, roofline };
})();
