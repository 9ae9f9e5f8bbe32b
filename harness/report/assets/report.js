"use strict";
// Draws what the page has an element for.
(async () => {
  const runs = harness.data.runs;
  const drawn = runs.map(async (run, i) => {
    const id = `run${i}`;
    const at = (name) => document.getElementById(`${id}-${name}`);
    if (run.icicles.module) charts.icicle(at("modules"), run.icicles.module);
    if (run.icicles.code) charts.icicle(at("code"), run.icicles.code);
    if (run.segments) charts.segments(at("segments"), run.segments);
    if (run.phases) {
      if (at("times")) charts.phaseTimes(at("times"), run.phases);
      charts.phasePeaks(at("peaks"), run.phases);
    }
    if (run.answers) drawStacked(at("answers"), run.answers);
    if (run.roofline) charts.roofline(at("roofline"), run.roofline);
    return run.history ? drawTimeline(id, run) : null;
  });
  const read = await Promise.all(drawn);
  const overlay = document.getElementById("overlay");
  if (overlay) drawOverlay(overlay, runs, read);
  document.documentElement.dataset.ready = "true";
})();
