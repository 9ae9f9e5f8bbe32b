// The static page's answers: harness/ask by Pyodide, from files beside this one. Nothing comes from elsewhere.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const forgotten = new Set();
const questions = [];

async function archive(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name}: ${response.status}`);
  return response.arrayBuffer();
}

const ready = (async () => {
  const files = ["harness.zip", "pydantic_core.whl"].map(archive);
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href });
  for (const file of files) python.unpackArchive(await file, "wheel");
  return python.runPython("from harness import ask; ask.answered_as_json");
})();

async function answer({ number, what, query }) {
  try {
    const answered = await ready;
    if (!forgotten.delete(number)) postMessage({ number, answer: answered(what, query) });
  } catch (error) {
    postMessage({ number, failed: String(error.message ?? error).trim().split("\n").pop() });
  }
}

// One after the other, with a breath between two: what was forgotten meanwhile is not asked.
let working = false;
async function work() {
  working = true;
  while (questions.length) {
    await answer(questions.shift());
    await new Promise((resolve) => setTimeout(resolve));
  }
  working = false;
}

addEventListener("message", ({ data }) => {
  if (data.forget) {
    forgotten.add(data.forget);
    return;
  }
  questions.push(data);
  if (!working) work();
});
