"use strict";
// Who answers: the server that this page came from. Arithmetic at once; a simulation as lines of JSON while it runs.
harness.asking = (() => {
  const headers = { "X-Harness": "ask" };

  async function document_(path, query, signal) {
    const response = await fetch(`${path}?${query}`, { headers, signal });
    if (!response.ok) throw new Error(`the server answered ${response.status}. Is harness serve still at work?`);
    return response.json();
  }

  async function* simulated(query, signal) {
    const response = await fetch(`/simulate?${query}`, { headers, signal });
    if (!response.ok) throw new Error(`the server answered ${response.status}.`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let begun = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (begun + value).split("\n");
      begun = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  }

  return {
    simulates: true,
    waitMs: 600,
    arithmetic: (query, signal) => document_("/answer", query, signal),
    cards: (query, signal) => document_("/cards", query, signal),
    simulated,
  };
})();
