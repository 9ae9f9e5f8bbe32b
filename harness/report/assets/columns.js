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
    const names = ["sizes", "size", "group", "stack", "module", "partner", "node_line", "node_parent", "reserved_at", "reserved"];
    const columns = Object.fromEntries(
      await Promise.all(names.map(async (name) => [name, await unpack(packed[name])])));
    const before = Object.fromEntries(
      await Promise.all(Object.entries(packed.before).map(async ([name, column]) => [name, await unpack(column)])));
    const time = packed.time_us && milliseconds(await unpack(packed.time_us));
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
    return { ...packed, ...columns, before, time, change, total, reserved, start };
  }

  // Each a little after the one before, where many fall in one microsecond: an axis needs their order.
  function milliseconds(times) {
    let last = -1;
    return times.map((microseconds) => (last = Math.max(microseconds / 1000, last + 1e-6)));
  }

  // Whether a time axis shows the events from the start: no pause between two of them is half of it.
  function evenly(time) {
    if (!time) return false;
    let pause = 0;
    for (let i = 1; i < time.length; i++) pause = Math.max(pause, time[i] - time[i - 1]);
    return pause < time.at(-1) / 2;
  }

  // The allocations live right after an event, of one group or (null) of all, the largest first, at most `most`;
  // and how many there are. `to` is the event that frees it: `events` for none. `from` -1: before the recording.
  function liveAt(history, event, group, most) {
    const { before, change, partner } = history;
    const found = [];
    for (let i = 0; i < before.size.length; i++) {
      if (before.freed[i] > event && (group === null || before.group[i] === group)) {
        found.push({ size: before.size[i], group: before.group[i], stack: before.stack[i], module: history.modules[before.module[i]], from: -1, to: before.freed[i] });
      }
    }
    for (let i = 0; i <= event; i++) {
      if (change[i] > 0 && partner[i] > event && (group === null || history.group[i] === group)) {
        found.push({ size: change[i], group: history.group[i], stack: history.stack[i], module: history.modules[history.module[i]], from: i, to: partner[i] });
      }
    }
    found.sort((one, other) => other.size - one.size || one.from - other.from);
    return { count: found.length, largest: found.slice(0, most) };
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

  // For each group, the bytes that it never falls below from one event to another.
  function lowestOver(history, from, to) {
    const { group, change } = history;
    const sizes = groupsAt(history, from);
    const lowest = [...sizes];
    for (let i = from + 1; i <= to; i++) {
      const now = (sizes[group[i]] += change[i]);
      if (now < lowest[group[i]]) lowest[group[i]] = now;
    }
    return lowest;
  }

  return { read, evenly, lowestOver, liveAt, groupsAt, groupsOver, highest, stackOf };
})();
