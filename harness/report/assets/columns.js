"use strict";
// The memory history of a run, unpacked from the page (columns.py packed it).
const histories = (() => {
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float64: Float64Array };

  async function unpack(column) {
    const packed = Uint8Array.from(atob(column.data), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new types[column.type](await new Response(stream).arrayBuffer());
  }

  // change, total and reserved bytes, group and stack after each event; and the call tree.
  async function read(packed) {
    const names = ["sizes", "size", "group", "stack", "node_line", "node_parent", "reserved_at", "reserved"];
    const columns = Object.fromEntries(
      await Promise.all(names.map(async (name) => [name, await unpack(packed[name])])));
    const events = packed.events;
    const change = new Float64Array(events);
    const total = new Float64Array(events);
    const reserved = new Float64Array(events);
    const start = packed.baseline.reduce((sum, size) => sum + size, 0);
    let now = start;
    let step = -1;
    for (let i = 0; i < events; i++) {
      change[i] = columns.sizes[columns.size[i]];
      now += change[i];
      total[i] = now;
      while (step + 1 < columns.reserved_at.length && columns.reserved_at[step + 1] <= i) step++;
      reserved[i] = step < 0 ? now : columns.reserved[step];
    }
    return { ...packed, ...columns, change, total, reserved, start };
  }

  // The bytes of each group right after an event (-1: before the first).
  function groupsAt(history, event) {
    const { group, change } = history;
    const sizes = [...history.baseline];
    for (let i = 0; i <= event; i++) sizes[group[i]] += change[i];
    return sizes;
  }

  // The lines of a node's stack, innermost first.
  function stackOf(history, node) {
    const lines = [];
    for (; node !== 0; node = history.node_parent[node]) lines.push(history.lines[history.node_line[node]]);
    return lines;
  }

  // At most `count` events of from..to in order: the highest of each stretch, so that no peak is lost at this
  // width, and none at all when zoomed in as far as there are fewer events than pixels.
  function highest(history, from, to, count) {
    const events = to - from + 1;
    if (events <= count) return Array.from({ length: Math.max(0, events) }, (_, i) => from + i);
    const { total } = history;
    const picked = [];
    for (let bucket = 0; bucket < count; bucket++) {
      const end = from + Math.floor(((bucket + 1) * events) / count);
      let best = from + Math.floor((bucket * events) / count);
      for (let i = best + 1; i < end; i++) if (total[i] > total[best]) best = i;
      picked.push(best);
    }
    return picked;
  }

  // For each group, its bytes right after each of the picked events (ascending).
  function groupsOver(history, picked) {
    const { group, change } = history;
    const sizes = Float64Array.from(history.baseline);
    const series = history.baseline.map(() => new Float64Array(picked.length));
    let i = 0;
    for (let k = 0; k < picked.length; k++) {
      for (const event = picked[k]; i <= event; i++) sizes[group[i]] += change[i];
      for (let g = 0; g < series.length; g++) series[g][k] = sizes[g];
    }
    return series;
  }

  return { read, groupsAt, groupsOver, highest, stackOf };
})();
