"use strict";
// Who answers: the same Python code in a worker beside this page, by Pyodide. There is no server to ask.
harness.asking = (() => {
  const worker = new Worker("worker.js", { type: "module" });
  const waiting = new Map();
  let asked = 0;

  worker.addEventListener("message", ({ data }) => {
    if (data.loading) document.documentElement.dataset.loading = data.loading;
    else {
      waiting.get(data.number)?.(data);
      waiting.delete(data.number);
    }
  });
  worker.addEventListener("error", () => {
    for (const tell of waiting.values()) tell({ failed: "this browser could not load Python: it needs WebAssembly and module workers." });
  });

  function ask(what, query, signal) {
    return new Promise((resolve, reject) => {
      const number = ++asked;
      waiting.set(number, ({ answer, failed }) => (failed ? reject(new Error(failed)) : resolve(JSON.parse(answer))));
      signal?.addEventListener("abort", () => {
        waiting.delete(number);
        worker.postMessage({ forget: number });
        reject(new DOMException("another question", "AbortError"));
      });
      worker.postMessage({ number, what, query });
    });
  }

  async function* simulated(query, signal) {
    const document_ = await ask("formula", query, signal);
    if (document_.answer) yield document_;
  }

  return {
    simulates: false,
    waitMs: 300,
    arithmetic: (query, signal) => ask("arithmetic", query, signal),
    cards: (query, signal) => ask("cards", query, signal),
    config: (text) => ask("config", text),
    simulated,
  };
})();
