"use strict";
// A form that asks as one types, and the answer beside it. Every number and every sentence comes from harness/ask:
// here things are drawn, and the question is kept in the address.
(() => {
  const { form } = harness.data;
  const { asking } = harness;
  const place = document.getElementById("questions");
  const ranks = ["parallel", "dp_shard", "dp_replicate", "tp"];
  const choices = new Set(form.groups.flatMap((group) => group.fields).filter((field) => field.kind === "choice").map((field) => field.name));
  const panels = [];
  const start = "recipe=llama-3.1-8b-qlora&hardware=rtx-4090";

  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // A long name of a field may go on behind an underscore.
  function breakable(name) {
    return name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);
  }

  function copy(text, button) {
    const before = button.textContent;
    navigator.clipboard.writeText(text).then(
      () => { button.textContent = "Copied"; },
      () => { button.textContent = "Not allowed here"; },
    ).finally(() => setTimeout(() => { button.textContent = before; }, 1500));
  }

  function save(blob, name) {
    const address = URL.createObjectURL(blob);
    h("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  function savePng(svg, name) {
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = h("canvas", { width: 2 * image.width, height: 2 * image.height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(blob, name), "image/png");
    });
    image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  }

  // A value of a recipe as an address spells it.
  const spelled = (value) => (value === null ? "null" : Array.isArray(value) ? `[${value.join(", ")}]` : String(value));

  class Panel {
    constructor(query, number) {
      this.said = new Map(new URLSearchParams(query));
      this.number = number;
      this.controls = new Map();
      this.aborting = new AbortController();
      this.element = h("section", { class: "panel", "aria-label": `Question ${number + 1}` }, (this.form = this.makeForm()), this.makeAnswer(), this.short);
    }

    get query() {
      return new URLSearchParams([...this.said].filter(([, value]) => value !== "")).toString();
    }

    // ---- the form

    field(name, label, control, { wide = false, about = "" } = {}) {
      const id = `${name}-${this.number}`;
      control.id = id;
      if (about) control.title = about;
      this.controls.set(name, control);
      return h("div", { class: wide ? "field wide" : "field" }, h("label", { for: id }, ...breakable(label)), control);
    }

    // What a change of a control says. Arithmetic is fast enough for every key.
    says(name, control, event = "input") {
      control.addEventListener(event, () => {
        if (control.type === "number" && !control.value && !control.validity.badInput) {
          if (control.dataset.empty) this.change({ [name]: control.dataset.empty });
          return; // somebody is about to write another number
        }
        if (control.validity && !control.validity.valid) return this.show({ error: `${name}: ${control.validationMessage}`, fixes: [] });
        return this.change({ [name]: control.value });
      });
      return control;
    }

    change(fields) {
      if (Object.keys(fields).some((name) => ranks.includes(name)) && this.said.delete("gpus")) {
        // from here on the fields say it
        for (const name of ranks) if (this.recipe) this.said.set(name, spelled(this.recipe[name]));
      }
      for (const [name, value] of Object.entries(fields)) this.said.set(name, value);
      this.ask();
    }

    makeForm() {
      const options = (pairs) => pairs.map(([value, text]) => h("option", { value }, text));
      const models = `models-${this.number}`;
      const recipe = h("select", {}, ...options([["", "(none: the fields' defaults)"], ...form.recipes.map((one) => [one.name, one.name])]));
      recipe.addEventListener("change", () => {
        const kept = (this.wrong ? [] : ["hardware", "memory", "tokens"]).filter((name) => this.said.has(name)).map((name) => [name, this.said.get(name)]);
        const model = recipe.value ? [] : [["model", this.recipe?.model ?? form.models[0]]];
        this.said = new Map([...(recipe.value ? [["recipe", recipe.value]] : model), ...kept]);
        this.ask();
      });
      const model = this.says("model", h("input", { type: "text", list: models, autocomplete: "off", spellcheck: "false" }), "change");
      const method = h("select", {}, ...options([["", "as the fields say"], ...Object.keys(form.methods).map((name) => [name, name])]));
      method.addEventListener("change", () => method.value && this.change(form.methods[method.value]));
      const hardware = this.says("hardware", h("select", {}, ...options(form.devices.map((one) => [one.name, `${one.title}, ${one.memory}`]))));
      const memory = this.says("memory", h("input", { type: "text", placeholder: "its own", autocomplete: "off" }), "change");
      const tokens = this.says("tokens", h("input", { type: "text", placeholder: "no number", autocomplete: "off" }), "change");
      const gpus = h("input", { type: "number", min: 1, max: 65536, step: 1, inputmode: "numeric" });
      gpus.addEventListener("input", () => {
        if (!gpus.validity.valid || !gpus.value) return;
        for (const name of ranks) this.said.delete(name);
        this.said.set("gpus", gpus.value);
        this.ask();
      });
      const config = asking.config ? h("input", { type: "file", accept: ".json,application/json" }) : null;
      config?.addEventListener("change", async () => {
        const read = await asking.config(await config.files[0].text());
        this.change({ model: read.path });
      });
      const first = h("fieldset", {}, h("legend", {}, "Recipe and card"), h("div", { class: "fields" },
        this.field("recipe", "begin with", recipe, { wide: true }),
        this.field("model", "model: a name, a Hugging Face id, a config or a folder", model, { wide: true, about: form.model.about }),
        config ? this.field("config", "or a config.json of yours, read by this page alone", config, { wide: true }) : null,
        h("datalist", { id: models }, ...form.models.map((name) => h("option", { value: name }))),
        this.field("method", "method", method),
        this.field("gpus", "cards", gpus, { about: "Of several cards each holds a part: FSDP2, unless the recipe says how it is divided." }),
        this.field("hardware", "card", hardware, { wide: true }),
        this.field("memory", "its memory, as in 16GiB", memory),
        this.field("tokens", "tokens in all, as in 35M", tokens),
      ));
      const groups = form.groups.map((group) => {
        const fields = h("div", { class: "fields" }, ...group.fields.map((field) => this.recipeField(field)));
        if (!group.folded) return h("fieldset", {}, h("legend", {}, group.name), fields);
        return h("fieldset", {}, h("details", {}, h("summary", {}, group.name), fields));
      });
      return h("form", { onsubmit: (event) => event.preventDefault(), "aria-label": `Question ${this.number + 1}, the form` }, first, ...groups);
    }

    recipeField(field) {
      const { name, about } = field;
      if (field.kind === "switch" || field.kind === "several") {
        const boxes = (field.kind === "switch" ? ["true"] : field.choices).map((choice) => {
          const box = h("input", { type: "checkbox", id: `${name}-${choice}-${this.number}`, value: choice, title: about });
          box.addEventListener("change", () => {
            const chosen = boxes.filter((one) => one.box.checked).map((one) => one.box.value);
            this.change({ [name]: field.kind === "switch" ? String(box.checked) : `[${chosen.join(", ")}]` });
          });
          const label = field.kind === "switch" ? name : choice;
          return { box, element: h("div", { class: "field check" }, h("label", { for: box.id, title: about }, box, h("span", {}, ...breakable(label)))) };
        });
        this.controls.set(name, boxes.map((one) => one.box));
        if (field.kind === "switch") return boxes[0].element;
        return h("div", { class: "field", role: "group", "aria-label": name }, h("span", { class: "label" }, name), ...boxes.map((one) => one.element));
      }
      if (field.kind === "choice") {
        const select = h("select", {}, ...field.choices.map((choice) => h("option", { value: choice }, choice)));
        return this.field(name, name, this.says(name, select), { about });
      }
      const number = field.kind === "number";
      const input = number
        ? h("input", { type: "number", min: field.least, step: field.whole ? 1 : "any", inputmode: field.whole ? "numeric" : "decimal", "data-empty": field.empty })
        : h("input", { type: "text", autocomplete: "off" });
      return this.field(name, name, this.says(name, input, number ? "input" : "change"), { about });
    }

    // The controls as the recipe is, but for the one that is being typed into.
    fill(said, impossible = {}) {
      this.recipe = said;
      const method = Object.entries(form.methods).find(([, one]) => ["adapter", "quantization"].every((name) => one[name] === said[name]));
      const fields = { ...said, recipe: this.said.get("recipe") ?? "", method: method?.[0] ?? "" };
      for (const [name, control] of this.controls) {
        const value = fields[name];
        const barred = impossible[name] ?? {};
        if (name === "config" || value === undefined) continue;
        if (Array.isArray(control)) {
          for (const box of control) {
            const isSwitch = control.length === 1 && typeof value === "boolean";
            box.checked = isSwitch ? value : value.includes(box.value);
            const why = barred[isSwitch ? String(!value) : box.value];
            box.closest(".field").classList.toggle("barred", Boolean(why));
            box.closest("label").title = why ?? box.title;
          }
          continue;
        }
        if (control.tagName === "SELECT") {
          for (const option of control.options) {
            const why = barred[option.value];
            if (choices.has(name)) option.textContent = why ? `${option.value} (not with the rest)` : option.value;
            option.title = why ?? "";
          }
        }
        if (control !== document.activeElement || control.tagName === "SELECT") control.value = value === null ? (control.tagName === "SELECT" ? "null" : "") : spelled(value);
      }
    }

    // ---- asking

    async ask() {
      this.aborting.abort();
      const aborting = (this.aborting = new AbortController());
      const { signal } = aborting;
      const { query } = this;
      keepInAddress();
      this.answer.classList.add("old");
      try {
        const found = await asking.arithmetic(query, signal);
        if (signal.aborted) return;
        this.show(found);
        if (found.error) return;
        this.progressing(asking.simulates ? "waiting to simulate" : "");
        await new Promise((resolve) => setTimeout(resolve, asking.waitMs));
        if (signal.aborted) return;
        for await (const found of asking.simulated(query, signal)) {
          if (signal.aborted) return;
          if (found.error) return this.progressing(`not simulated: ${found.error}`, false);
          if (found.answer) this.show(found.answer, found.report);
          const doing = found.ahead ? `${found.ahead} before this one` : found.doing ?? this.doing;
          this.doing = doing;
          if (found.over) this.progressing("", false);
          else if (asking.simulates) this.progressing(`${doing ?? "starting"}, ${Math.round(found.seconds ?? 0)} s`);
        }
      } catch (error) {
        if (error.name !== "AbortError") this.show({ error: `No answer: ${error.message}`, fixes: [] });
      }
    }

    progressing(words, going = Boolean(words)) {
      this.progress.replaceChildren(...(going ? [h("progress", { "aria-label": "The simulation is at work" })] : []), h("span", {}, words || this.from || ""));
    }

    // ---- the answer

    makeAnswer() {
      this.verdict = h("p", { class: "verdict", role: "status" }, asking.simulates ? "" : "Loading Python into this page…");
      this.progress = h("div", { class: "progress" });
      this.fixes = h("div", { class: "fixes" });
      this.bar = h("div", { class: "bar", role: "img", "aria-label": "No answer yet" });
      this.legend = h("ul", { class: "legend" });
      this.tiles = h("dl", { class: "tiles" });
      this.more = h("div");
      this.short = h("p", { class: "short", "aria-hidden": "true" });
      const cards = h("details", {}, h("summary", {}, "On every card, by arithmetic"));
      cards.addEventListener("toggle", () => cards.open && this.showCards());
      this.cards = cards;
      this.answer = h("section", { class: "answer", "aria-label": `Question ${this.number + 1}, the answer` },
        this.verdict, this.fixes, this.progress, this.bar, this.legend, this.tiles, this.more, cards);
      return this.answer;
    }

    show(found, report) {
      this.answer.classList.remove("old");
      if (found.said) this.fill(found.said, found.impossible);
      const wrong = found.error ?? found.unknown;
      this.wrong = Boolean(found.error);
      this.verdict.textContent = wrong ?? found.verdict;
      this.short.textContent = this.verdict.textContent;
      this.verdict.dataset.fits = found.error ? "wrong" : found.fits ?? "";
      this.fixes.replaceChildren(...(found.fixes ?? []).map((fix) => h("button", { type: "button", onclick: () => this.change(fix.fields) }, `Set ${fix.words}`)));
      if (wrong) {
        this.progressing("", false);
        if (found.error) this.answer.classList.add("old");
        this.verdict.closest(".answer").classList.toggle("old", false);
        return;
      }
      this.last = found;
      this.from = `Answered ${found.from}.`;
      this.progressing("", false);
      this.drawBar(found.bar, found.verdict);
      this.tiles.replaceChildren(...found.rows.map((row) => h("div", { class: "tile" }, h("dt", {}, row.name), h("dd", {}, row.value), h("dd", { class: "detail" }, row.detail))));
      this.drawMore(found, report);
      if (this.cards.open) this.showCards();
      document.documentElement.dataset.answered = found.source;
    }

    drawBar({ memory_bytes, parts }, verdict) {
      const taken = parts.reduce((sum, part) => sum + part.bytes, 0);
      const whole = Math.max(memory_bytes, taken);
      const colour = (n) => harness.colours[n % harness.colours.length];
      this.bar.replaceChildren(
        ...parts.map((part, n) => h("span", { style: `width:${(100 * part.bytes) / whole}%;background:${colour(n)}`, title: `${part.name} ${part.shown}` })),
        taken > memory_bytes ? h("i", { class: "limit", style: `left:${(100 * memory_bytes) / whole}%` }) : "",
      );
      this.bar.setAttribute("aria-label", `${verdict} ${parts.map((part) => `${part.name} ${part.shown}`).join(", ")}.`);
      this.legend.replaceChildren(...parts.map((part, n) => h("li", {}, h("span", { class: "swatch", style: `background:${colour(n)}` }), `${part.name} ${part.shown}`)));
    }

    drawMore(found, report) {
      const button = (text, act) => {
        const made = h("button", { type: "button" }, text);
        made.addEventListener("click", () => act(made));
        return made;
      };
      const name = `${found.name}-${found.said.hardware}`;
      const changes = found.changes.map((change) => h("li", {},
        button(change.fits ? "Change" : "Try", () => this.change(change.fields)), h("code", {}, change.words),
        h("span", { class: "note" }, change.detail)));
      // What was opened stays so, when a better answer takes the place of this one.
      const opened = new Set([...this.more.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
      const folded = (title, ...inside) => h("details", { open: opened.has(title) }, h("summary", {}, title), ...inside);
      this.more.replaceChildren(...[
        changes.length ? h("h2", {}, "What to change, the cheapest first") : null,
        changes.length ? h("ul", { class: "changes" }, ...changes) : null,
        report ? h("p", {}, h("a", { href: report, target: "_blank" }, "The report: timeline, layers, largest allocations")) : null,
        ...found.notes.map((note) => h("p", { class: "note" }, note)),
        h("h2", {}, "The command"), h("pre", {}, found.command), button("Copy the command", (made) => copy(found.command, made)),
        folded("The recipe as YAML", h("pre", {}, found.yaml), button("Copy the recipe", (made) => copy(found.yaml, made))),
        folded("Pass it on", h("div", { class: "tools" },
          button("Copy a Markdown table", (made) => copy(found.markdown, made)),
          button("Copy a badge", (made) => copy(found.badge, made)),
          button("Copy the address", (made) => copy(location.href, made)),
          button("Picture, SVG", () => save(new Blob([found.svg], { type: "image/svg+xml" }), `${name}.svg`)),
          button("Picture, PNG", () => savePng(found.svg, `${name}.png`)))),
      ].filter(Boolean));
    }

    async showCards() {
      const found = await asking.cards(this.query, this.aborting.signal).catch(() => ({}));
      if (!found.cards) return;
      const rows = found.cards.map((card) => h("tr", {},
        h("th", { scope: "row" }, h("button", { type: "button", onclick: () => this.change({ hardware: card.name, memory: "" }) }, card.title)),
        h("td", { class: "number" }, card.memory), h("td", { class: "number" }, card.needs),
        h("td", {}, card.fits ? "fits" : card.reason), h("td", { class: "number" }, card.tokens_per_s)));
      const table = h("table", {}, h("thead", {}, h("tr", {}, ...["card", "memory", "needs", "verdict", "tokens/s"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows));
      this.cards.replaceChildren(this.cards.firstElementChild, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Question ${this.number + 1}, on every card` }, table));
    }
  }

  function keepInAddress() {
    const parts = new URLSearchParams(panels[0].query);
    if (panels[1]) parts.set("and", panels[1].query);
    history.replaceState(null, "", `?${parts}`);
  }

  // Of two, the answers come first, side by side.
  function arrange() {
    const two = panels.length === 2;
    place.classList.toggle("two", two);
    for (const { element, answer, form: asked } of panels) element.prepend(...(two ? [answer, asked] : [asked, answer]));
  }

  function add(query) {
    const panel = new Panel(query, panels.length);
    panels.push(panel);
    place.append(panel.element);
    arrange();
    panel.ask();
  }

  const second = document.getElementById("second");
  function named() {
    second.textContent = panels.length === 2 ? "Drop the second question" : "Compare with a second question";
  }
  second.addEventListener("click", () => {
    if (panels.length === 2) {
      const dropped = panels.pop();
      dropped.aborting.abort();
      dropped.element.remove();
      arrange();
      keepInAddress();
    } else add(panels[0].query);
    named();
  });

  const asked = new URLSearchParams(location.search);
  const other = asked.get("and");
  asked.delete("and");
  // Both before the first asks: the address is written anew with each question.
  add(asked.toString() || start);
  if (other) add(other);
  named();
  document.documentElement.dataset.ready = "true";
})();
