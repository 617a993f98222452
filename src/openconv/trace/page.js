(async () => {
  // Text from the data reaches the page through textContent and attributes only, never as markup.
  const $ = (id) => document.getElementById(id);
  const data = await read();
  const rule = makeRule(data);
  const { Player, wholeOf, exact } = makeSums(rule);
  const PASSES = data.passes, ENGINES = data.engines, CHOICES = data.choices;
  const RESULT = { fprop: "y", dgrad: "x", wgrad: "w" };
  const LETTERS = { x: ["d", "h", "w"], y: ["o", "p", "q"], w: ["t", "r", "s"] };
  const SVG = "http://www.w3.org/2000/svg";

  async function read() {
    const holder = $("data");
    if (holder.dataset.kind === "plain") return JSON.parse(holder.textContent);
    const bytes = Uint8Array.from(atob(holder.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // -- small helpers ---------------------------------------------------------------------------------------------------

  function make(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const draw = (name, attributes, content) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (content !== undefined) node.textContent = content;
    return node;
  };
  const number = (value) => value.toLocaleString("en-US");
  const ratio = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
  /** A tensor as a pass calls it: a gradient computes dx or dw, and reads dy. */
  function nameOf(tensor) {
    const gradient = state.pass !== "fprop" && (tensor === "y" || tensor === RESULT[state.pass]);
    return gradient ? `d${tensor}` : tensor;
  }
  const tuple = (values) => (values.length === 1 ? String(values[0]) : `(${values.join(", ")})`);

  // -- state -----------------------------------------------------------------------------------------------------------

  const DEFAULTS = { image: "8", filter: "3", stride: "1", padding: "1", dilation: "1", groups: "1" };
  const state = { given: true, values: { ...DEFAULTS }, pass: data.direction, engine: 0, knobs: 0, frame: 0,
                  n: 0, c: 0, k: 0, follow: true, pinned: null, hover: null, playing: null };
  let entry, trace = null, player = null, shownFrame = null, hands = null;

  function readHash() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const sized = data.catalogue.length > 0 && CHOICES.some(([key]) => wanted.has(key));
    state.given = !sized;
    for (const [key, , values] of CHOICES)
      state.values[key] = values.includes(wanted.get(key)) ? wanted.get(key) : DEFAULTS[key];
    state.pass = PASSES.includes(wanted.get("pass")) ? wanted.get("pass") : data.direction;
    const at = ENGINES.findIndex(([name]) => name === wanted.get("engine"));
    const own = ENGINES.findIndex(([name]) => name === data.engine);
    entry = find();
    const taken = ["cuda.tiled", "cuda.igemm", ...ENGINES.map(([name]) => name)].map((name) => ENGINES.findIndex(([other]) => other === name));
    state.engine = at >= 0 ? at : own >= 0 ? own : taken.find((engine) => refusal(engine) === null) ?? 0;
    const traces = refusal(state.engine) === null ? entry.engines[state.engine] : [];
    state.knobs = Math.max(0, traces.findIndex((id) => rule.text(data.traces[id].knobs) === wanted.get("knobs")));
    state.frame = Math.max(0, (parseInt(wanted.get("step"), 10) || 1) - 1);
    state.pinned = null;
    const pinned = parseInt(wanted.get("result"), 10);
    if (pinned >= 0) state.pinned = pinned;
  }

  function writeHash() {
    const hash = new URLSearchParams();
    hash.set("pass", state.pass);
    hash.set("engine", ENGINES[state.engine][0]);
    if (!state.given) for (const [key] of CHOICES) hash.set(key, state.values[key]);
    if (state.knobs && trace) hash.set("knobs", trace.knobs);
    if (trace) hash.set("step", state.frame + 1);
    if (state.pinned !== null) hash.set("result", state.pinned);
    const text = `#${hash}`;
    if (text !== location.hash) history.replaceState(null, "", text);
  }

  /** The problem's entry: its facts and what each engine has, or why there is none. */
  function find() {
    if (state.given) return data.given[state.pass];
    let at = PASSES.indexOf(state.pass);
    for (const [key, , values] of CHOICES) at = at * values.length + values.indexOf(state.values[key]);
    return data.entries[data.catalogue[at]];
  }

  const refusal = (engine) =>
    entry.refused !== undefined ? entry.refused : entry.engines[engine][0] < 0 ? rule.text(~entry.engines[engine][0]) : null;

  // -- the tensors -----------------------------------------------------------------------------------------------------

  const views = ["a", "b", "out"].map((role) => {
    const title = make("h2"), svg = draw("svg", { class: "grid" }), base = draw("g", {}), over = draw("g", {});
    svg.append(base, over);
    $("tensors").append(make("div", { class: "tensor", "data-role": role }, title, svg));
    return { role, title, svg, base, over };
  });

  function tensorOf(view) {
    const { direction } = trace.problem;
    return { fprop: { a: "x", b: "w", out: "y" }, dgrad: { a: "y", b: "w", out: "x" }, wgrad: { a: "x", b: "y", out: "w" } }[direction][view.role];
  }

  /** The slice of a tensor that is shown: where it begins, its size, and the rim that stands for padding. */
  function slice(tensor) {
    const p = trace.problem, cg = p.c / p.groups, kg = p.k / p.groups;
    const sizes = tensor === "x" ? p.spatial : tensor === "y" ? p.out : p.filter;
    const [rows, columns] = sizes.length === 1 ? [1, sizes[0]] : sizes;
    const each = rows * columns;
    const group = Math.floor(state.c / cg) === Math.floor(state.k / kg);
    const at = tensor === "x" ? state.n * p.c + state.c : tensor === "y" ? state.n * p.k + state.k : group ? state.k * cg + (state.c % cg) : -1;
    let rim = [[0, 0], [0, 0]];
    if (tensor === "x" && p.direction !== "dgrad") rim = p.spatial.map((_, i) => [p.low[i], p.high[i]]);
    if (tensor === "y" && p.direction === "dgrad")
      rim = p.out.map((_, i) => [Math.max(0, p.dilation[i] * (p.filter[i] - 1) - p.low[i]), Math.max(0, p.dilation[i] * (p.filter[i] - 1) - p.high[i])]);
    if (rim.length === 1) rim = [[0, 0], rim[0]];
    return { rows, columns, each, first: at * each, there: at >= 0, rim };
  }

  const boxes = (cells, grow = 0) =>
    cells.map(([row, column]) => `M${column - grow} ${row - grow}h${1 + 2 * grow}v${1 + 2 * grow}h${-1 - 2 * grow}z`).join("");

  /** The border of a region of cells. */
  function border(cells) {
    const inside = new Set(cells.map(([row, column]) => `${row} ${column}`)), has = (row, column) => inside.has(`${row} ${column}`);
    return cells.map(([row, column]) =>
      (has(row - 1, column) ? "" : `M${column} ${row}h1`) + (has(row + 1, column) ? "" : `M${column} ${row + 1}h1`) +
      (has(row, column - 1) ? "" : `M${column} ${row}v1`) + (has(row, column + 1) ? "" : `M${column + 1} ${row}v1`)).join("");
  }

  function titleOf(tensor) {
    const p = trace.problem, words = { x: `image ${state.n}, channel ${state.c}`, y: `image ${state.n}, channel ${state.k}`,
                                       w: `filter ${state.k}, channel ${state.c % (p.c / p.groups)}` };
    return words[tensor];
  }

  function drawTensors() {
    const result = RESULT[trace.problem.direction];
    const loadsNow = { x: new Set(), w: new Set(), y: new Set() }, held = { x: new Set(), w: new Set(), y: new Set() };
    for (const load of shownFrame.loads) if (loadsNow[load.tensor]) for (const one of load.elements) loadsNow[load.tensor].add(one);
    for (const { load } of player.slots.values()) if (held[load.tensor]) for (const one of load.elements) held[load.tensor].add(one);
    const used = Object.fromEntries(["x", "w", "y"].map((tensor) => [tensor, new Set(shownFrame.products[tensor])]));
    const making = trace.makes(shownFrame.block);
    for (const view of views) {
      const tensor = tensorOf(view), at = slice(tensor), { svg, base, title } = view;
      const isResult = tensor === result, [down, across] = at.rim;
      view.tensor = tensor;
      const height = at.rows + down[0] + down[1], width = at.columns + across[0] + across[1];
      const room = Math.min(tensor === "w" ? 34 : 30, 620 / width);
      svg.setAttribute("viewBox", `${-across[0] - 0.3} ${-down[0] - 0.3} ${width + 0.6} ${height + 0.6}`);
      svg.setAttribute("width", Math.round((width + 0.6) * Math.max(room, 7)));
      svg.setAttribute("class", `grid ${isResult ? "result" : ""}`);
      svg.setAttribute("role", isResult ? "application" : "img");
      svg.setAttribute("aria-label", isResult ? `${nameOf(tensor)}, ${titleOf(tensor)}: arrow keys go from result to result` : `${nameOf(tensor)}, ${titleOf(tensor)}`);
      if (isResult) svg.setAttribute("tabindex", "0");
      else svg.removeAttribute("tabindex");
      const sizes = at.rows === 1 && trace.problem.spatial.length === 1 ? `${at.columns}` : `${at.rows} × ${at.columns}`;
      title.replaceChildren(make("span", {}, `${nameOf(tensor)}`), make("small", {}, at.there ? `${titleOf(tensor)} · ${sizes}` : `filter ${state.k} has no taps for channel ${state.c}, which is of another group`));
      base.replaceChildren();
      if (!at.there) continue;
      const kinds = new Map();
      const put = (kind, row, column) => kinds.has(kind) ? kinds.get(kind).push([row, column]) : kinds.set(kind, [[row, column]]);
      for (let row = -down[0]; row < at.rows + down[1]; ++row)
        for (let column = -across[0]; column < at.columns + across[1]; ++column) {
          if (row < 0 || column < 0 || row >= at.rows || column >= at.columns) {
            put("pad", row, column);
            continue;
          }
          const one = at.first + row * at.columns + column;
          if (isResult) {
            const block = hands.sums[one] >= 0 ? hands.sums[one] : hands.stores[one], phase = player.stored[one] ? "done" : player.sums[one] ? "sum" : "wait";
            put(block < 0 ? "none" : `${phase} ${block % 8}`, row, column);
            if (making.has(one)) put("current", row, column);
          } else {
            put(loadsNow[tensor].has(one) ? "new" : held[tensor].has(one) ? "shared" : player.times[tensor][one] ? "old" : "none", row, column);
            if (used[tensor].has(one)) put("dots", row, column);
          }
        }
      for (const [kind, cells] of kinds) {
        const [name, colour] = kind.split(" ");
        if (name === "dots" || name === "current") continue;
        const path = draw("path", { d: boxes(cells), class: `${name} ${name === "pad" ? "" : "cells"}` });
        if (colour !== undefined) path.style.fill = `var(--b${colour})`;
        base.append(path);
      }
      if (kinds.has("current")) base.append(draw("path", { class: "current", d: border(kinds.get("current")) }));
      if (kinds.has("dots")) {
        const dots = kinds.get("dots").map(([row, column]) => `M${column + 0.38} ${row + 0.5}a.12 .12 0 1 0 .24 0a.12 .12 0 1 0 -.24 0`).join("");
        base.append(draw("path", { class: "dots", d: dots }));
      }
      if (!isResult && room >= 14)
        for (let row = 0; row < at.rows; ++row)
          for (let column = 0; column < at.columns; ++column) {
            const times = player.times[tensor][at.first + row * at.columns + column];
            if (times > 1) base.append(draw("text", { class: "times", x: column + 0.94, y: row + 0.94 }, times > 999 ? "999+" : times));
          }
      if (!isResult) outlines(base, tensor, at);
    }
    drawOver();
  }

  /** Around the places of a slot that are of this slice, and what of its box is outside of the image. */
  function outlines(base, tensor, at) {
    for (const { load } of player.slots.values()) {
      if (load.tensor !== tensor || !load.box) continue;
      const { top, left, height, width, slices } = load.box;
      if (!slices.has(tensor === "w" ? -1 : at.first / at.each)) continue;
      const line = draw("rect", { x: left, y: top, width, height, class: "outline" });
      line.style.stroke = `var(--b${shownFrame.block.at % 8})`;
      base.append(line);
    }
  }

  /** Whether the block of this step has a result, and knows by which of its threads or warps. */
  const worksOn = (one) => (hands.sums[one] >= 0 ? hands.sums[one] : hands.stores[one]) === shownFrame.block.at;

  /** The thread or warp that is followed: that of the result pointed at, else the first that multiplies. */
  function followed() {
    const chosen = state.hover === null ? state.pinned : state.hover, places = shownFrame.products.places;
    if (chosen !== null && worksOn(chosen) && hands.unit[chosen] >= 0) return hands.unit[chosen];
    return places.length ? places.reduce((a, b) => Math.min(a, b), Infinity) : 0;
  }

  /** What the pointer or the keyboard is at, and the thread that is followed. */
  function drawOver() {
    const chosen = state.hover === null ? state.pinned : state.hover, result = RESULT[trace.problem.direction];
    const products = chosen === null ? [] : rule.definition(trace.problem, chosen);
    const lit = { x: new Set(), w: new Set(), y: new Set() };
    products.forEach(([x, w, y]) => [lit.x.add(x), lit.w.add(w), lit.y.add(y)]);
    const unit = followed(), places = shownFrame.products.places;
    const owner = trace.launches[shownFrame.block.launch].owner;
    const mine = { x: new Set(), w: new Set(), y: new Set() };
    if (owner) places.forEach((place, i) => place === unit && ["x", "w", "y"].forEach((tensor) => mine[tensor].add(shownFrame.products[tensor][i])));
    for (const view of views) {
      const { tensor, over } = view, at = slice(tensor), isResult = tensor === result;
      over.replaceChildren();
      if (!at.there) continue;
      const cells = { win: [], mine: [], hot: [] };
      for (let i = 0; i < at.each; ++i) {
        const one = at.first + i, cell = [Math.floor(i / at.columns), i % at.columns];
        if (isResult) {
          if (one === chosen) cells.hot.push(cell);
          if (owner && hands.unit[one] === unit && worksOn(one)) cells.mine.push(cell);
        } else {
          if (lit[tensor].has(one)) cells.win.push(cell);
          if (mine[tensor].has(one)) cells.mine.push(cell);
        }
      }
      for (const [kind, grow] of [["mine", -0.22], ["win", -0.04], ["hot", -0.04]])
        if (cells[kind].length) over.append(draw("path", { class: kind, d: kind === "win" ? border(cells[kind]) : boxes(cells[kind], grow) }));
    }
    tellHovered(chosen, products);
    drawSlots(lit);
  }

  function digits(tensor, at) {
    const p = trace.problem;
    const sizes = tensor === "x" ? [p.n, p.c, ...p.spatial] : tensor === "y" ? [p.n, p.k, ...p.out] : [p.k, p.c / p.groups, ...p.filter];
    const found = [];
    for (let i = sizes.length - 1; i >= 0; --i) {
      found.unshift(at % sizes[i]);
      at = Math.floor(at / sizes[i]);
    }
    return found;
  }
  const place = (tensor, at) => `${nameOf(tensor)}[${digits(tensor, at).join(", ")}]`;

  function threadText(launch, unit) {
    const { owner, threads } = launch;
    if (!owner || unit < 0) return "";
    if (owner.unit === "thread" && threads.length > 1)
      return `thread (${unit % threads[0]}, ${Math.floor(unit / threads[0])})`;
    return `${owner.unit} ${unit}`;
  }

  function tellHovered(chosen, products) {
    const box = $("hovered");
    if (chosen === null) {
      box.textContent = "Point at a result, or tab to it and use the arrow keys, to see the inputs that it is made of. A click keeps it.";
      return;
    }
    const result = RESULT[trace.problem.direction], [one, other] = { y: [0, 1], x: [2, 1], w: [0, 2] }[result];
    const letters = ["x", "w", "y"];
    const terms = products.slice(0, 3).map((product) => `${place(letters[one], product[one])}·${place(letters[other], product[other])}`);
    const parts = [make("b", {}, place(result, chosen)), ` is the sum of ${plural(products.length, "product")}: `, make("code", {}, terms.join(" + ") + (products.length > 3 ? " + …" : "")), ". "];
    const by = (at, verb, unit) => {
      if (at < 0) return;
      const block = trace.blocks[at], launch = trace.launches[block.launch], thread = threadText(launch, unit);
      parts.push(`It is ${verb} by ${block.index.length ? `block ${tuple(block.index)}` : block.part} of ${launch.name}${thread ? `, ${thread}` : ""}. `);
    };
    by(hands.sums[chosen], "summed", hands.unit[chosen]);
    by(hands.stores[chosen], hands.sums[chosen] >= 0 ? "stored" : "made", hands.sums[chosen] >= 0 ? -1 : hands.unit[chosen]);
    if (player.stored[chosen]) parts.push("It has been stored.");
    else if (!trace.transforms) parts.push(`${plural(player.sums[chosen], "product")} of it ${player.sums[chosen] === 1 ? "has" : "have"} been added so far.`);
    box.replaceChildren(...parts);
  }

  // -- shared memory ---------------------------------------------------------------------------------------------------

  const MOST = 64;
  function drawSlots(lit) {
    const box = $("slots"), launch = trace.launches[shownFrame.block.launch];
    box.replaceChildren();
    if (!player.slots.size) {
      const registers = shownFrame.loads.filter((load) => load.to === "registers");
      const text = launch.grid.length ? (launch.shared ? "Nothing has come to it yet." : "This kernel uses none: what is loaded goes to registers.") : "What cuBLAS keeps there is its own.";
      box.append(make("p", { class: "hint" }, text + (registers.length ? ` In this step: ${registers.map((load) => `${number(load.elements.length)} of ${nameOf(load.tensor)}`).join(", ")}.` : "")));
      return;
    }
    const used = Object.fromEntries(["x", "w", "y"].map((tensor) => [tensor, new Set(shownFrame.products[tensor])]));
    const names = [...player.slots.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    for (const name of names) {
      const { load, at } = player.slots.get(name);
      load.matrix = load.matrix || trace.matrix(load);
      const { rows, columns, cells } = load.matrix, short = cells.slice(0, MOST).map((row) => row.slice(0, MOST));
      const kinds = { pad: [], none: [], new: [], shared: [], dots: [], win: [] };
      short.forEach((row, i) => row.forEach((one, j) => {
        if (one === -2) return;
        kinds[one < 0 ? "pad" : at === state.frame ? "new" : "shared"].push([i, j]);
        if (one >= 0 && used[load.tensor]?.has(one)) kinds.dots.push([i, j]);
        if (one >= 0 && lit[load.tensor]?.has(one)) kinds.win.push([i, j]);
      }));
      const height = short.length, width = short[0]?.length || 0, room = Math.min(12, Math.max(4, 360 / Math.max(width, 1)));
      const svg = draw("svg", { class: "grid", viewBox: `-.1 -.1 ${width + 0.2} ${height + 0.2}`, width: Math.round((width + 0.2) * room), role: "img", "aria-label": `${name}: ${nameOf(load.tensor)}, ${rows} by ${columns}` });
      for (const kind of ["pad", "shared", "new"]) if (kinds[kind].length) svg.append(draw("path", { class: `${kind} cells`, d: boxes(kinds[kind]) }));
      if (kinds.dots.length) svg.append(draw("path", { class: "dots", d: kinds.dots.map(([i, j]) => `M${j + 0.38} ${i + 0.38}h.24v.24h-.24z`).join("") }));
      if (kinds.win.length) svg.append(draw("path", { class: "win", d: boxes(kinds.win, -0.06) }));
      const part = height < rows || width < columns ? `, of which ${height} × ${width} ${cells.length > MOST || (cells[0]?.length || 0) > MOST ? "are drawn" : "hold something"}` : "";
      box.append(make("div", { class: "slot" }, make("p", {}, make("b", {}, name), `: ${nameOf(load.tensor)}, ${rows} × ${columns}${part}`), svg));
    }
  }

  // -- words and numbers -------------------------------------------------------------------------------------------------

  function tellStep() {
    const { block, text, loads, products, stores, points } = shownFrame, launch = trace.launches[block.launch];
    const parts = [text, " "];
    const strong = (value) => make("b", {}, number(value));
    const brought = loads.filter((load) => load.elements.length);
    if (brought.length) {
      parts.push("Loads ");
      brought.forEach((load, i) => parts.push(i ? (i === brought.length - 1 ? " and " : ", ") : "", strong(load.elements.length), ` of ${nameOf(load.tensor)}`));
      const bytes = brought.reduce((all, load) => all + load.bytes, 0);
      parts.push(`: `, strong(bytes), " bytes. ");
    }
    const results = new Set(products[RESULT[trace.problem.direction]]).size;
    if (products.x.length) parts.push("Adds ", strong(products.x.length), " products to ", strong(results), ` result${results === 1 ? "" : "s"}: ${ratio(products.x.length / results)} each. `);
    if (points) parts.push("So ", strong(points), ` multiplications stand for the ${number(trace.exact)} of a plain sum. `);
    for (const move of stores) if (move.elements.length) parts.push("Stores ", strong(move.elements.length), ` of ${nameOf(move.tensor)}, `, strong(move.bytes), " bytes. ");
    const which = trace.launches.length > 1 ? `Launch ${block.launch + 1} of ${trace.launches.length}, ${launch.name}` : `Kernel ${launch.name}`;
    const grid = launch.grid.length ? `, block ${block.index.length ? tuple(block.index) : "after block"} of ${launch.grid.join(" × ")}` : "";
    const where = make("span", { class: "where" }, `${which}${grid}${block.part ? `, ${block.part}` : ""}. ${owned()}`);
    $("says").replaceChildren(where, ...parts);
  }

  function owned() {
    const launch = trace.launches[shownFrame.block.launch];
    if (!launch.owner || !shownFrame.products.places.length) return "";
    const unit = followed();
    const count = shownFrame.products.places.filter((value) => value === unit).length;
    return `Small squares: ${threadText(launch, unit)}, which adds ${plural(count, "product")} in this step.`;
  }

  function tellCounters() {
    const now = (list) => new Map([...list.reduce((all, move) => all.set(move.tensor, (all.get(move.tensor) || 0) + move.bytes), new Map())]);
    const loads = now(shownFrame.loads), stores = now(shownFrame.stores), rows = [];
    const row = (words, step, all, kind) => rows.push(make("tr", { "data-kind": kind }, make("td", {}, words), make("td", { class: "n" }, step ? number(step) : ""), make("td", { class: "n" }, typeof all === "string" ? all : number(all))));
    let loaded = 0, stored = 0;
    for (const [tensor, bytes] of player.loaded) {
      row(`bytes loaded of ${nameOf(tensor)}`, loads.get(tensor) || 0, bytes, `load ${tensor}`);
      loaded += bytes;
    }
    for (const [tensor, bytes] of player.kept) {
      row(`bytes stored of ${nameOf(tensor)}`, stores.get(tensor) || 0, bytes, `store ${tensor}`);
      stored += bytes;
    }
    if (!trace.transforms) row("products", shownFrame.products.x.length, player.products, "products");
    else row("multiplications at points", shownFrame.points, player.points, "points");
    if (player.elements) {
      const done = trace.transforms ? player.points : player.products;
      row(trace.transforms ? "multiplications for each element loaded" : "reuse: products for each element loaded", 0, ratio(done / player.elements), "reuse");
    }
    $("counters").replaceChildren(make("tr", {}, make("th", {}, ""), make("th", { class: "n" }, "this step"), make("th", { class: "n" }, "so far")), ...rows);
    const floor = trace.problem.floor;
    $("floor").textContent = `Each tensor once is ${number(floor)} bytes; so far ${number(loaded + stored)} have moved, ${ratio((loaded + stored) / floor)} times that. Every request counts, also those that a cache answers.`;
  }

  function tellTrace() {
    const launch = trace.launches.find((one) => one.grid.length && !one.name.startsWith("channels_last")) || trace.launches[0];
    $("caption").replaceChildren(
      make("b", {}, trace.engine), " on ", make("code", {}, entry.facts.text), `, for ${data.device}, `, make("code", {}, trace.knobs === "-" ? "no knobs" : trace.knobs),
      ": kernel ", make("code", {}, launch.source), `, grid ${launch.grid.join(" × ") || "of the library"}, ${launch.threads.join(" × ") || "?"} threads a block`,
      launch.shared ? `, ${number(launch.shared)} bytes of shared memory` : ", no shared memory", trace.launches.length > 1 ? `; ${trace.launches.length} launches in all.` : ".");
    const head = make("tr", {}, ...["kernel", "grid", "threads", "shared bytes"].map((word, i) => make("th", { class: i ? "n" : "" }, word)));
    $("launches").replaceChildren(head, ...trace.launches.map((one, at) => make("tr", { "data-launch": at },
      make("td", {}, make("code", {}, one.name), make("small", {}, one.does), make("small", {}, one.source)),
      make("td", { class: "n" }, one.grid.join(" × ") || "its own"), make("td", { class: "n" }, one.threads.join(" × ") || "its own"), make("td", { class: "n" }, one.shared ? number(one.shared) : ""))));
    $("notes").replaceChildren(...trace.notes.map((note) => make("li", {}, note)));
    $("transforms-card").hidden = !trace.transforms;
    if (trace.transforms) {
      const [sizes, ...kinds] = trace.transforms, unique = sizes.map((size, i) => [size, i]).filter(([size], i) => sizes.findIndex((other) => String(other) === String(size)) === i);
      $("transforms").replaceChildren(...unique.flatMap(([[m, r], i]) => ["AT", "G", "BT"].map((name, kind) =>
        make("div", { class: "matrix" }, `${name} of F(${m},${r})`, make("table", {}, ...kinds[kind][i].map((row) => make("tr", {}, ...row.map((value) => make("td", {}, value)))))))));
    }
  }

  let comparing = 0;
  function compare() {
    const mine = ++comparing, facts = entry.facts, head = make("tr", {}, ...["algorithm", "blocks", "bytes loaded", "stored", "products", "reuse"].map((word, i) => make("th", { class: i ? "n" : "" }, word)));
    const rows = ENGINES.map(([name, label], at) => make("tr", { "data-engine": name, class: at === state.engine ? "now" : "" }, make("td", {}, label, make("small", {}, name))));
    $("comparison").replaceChildren(head, ...rows);
    const next = (at) => {
      if (mine !== comparing || at === ENGINES.length) return;
      const why = refusal(at), row = rows[at];
      if (why !== null) row.append(make("td", { colspan: 5, class: "soft" }, "refused"));
      else {
        const one = wholeOf(entry.engines[at][at === state.engine ? state.knobs : 0], facts);
        const products = one.points || one.products;
        for (const value of [`${number(one.blocks)}${one.library ? " + cuBLAS" : ""}`, number(one.loaded), number(one.stored), number(products), ratio(products / one.elements)]) row.append(make("td", { class: "n" }, value));
      }
      setTimeout(() => next(at + 1), 0);
    };
    setTimeout(() => next(0), 30);
  }

  // -- showing -----------------------------------------------------------------------------------------------------------

  /** Slices that the step touches, unless those that are shown are among them. */
  function follow() {
    const p = trace.problem, each = { x: rule.product(p.spatial), w: rule.product(p.filter), y: rule.product(p.out) };
    const cg = p.c / p.groups, kg = p.k / p.groups;
    const look = () => Object.fromEntries(["x", "w", "y"].map((tensor) => [tensor, slice(tensor)]));
    let looked = look();
    const set = (tensor, element) => {
      const at = Math.floor(element / each[tensor]);
      if (tensor === "x") [state.n, state.c] = [Math.floor(at / p.c), at % p.c];
      if (tensor === "y") [state.n, state.k] = [Math.floor(at / p.k), at % p.k];
      if (tensor === "w") [state.k, state.c] = [Math.floor(at / cg), Math.floor(Math.floor(at / cg) / kg) * cg + (at % cg)];
      looked = look();
    };
    const shows = (tensor, element) => {
      const { there, first, each: size } = looked[tensor];
      return there && element >= first && element < first + size;
    };
    const { x, w, y } = shownFrame.products, result = RESULT[p.direction];
    if (state.pinned !== null) { // stays in sight, with the inputs that it meets in this step
      set(result, state.pinned);
      const sums = shownFrame.products[result], meets = sums.map((one, i) => (one === state.pinned ? i : -1)).filter((i) => i >= 0);
      if (meets.length && !meets.some((i) => shows("x", x[i]) && shows("y", y[i]))) {
        set("x", x[meets[0]]);
        set("y", y[meets[0]]);
      }
      if (!slice("w").there) set(result === "x" ? "y" : "x", rule.definition(p, state.pinned)[0]?.[result === "x" ? 2 : 0] ?? 0);
      return;
    }
    if (x.length) {
      for (let i = 0; i < x.length; ++i) if (shows("x", x[i]) && shows("y", y[i])) return;
      let at = 0; // keep the result's slice if some product is of it
      for (let i = 0; i < x.length; ++i) if (shows(result, shownFrame.products[result][i])) { at = i; break; }
      set("x", x[at]);
      set("y", y[at]);
      return;
    }
    for (const move of [...shownFrame.stores, ...shownFrame.loads])
      if (each[move.tensor] && move.elements.length && !move.elements.some((one) => shows(move.tensor, one))) set(move.tensor, move.elements[0]);
  }

  function fillSlices() {
    const p = trace.problem;
    for (const [id, key, count] of [["slice-n", "n", p.n], ["slice-c", "c", p.c], ["slice-k", "k", p.k]]) {
      const select = $(id);
      if (select.options.length !== count) select.replaceChildren(...Array.from({ length: count }, (_, at) => make("option", { value: at }, String(at))));
      state[key] = Math.min(state[key], count - 1);
      select.value = state[key];
      select.disabled = count === 1;
    }
    $("follow").checked = state.follow;
  }

  function showFrame() {
    state.frame = Math.max(0, Math.min(state.frame, trace.frames.length - 1));
    const at = state.frame;
    if (!shownFrame || player.at !== at) shownFrame = player.seek(at) || trace.frame(at);
    for (const { load } of player.slots.values()) if (load.box === undefined) load.box = boxOf(load);
    if (state.follow) follow();
    fillSlices();
    $("slider").max = trace.frames.length;
    $("slider").value = at + 1;
    $("slider").setAttribute("aria-valuetext", `step ${at + 1} of ${trace.frames.length}`);
    $("count").textContent = `step ${number(at + 1)} of ${number(trace.frames.length)}`;
    for (const [id, off] of [["first", at === 0], ["back", at === 0], ["forward", at === trace.frames.length - 1]]) $(id).disabled = off;
    $("next-block").disabled = trace.frames[trace.frames.length - 1].block === shownFrame.block;
    document.querySelectorAll("#launches tr[data-launch]").forEach((row) => row.classList.toggle("now", Number(row.dataset.launch) === shownFrame.block.launch));
    drawTensors();
    tellStep();
    tellCounters();
    writeHash();
  }

  /** The rectangle of places that a load has along both axes, if it is one; and the slices it is of. */
  function boxOf(load) {
    const p = trace.problem;
    if (!"xy".includes(load.tensor)) return null;
    const letters = LETTERS[load.tensor].slice(-p.spatial.length), found = letters.map(() => null);
    for (const id of load.walks) {
      const [axes, lo, hi] = data.pools.walks[id];
      if (axes.length !== 1) continue;
      const [name, , start, step] = data.pools.axes[axes[0]], at = letters.indexOf(rule.text(name));
      if (at >= 0) found[at] = [start + step * lo, start + step * (hi - 1)];
    }
    if (found.some((one) => one === null)) return null;
    const each = rule.product(load.tensor === "x" ? p.spatial : p.out), slices = new Set(load.elements.map((one) => Math.floor(one / each)));
    const [rows, columns] = found.length === 1 ? [[0, 0], found[0]] : found;
    return { top: rows[0], height: rows[1] - rows[0] + 1, left: columns[0], width: columns[1] - columns[0] + 1, slices };
  }

  function showTrace() {
    entry = find();
    pause();
    const why = refusal(state.engine);
    fillControls();
    $("refused").hidden = why === null;
    $("stage").hidden = why !== null;
    trace = player = shownFrame = null;
    if (why !== null) {
      const problem = entry.facts ? entry.facts.text : "this combination";
      $("refused").textContent = `${ENGINES[state.engine][0]} does not take ${problem}: ${why}.`;
      $("caption").replaceChildren();
      writeHash();
      return;
    }
    const traces = entry.engines[state.engine];
    state.knobs = Math.min(state.knobs, traces.length - 1);
    trace = rule.decode(traces[state.knobs], entry.facts);
    hands = trace.owners();
    player = new Player(trace);
    trace.exact = exact(entry.facts);
    if (state.pinned !== null && state.pinned >= hands.stores.length) state.pinned = null;
    state.hover = null;
    tellTrace();
    showFrame();
    compare();
  }

  // -- controls ----------------------------------------------------------------------------------------------------------

  function fillControls() {
    for (const [key] of CHOICES) if ($(key)) $(key).value = state.given ? "" : state.values[key];
    if ($("problem")) $("problem").value = state.given ? "given" : "chosen";
    for (const button of $("passes").querySelectorAll("button")) button.setAttribute("aria-pressed", button.value === state.pass);
    const why = ENGINES.map((_, at) => refusal(at));
    [...$("engines").querySelectorAll("button")].forEach((button, at) => {
      button.setAttribute("aria-pressed", at === state.engine);
      button.classList.toggle("refused", why[at] !== null);
      button.title = why[at] === null ? ENGINES[at][0] : `${ENGINES[at][0]}: ${why[at]}`;
    });
    const lines = new Map();
    why.forEach((reason, at) => reason !== null && lines.set(reason, [...(lines.get(reason) || []), ENGINES[at][0]]));
    $("refusals").replaceChildren(...[...lines].map(([reason, names]) => make("li", {}, names.length === ENGINES.length ? `no engine: ${reason}` : `${names.join(", ")}: ${reason}`)));
    const traces = why[state.engine] === null ? entry.engines[state.engine] : [];
    $("knobs-label").hidden = traces.length < 2;
    $("knobs").replaceChildren(...traces.map((id, at) => make("option", { value: at }, rule.text(data.traces[id].knobs) + (at ? "" : " (first choice)"))));
    $("knobs").value = state.knobs;
  }

  function buildControls() {
    const sizes = $("sizes");
    if (data.catalogue.length) {
      const select = make("select", { id: "problem" }, make("option", { value: "given" }, "as given"), make("option", { value: "chosen" }, "by size"));
      sizes.append(make("label", {}, "Problem", select));
      select.addEventListener("change", () => change({ given: select.value === "given" }));
      for (const [key, label, values] of CHOICES) {
        const one = make("select", { id: key }, make("option", { value: "", hidden: "" }, "given"), ...values.map((value) => make("option", { value }, key === "image" && !value.includes("x") ? `${value}x${value}` : key === "filter" ? `${value}x${value}` : value)));
        sizes.append(make("label", {}, label, one));
        one.addEventListener("change", () => {
          state.values[key] = one.value;
          change({ given: false });
        });
      }
    } else sizes.hidden = true;
    for (const pass of PASSES) {
      const button = make("button", { type: "button", value: pass }, pass);
      button.addEventListener("click", () => change({ pass, pinned: null }));
      $("passes").append(button);
    }
    ENGINES.forEach(([name, label], at) => {
      const button = make("button", { type: "button", value: name }, label);
      button.addEventListener("click", () => change({ engine: at }));
      $("engines").append(button);
    });
    $("knobs").addEventListener("change", () => {
      state.knobs = Number($("knobs").value);
      state.frame = 0;
      showTrace();
    });
    for (const [id, key] of [["slice-n", "n"], ["slice-c", "c"], ["slice-k", "k"]])
      $(id).addEventListener("change", () => {
        state[key] = Number($(id).value);
        state.follow = false;
        showFrame();
      });
    $("follow").addEventListener("change", () => {
      state.follow = $("follow").checked;
      showFrame();
    });
    $("slider").addEventListener("input", () => go(Number($("slider").value) - 1));
    $("first").addEventListener("click", () => go(0));
    $("back").addEventListener("click", () => go(state.frame - 1));
    $("forward").addEventListener("click", () => go(state.frame + 1));
    $("next-block").addEventListener("click", nextBlock);
    $("play").addEventListener("click", () => (state.playing ? pause() : play()));
    $("speed").addEventListener("change", () => state.playing && play());
    addEventListener("keydown", keyed);
    addEventListener("hashchange", () => {
      readHash();
      showTrace();
    });
    for (const view of views) {
      view.svg.addEventListener("pointermove", (event) => event.pointerType !== "touch" && hover(cellAt(view, event)));
      view.svg.addEventListener("pointerleave", () => hover(null));
      view.svg.addEventListener("click", (event) => pin(cellAt(view, event)));
      view.svg.addEventListener("keydown", (event) => cellKey(view, event));
      view.svg.addEventListener("blur", () => hover(null));
    }
    const swatch = (content) => {
      const svg = draw("svg", { viewBox: "-.1 -.1 1.2 1.2", "aria-hidden": "true" });
      svg.append(...content);
      return svg;
    };
    const cell = (name, colour) => {
      const path = draw("path", { d: "M0 0h1v1h-1z", class: name });
      if (colour) path.style.fill = colour;
      return path;
    };
    for (const [words, ...content] of [
      ["not loaded yet", cell("none")], ["loaded before", cell("old")], ["in shared memory", cell("shared")], ["loaded in this step", cell("new")],
      ["padding: a zero that nothing loads", cell("pad")], ["multiplied in this step", cell("none"), draw("circle", { cx: 0.5, cy: 0.5, r: 0.17, class: "dots" })],
      ["by the thread or warp that is followed", cell("none"), draw("rect", { x: 0.22, y: 0.22, width: 0.56, height: 0.56, class: "mine" })],
      ["result: waits", cell("wait", "var(--b0)")], ["is being summed", cell("sum", "var(--b0)")], ["is stored; a colour for each block", cell("done", "var(--b0)")],
      ["the result pointed at, and its inputs", cell("none"), draw("rect", { x: 0.05, y: 0.05, width: 0.9, height: 0.9, class: "hot" })],
    ]) $("legend").append(make("span", {}, swatch(content), words));
    $("legend").append(make("span", { class: "soft" }, "Numbers: how often an element was loaded, if more than once."));
  }

  function change(to) {
    Object.assign(state, to, { knobs: 0, frame: 0, follow: true });
    if (!("engine" in to)) state.pinned = null;
    showTrace();
  }

  function go(frame) {
    if (!trace) return;
    state.frame = frame;
    showFrame();
  }

  function nextBlock() {
    const at = trace.frames.findIndex((frame, i) => i > state.frame && frame.block !== shownFrame.block);
    if (at >= 0) go(at);
  }

  function play() {
    pause();
    if (!trace) return;
    if (state.frame === trace.frames.length - 1) go(0);
    $("play").textContent = "Pause";
    state.playing = setInterval(() => {
      go(state.frame + 1);
      if (state.frame === trace.frames.length - 1) pause();
    }, 1000 / Number($("speed").value));
  }

  function pause() {
    clearInterval(state.playing);
    state.playing = null;
    $("play").textContent = "Play";
  }

  function keyed(event) {
    if (!trace || event.ctrlKey || event.metaKey || event.altKey) return;
    const on = event.target.closest?.("select, input, button, svg.result"), inButton = on && on.tagName === "BUTTON";
    if (event.key === "Escape") {
      state.pinned = state.hover = null;
      showFrame();
      return;
    }
    if (on && !(inButton && event.key !== " ")) return;
    const act = { " ": () => (state.playing ? pause() : play()), ArrowRight: () => go(state.frame + 1), ArrowLeft: () => go(state.frame - 1),
                  Home: () => go(0), End: () => go(trace.frames.length - 1), n: nextBlock, N: nextBlock }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  function cellAt(view, event) {
    if (!trace || view.tensor !== RESULT[trace.problem.direction]) return null;
    const at = slice(view.tensor), point = new DOMPoint(event.clientX, event.clientY).matrixTransform(view.svg.getScreenCTM().inverse());
    const row = Math.floor(point.y), column = Math.floor(point.x);
    return at.there && row >= 0 && column >= 0 && row < at.rows && column < at.columns ? at.first + row * at.columns + column : null;
  }

  function hover(at) {
    if (!trace || state.hover === at) return;
    state.hover = at;
    drawOver();
    tellStep();
  }

  function pin(at) {
    if (at === null) return;
    state.pinned = state.pinned === at ? null : at;
    showFrame();
  }

  function cellKey(view, event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!trace || view.tensor !== RESULT[trace.problem.direction]) return;
    const at = slice(view.tensor);
    if (event.key === "Enter" && state.hover !== null) pin(state.hover);
    if (!move || !at.there) return;
    event.preventDefault();
    event.stopPropagation();
    const from = state.hover === null || state.hover < at.first || state.hover >= at.first + at.each ? null : state.hover - at.first;
    if (from === null) return hover(at.first);
    const row = Math.floor(from / at.columns) + move[0], column = (from % at.columns) + move[1];
    if (row >= 0 && column >= 0 && row < at.rows && column < at.columns) hover(at.first + row * at.columns + column);
  }

  buildControls();
  readHash();
  showTrace();
  document.documentElement.dataset.ready = "yes";
})();
