// Schedule explorer: `simulate` of actoffload.schedule for the default schedule, and the page that draws it.
// tests/site/test_explorer.py compares it with the Python function.
"use strict";

const Explorer = (() => {
  const PIECES = 8; // saved tensors of a layer, as LayerCost.even has them

  // What LayerCost.even returns: tensors of equal size at equal distances; backward needs the last one at once.
  function evenLayer(bytes, forward, backward, temporary = 0) {
    const pieces = Math.min(PIECES, bytes);
    const saved = [];
    for (let k = 0; k < pieces; k++) {
      const each = Math.floor(bytes / pieces);
      const last = k === pieces - 1 ? bytes % pieces : 0;
      saved.push({ bytes: each + last, savedAt: (k + 1) / pieces, neededAt: (pieces - 1 - k) / pieces });
    }
    return { bytes, forward, backward, saved, temporary };
  }

  function costs(s) {
    const kept = Math.floor(s.bytes * s.fraction);
    const whole = evenLayer(s.bytes, s.forward, s.backward);
    const again = evenLayer(kept, s.forward, s.backward + s.again * s.forward, s.bytes - kept);
    return Array.from({ length: s.layers }, (_, k) => (k < s.layers - s.recomputed ? whole : again));
  }

  // Settings: layers, offloaded, recomputed; bytes of a layer; forward and backward in seconds; link in bytes per
  // second for each direction; fraction of its bytes that a recomputed layer saves; again: the part of its forward
  // that it runs a second time.  The last `recomputed` layers are recomputed.
  function simulate(s) {
    const layers = costs(s);
    const window = s.layers - s.offloaded;
    const spans = [];
    const resident = [];
    const held = [];
    let compute = 0, stalled = 0, start = 0, since = 0, stalledBefore = 0, running = null, onDemand = 0;
    const queueEnd = { d2h: 0, h2d: 0 };
    let inUse = 0, peak = 0, atBorder = 0, highest = 0;

    function occupy(bytes) {
      if (!bytes) return;
      inUse += bytes;
      highest = Math.max(highest, inUse);
      resident.push([compute, inUse]);
    }
    function border(temporary = 0) {
      const between = highest - Math.max(atBorder, inUse);
      peak = Math.max(peak, Math.max(atBorder, inUse) + between + temporary);
      atBorder = highest = inUse;
    }
    function begin(kind, layer) {
      running = [kind, layer];
      start = since = compute;
      stalledBefore = stalled;
    }
    function reach(seconds) {
      compute = Math.max(compute, start + seconds + stalled - stalledBefore);
    }
    function end() {
      if (running && compute > since) spans.push({ kind: running[0], layer: running[1], start: since, end: compute });
      running = null;
    }
    function wait(time, layer) {
      if (time <= compute) return;
      const before = running, from = compute;
      end();
      compute = since = time;
      stalled += time - from;
      spans.push({ kind: "stall", layer, start: from, end: time });
      running = before;
    }
    function copy(kind, layer, bytes, ready) {
      const from = Math.max(queueEnd[kind], ready);
      queueEnd[kind] = from + bytes / s.link;
      spans.push({ kind, layer, start: from, end: queueEnd[kind] });
      return queueEnd[kind];
    }

    for (let layer = 0; layer < s.layers; layer++) {
      const cost = layers[layer], tensors = (held[layer] = []);
      border();
      if (s.offloaded && layer >= window) {
        const early = held[layer - window];
        wait(Math.max(0, ...early.map((t) => t.copied)), layer - window);
        for (const tensor of early) tensor.onDevice = false;
        occupy(-early.reduce((sum, t) => sum + t.bytes, 0));
        border();
      }
      begin("forward", layer);
      for (const saved of cost.saved) {
        reach(saved.savedAt * cost.forward);
        const tensor = { ...saved, copied: 0, onDevice: true, arrival: 0 };
        tensors.push(tensor);
        occupy(saved.bytes);
        if (layer < s.offloaded) tensor.copied = copy("d2h", layer, saved.bytes, compute);
      }
      reach(cost.forward);
      end();
      border();
    }
    const forwardTime = compute, forwardStall = stalled;
    stalled = 0;
    for (let layer = s.layers - 1; layer >= 0; layer--) {
      const cost = layers[layer];
      border();
      begin("backward", layer);
      let used = 0;
      for (const tensor of [...held[layer]].reverse()) {
        reach(tensor.neededAt * cost.backward);
        occupy(-used);
        used = tensor.bytes;
        if (!tensor.onDevice) {
          onDemand += 1;
          occupy(tensor.bytes);
          tensor.arrival = copy("h2d", layer, tensor.bytes, compute);
          tensor.onDevice = true;
        }
        wait(tensor.arrival, layer);
      }
      reach(cost.backward);
      occupy(-used);
      end();
      border(cost.temporary);
      if (s.offloaded && layer >= window) {
        const early = held[layer - window];
        occupy(early.reduce((sum, t) => sum + t.bytes, 0));
        for (const tensor of [...early].reverse()) {
          tensor.arrival = copy("h2d", layer - window, tensor.bytes, compute);
          tensor.onDevice = true;
        }
        border();
      }
    }
    const baseline = s.layers * (s.forward + s.backward);
    return {
      spans, resident, peak, onDemand, forwardStall, baseline, forwardTime,
      step: compute,
      backwardStall: stalled,
      copied: layers.slice(0, s.offloaded).reduce((sum, cost) => sum + cost.bytes, 0),
    };
  }

  // ---- the page --------------------------------------------------------------------------------------------
  const MIB = 2 ** 20;
  const CONTROLS = [
    // name, label, unit, smallest, largest, step, value, factor of the unit
    ["layers", "Layers", "", 2, 48, 1, 12, 1],
    ["offloaded", "Offloaded layers, from the first", "", 0, 47, 1, 4, 1],
    ["recomputed", "Recomputed layers, from the last", "", 0, 48, 1, 0, 1],
    ["bytes", "Bytes that a layer saves", "MiB", 16, 4096, 16, 1024, MIB],
    ["forward", "Forward of a layer", "ms", 0.5, 100, 0.5, 20, 1e-3],
    ["backward", "Backward of a layer", "ms", 0.5, 200, 0.5, 40, 1e-3],
    ["link", "Link, each direction", "GB/s", 5, 450, 1, 55, 1e9],
    ["fraction", "A recomputed layer still saves", "%", 0, 100, 1, 6, 0.01],
    ["again", "Part of its forward run again", "%", 0, 100, 1, 100, 0.01],
  ];
  // Layers of Llama 8B in eager mode with 8192 tokens: see docs/guide/hardware.md.
  const PRESETS = {
    "H100, PCIe Gen5": { forward: 8.5, backward: 17, link: 54 },
    "A100, PCIe Gen4": { forward: 26.5, backward: 53, link: 27 },
    "RTX 4090, PCIe Gen4": { forward: 50, backward: 100, link: 27 },
    "GH200, NVLink-C2C": { forward: 8.5, backward: 17, link: 382 },
  };
  const LLAMA = { layers: 32, offloaded: 8, recomputed: 0, bytes: 1568, fraction: 6, again: 100 };
  const LANES = [["compute", ["forward", "backward", "stall"]], ["D2H", ["d2h"]], ["H2D", ["h2d"]]];
  const NAMES = { forward: "forward", backward: "backward", d2h: "offload (D2H)", h2d: "reload (H2D)", stall: "stall" };
  const ms = (seconds) => `${(seconds * 1e3).toFixed(1)} ms`;

  function element(name, attributes, parent, text) {
    const svg = ["svg", "g", "rect", "text", "path", "line", "defs", "pattern"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function read(root) {
    const settings = {};
    for (const [name, , unit, , , , , factor] of CONTROLS) {
      const input = root.querySelector(`#explorer-${name}`);
      if (name === "offloaded") input.max = settings.layers - 1;
      if (name === "recomputed") input.max = settings.layers;
      settings[name] = Number(input.value) * factor;
      root.querySelector(`output[for="explorer-${name}"]`).textContent = `${input.value} ${unit}`.trim();
      input.setAttribute("aria-valuetext", `${input.value} ${unit}`.trim());
    }
    return settings;
  }

  // Memory over time as it is drawn: with what a recomputed layer has again on the device during its backward.
  function curve(settings, result) {
    const points = [[0, 0], ...result.resident, [result.step, 0]];
    const again = settings.bytes - Math.floor(settings.bytes * settings.fraction);
    const recomputes = result.spans.filter((span) => span.kind === "backward"
      && span.layer >= settings.layers - settings.recomputed);
    const edges = recomputes.flatMap((span) => [span.start, span.end]);
    const at = (time) => {
      let bytes = 0;
      for (const [when, value] of points) if (when <= time) bytes = value;
      return bytes + (recomputes.some((span) => span.start <= time && time < span.end) ? again : 0);
    };
    const times = [...new Set([...points.map(([time]) => time), ...edges])].sort((a, b) => a - b);
    return times.map((time) => [time, at(time)]);
  }

  // The smallest of 1, 2, 5, 10, 20 ... that is not below a number.
  function roundStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
  }

  function draw(settings, result, box, summary) {
    const width = Math.max(280, box.clientWidth), left = 62, right = 8, lane = 34, top = 8, chart = 130;
    const bottom = top + 3 * lane + 14 + chart;
    const x = (seconds) => left + (seconds / result.step) * (width - left - right);
    box.replaceChildren();
    const svg = element("svg", { viewBox: `0 0 ${width} ${bottom + 36}`, width, height: bottom + 36, role: "img",
      "aria-label": summary }, box);
    const hatch = element("pattern", { id: "explorer-hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, element("defs", {}, svg));
    element("line", { x1: 2, x2: 2, y1: 0, y2: 4, class: "hatch" }, hatch);
    LANES.forEach(([name, kinds], row) => {
      const y = top + row * lane;
      element("text", { x: left - 8, y: y + 18, "text-anchor": "end" }, svg, name);
      element("rect", { x: left, y, width: width - left - right, height: 26, class: "lane" }, svg);
      const groups = new Map(); // the copies of a layer share a box
      for (const span of result.spans.filter((each) => kinds.includes(each.kind))) {
        const copy = span.kind === "d2h" || span.kind === "h2d";
        element("rect", { x: x(span.start), y, width: Math.max(0.5, x(span.end) - x(span.start)), height: 26,
          class: span.kind + (copy ? "" : " whole") }, svg);
        const key = `${span.kind} ${span.layer}`, known = groups.get(key);
        if (span.kind !== "stall") groups.set(key, { ...span, start: known ? known.start : span.start });
      }
      for (const span of groups.values()) {
        const label = String(span.layer);
        const room = x(span.end) - x(span.start);
        if (room < 6 * label.length + 1) continue;
        const size = room < 8 * label.length + 4 ? "number small" : "number";
        element("text", { x: (x(span.start) + x(span.end)) / 2, y: y + 18, "text-anchor": "middle", class: size },
          svg, label);
      }
    });
    const all = settings.layers * settings.bytes, unit = all >= 2 ** 30 ? [2 ** 30, "GiB"] : [MIB, "MiB"];
    const height = (bytes) => bottom - (bytes / Math.max(all, result.peak)) * (chart - 14);
    const points = curve(settings, result);
    let path = `M ${x(0)} ${bottom}`;
    for (const [time, bytes] of points) path += ` H ${x(time)} V ${height(bytes)}`;
    element("path", { d: `${path} H ${x(result.step)} V ${bottom} Z`, class: "memory" }, svg);
    for (const [bytes, name] of [[all, "none"], [result.peak, "peak"]]) {
      element("line", { x1: left, x2: width - right, y1: height(bytes), y2: height(bytes), class: name }, svg);
    }
    const digits = unit[1] === "GiB" ? 1 : 0, places = [];
    for (const [bytes, text] of [[0, "0"], [all, (all / unit[0]).toFixed(digits)],
      [result.peak, (result.peak / unit[0]).toFixed(digits)]]) {
      const y = height(bytes) + 4;
      if (places.some((place) => Math.abs(place - y) < 14)) continue; // it would overprint another one
      places.push(y);
      element("text", { x: left - 8, y, "text-anchor": "end", class: "tick" }, svg, text);
    }
    element("text", { x: left - 8, y: bottom - chart + 4, "text-anchor": "end" }, svg, unit[1]);
    element("line", { x1: left, x2: width - right, y1: bottom, y2: bottom, class: "axis" }, svg);
    const between = roundStep((result.step * 1e3) / 4);
    for (let time = 0; time <= result.step * 1e3; time += between) {
      const anchor = time === 0 ? "start" : x(time / 1e3) > width - right - 16 ? "end" : "middle";
      element("text", { x: x(time / 1e3), y: bottom + 18, "text-anchor": anchor, class: "tick" }, svg,
        String(Number(time.toFixed(6))));
    }
    element("text", { x: (left + width - right) / 2, y: bottom + 33, "text-anchor": "middle" }, svg, "time (ms)");
    return unit;
  }

  function update(root) {
    const settings = read(root), result = simulate(settings);
    const checkpointed = simulate({ ...settings, offloaded: 0, recomputed: settings.layers, fraction: 0.06, again: 1 });
    const all = settings.layers * settings.bytes, stall = result.forwardStall + result.backwardStall;
    const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / MIB).toFixed(1)} MiB`);
    const rows = {
      "step time": `${ms(result.step)}, ${(result.step / result.baseline).toFixed(3)} x no offload`,
      "peak of activations": `${size(result.peak)} of ${size(all)}`,
      "stalls, forward + backward": `${ms(result.forwardStall)} + ${ms(result.backwardStall)}`,
      "all layers checkpointed": `${(checkpointed.step / result.baseline).toFixed(3)} x, ${size(checkpointed.peak)}`,
    };
    const waits = stall > 1e-9 ? `compute waits ${ms(stall)} for copies` : "compute never waits for copies";
    const summary = `Timeline of a step of ${settings.layers} layers, ${settings.offloaded} of them offloaded and `
      + `${settings.recomputed} recomputed: ${waits}, the step takes ${ms(result.step)}, and the peak of activations is `
      + `${size(result.peak)} instead of ${size(all)}.`;
    const list = root.querySelector(".explorer-numbers");
    list.replaceChildren();
    for (const [name, value] of Object.entries(rows)) {
      element("dt", {}, list, name);
      element("dd", {}, list, value);
    }
    draw(settings, result, root.querySelector(".explorer-figure"), summary);
    // The address keeps the settings, so that it can be sent to somebody.
    const values = CONTROLS.map(([name]) => `${name}=${root.querySelector(`#explorer-${name}`).value}`);
    history.replaceState(null, "", `#${values.join("&")}`);
  }

  function set(form, values) {
    for (const [name, , , , max] of CONTROLS) {
      const input = form.querySelector(`#explorer-${name}`);
      if (name in values) input.max = max;
      if (name in values) input.value = values[name];
    }
  }

  function build(root) {
    const form = element("form", { class: "explorer-controls", "aria-label": "Settings of the simulated step" }, root);
    for (const [name, label, , min, max, step, value] of CONTROLS) {
      const row = element("div", {}, form), id = `explorer-${name}`;
      element("label", { for: id }, row, label);
      element("input", { id, type: "range", min, max, step, value }, row);
      element("output", { for: id }, row);
    }
    const row = element("div", { class: "explorer-presets" }, form);
    element("label", { for: "explorer-preset" }, row, "Llama 8B, 8192 tokens");
    const preset = element("select", { id: "explorer-preset" }, row);
    for (const name of ["choose a GPU", ...Object.keys(PRESETS)]) element("option", {}, preset, name);
    preset.addEventListener("change", () => {
      if (PRESETS[preset.value]) set(form, { ...LLAMA, ...PRESETS[preset.value] });
      update(root);
    });
    element("button", { type: "reset" }, row, "Reset");
    const keys = element("div", { class: "explorer-keys" }, root);
    for (const [kind, name] of Object.entries(NAMES)) {
      const key = element("span", {}, keys);
      element("i", { class: kind }, key);
      key.append(name);
    }
    element("dl", { class: "explorer-numbers", "aria-live": "polite" }, root);
    root.append(keys);
    element("div", { class: "explorer-figure" }, root);
    const address = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    set(form, Object.fromEntries(CONTROLS.filter(([name]) => name in address).map(([name]) => [name, address[name]])));
    form.addEventListener("input", () => update(root));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      set(form, Object.fromEntries(CONTROLS.map(([name, , , , , , value]) => [name, value])));
      update(root);
    }));
    window.addEventListener("resize", () => update(root));
    update(root);
  }

  if (typeof document !== "undefined") {
    document.addEventListener("DOMContentLoaded", () => {
      const root = document.getElementById("explorer");
      if (root) build(root);
    });
  }
  return { simulate };
})();
if (typeof module !== "undefined") module.exports = Explorer;
