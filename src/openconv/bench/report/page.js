"use strict";
(() => {
  // Text from the records reaches the page through textContent and attributes only, never as markup.

  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const PASSES = ["fprop", "dgrad", "wgrad"];
  const FAMILIES = ["1x1", "dense", "depthwise", "patches", "image filter", "tiny", "grouped"];
  const ROWS = 100;

  // -- records -------------------------------------------------------------------------------------------------------

  const nameAt = (at) => (at === undefined ? "" : data.names[at]);
  const named = (found) => new Map(Object.entries(found || {}).map(([at, value]) => [data.names[at], value]));

  const records = data.records.map((raw, at) => {
    const record = {
      raw, at, run: raw.m, machine: data.runs[raw.m], suite: nameAt(raw.s), label: nameAt(raw.l),
      problem: nameAt(raw.x), chosen: nameAt(raw.c), engine: nameAt(raw.g), direction: nameAt(raw.d),
      dtype: nameAt(raw.y), layout: nameAt(raw.a), family: nameAt(raw.k), times: named(raw.t),
      share: named(raw.q), wrong: raw.n || [], flops: raw.f || 0, bytes: raw.b || 0,
    };
    const words = [record.suite, record.label, record.problem, record.chosen, record.machine, record.family];
    record.text = words.join(" ").toLowerCase();
    return record;
  });

  const isEngine = (name) => name.includes(".");
  const median = (record, name) => (record.times.has(name) ? record.times.get(name)[0] : null);

  function fastestEngine(record) {
    let best = null;
    for (const [name, [time]] of record.times) if (isEngine(name) && (best === null || time < best)) best = time;
    return best;
  }

  /** What depends on the contestant and the peer that were picked. */
  function judge(record, contestant, peer) {
    record.subject = contestant || record.chosen;
    record.time = median(record, record.subject);
    record.theirs = median(record, peer);
    record.ratio = record.time && record.theirs ? record.theirs / record.time : null;
    const best = record.time && isEngine(record.subject) ? fastestEngine(record) : null;
    record.regret = best ? record.time / best : null;
    record.isWrong = record.subject !== "" && record.wrong.includes(record.subject);
  }

  // -- numbers as text -----------------------------------------------------------------------------------------------

  const digits = (value) => (Math.abs(value) >= 99.95 ? value.toFixed(0) : value.toPrecision(3));
  const short = (value) => String(Number(value.toPrecision(3)));

  function si(value, unit = "", text = digits) {
    const steps = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
    const [prefix, scale] = steps.find(([, size]) => Math.abs(value) >= size * 0.9995) || ["", 1];
    return `${text(value / scale)} ${prefix}${unit}`.trim();
  }

  function seconds(value) {
    if (value === null || value === undefined) return "";
    const [unit, scale] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find(([, size]) => value >= size) || ["us", 1e-6];
    return `${digits(value / scale)} ${unit}`;
  }

  const number = (value, places = 2) => (value === null || value === undefined ? "" : value.toFixed(places));
  const percent = (value) => (value === null || value === undefined ? "" : `${number(100 * value, value < 0.1 ? 1 : 0)} %`);
  const tiny = (value) => (value === null || value === undefined ? "" : value === 0 ? "0" : value.toExponential(1));

  function geometricMean(values) {
    if (!values.length) return null;
    return Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length);
  }

  // -- elements ------------------------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function svg(tag, attributes = {}, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  const ratioClass = (ratio) => (ratio >= 1 ? "fast" : "slow");

  // -- filters -------------------------------------------------------------------------------------------------------

  const FILTERS = { suite: "suite", direction: "direction", dtype: "dtype", layout: "layout", engine: "engine" };
  const different = (values) => [...new Set(values)].filter((value) => value !== "");
  const contestants = different(records.flatMap((record) => [...record.times.keys()]));
  const peers = contestants.filter((name) => !isEngine(name)).sort((a, b) => peerOrder(a).localeCompare(peerOrder(b)));

  function peerOrder(name) {
    return (name === "torch" ? "0" : name.startsWith("torch") ? "1" : "2") + name;
  }

  function fill(id, options) {
    $(id).replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  }

  function fillControls() {
    fill("machine", [["", `all (${data.runs.length})`], ...data.runs.map((title, at) => [String(at), title])]);
    for (const [id, field] of Object.entries(FILTERS)) {
      const values = different(records.map((record) => record[field]));
      if (id === "direction") values.sort((a, b) => PASSES.indexOf(a) - PASSES.indexOf(b));
      else values.sort();
      fill(id, [["", `all (${values.length})`], ...values.map((value) => [value, value])]);
    }
    const plain = contestants.filter((name) => isEngine(name) && !name.includes("[")).sort();
    fill("contestant", [["", "openconv's choice"], ...[...plain, ...peers].map((name) => [name, name])]);
    fill("peer", peers.map((name) => [name, name]));
  }

  const peerName = () => $("peer").value;
  const contestantName = () => $("contestant").value || "openconv";

  function matches(record, words) {
    if ($("machine").value !== "" && record.run !== Number($("machine").value)) return false;
    for (const [id, field] of Object.entries(FILTERS)) {
      if ($(id).value !== "" && record[field] !== $(id).value) return false;
    }
    return words.every((word) => record.text.includes(word));
  }

  function selected() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = records.filter((record) => matches(record, words));
    for (const record of kept) judge(record, $("contestant").value, peerName());
    return $("losses").checked ? kept.filter((r) => r.isWrong || (r.ratio !== null && r.ratio < 1)) : kept;
  }

  // -- summary -------------------------------------------------------------------------------------------------------

  function showSummary(shown) {
    const ratios = shown.map((record) => record.ratio).filter((ratio) => ratio !== null);
    const mean = geometricMean(ratios);
    const slower = ratios.filter((ratio) => ratio < 1).length;
    const wrong = shown.filter((record) => record.wrong.length).length;
    const parts = [element("b", {}, String(shown.length)), ` of ${records.length} problems`];
    if (mean !== null) {
      const over = ratios.length < shown.length ? `, over ${ratios.length} of them` : "";
      parts.push(": ", element("b", { class: ratioClass(mean) }, `${number(mean)}x`),
        ` as fast as ${peerName()} in the geometric mean${over}; `,
        element("b", { class: slower ? "slow" : "fast" }, String(slower)), " slower");
    } else if (shown.length) {
      parts.push(`: none has times of both ${contestantName()} and ${peerName()}`);
    }
    if (wrong) parts.push("; ", element("b", { class: "wrong" }, `${wrong} with a wrong result`));
    $("summary").replaceChildren(...parts);
    Object.assign($("summary").dataset, { count: shown.length, mean: mean === null ? "" : mean, slower, wrong });
  }

  function meanCell(group) {
    const ratios = group.map((record) => record.ratio).filter((ratio) => ratio !== null);
    const cell = element("td", { class: "n" });
    if (!ratios.length) return cell;
    const mean = geometricMean(ratios);
    const slower = ratios.filter((ratio) => ratio < 1).length;
    const span = ` (${number(Math.min(...ratios))} to ${number(Math.max(...ratios))})`;
    cell.append(element("span", { class: ratioClass(mean) }, number(mean)), span, `, ${slower} of ${ratios.length} slower`);
    return cell;
  }

  function showMeans(shown) {
    const passes = PASSES.filter((name) => shown.some((record) => record.direction === name));
    const suites = different(shown.map((record) => record.suite)).sort();
    const head = element("tr", {}, element("th", {}, "suite"));
    passes.forEach((name) => head.append(element("th", { class: "n" }, name)));
    const rows = suites.map((suite) => {
      const row = element("tr", {}, element("td", {}, suite));
      const own = shown.filter((record) => record.suite === suite);
      passes.forEach((name) => row.append(meanCell(own.filter((record) => record.direction === name))));
      return row;
    });
    $("means").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  // -- table ---------------------------------------------------------------------------------------------------------

  const SEVERAL = data.runs.length > 1;
  const COLUMNS = [
    { id: "suite", title: "suite", value: (r) => r.suite },
    { id: "label", title: "layer", value: (r) => r.label },
    { id: "problem", title: "problem", value: (r) => r.problem, code: true },
    { id: "engine", title: "engine", value: (r) => r.subject },
    { id: "time", title: "time", value: (r) => r.time, text: seconds },
    { id: "theirs", title: "peer", value: (r) => r.theirs, text: seconds },
    { id: "ratio", title: "ratio", value: (r) => r.ratio, text: number, ratio: true },
    { id: "share", title: "of roofline", value: (r) => r.share.get(r.subject) ?? null, text: percent },
    { id: "speed", title: "FLOP/s", value: (r) => (r.time ? r.flops / r.time : null), text: (v) => (v === null ? "" : si(v)) },
    { id: "regret", title: "regret", value: (r) => r.regret, text: number },
    ...(SEVERAL ? [{ id: "machine", title: "machine", value: (r) => r.machine }] : []),
  ];
  const order = { column: COLUMNS.find((column) => column.id === "ratio"), sign: 1 };
  let page = 0;
  let shown = [];

  function sortRecords(list) {
    const { column, sign } = order;
    return list.map((record) => [column.value(record), record]).sort(([a, first], [b, second]) => {
      if ((a === null || a === "") !== (b === null || b === "")) return a === null || a === "" ? 1 : -1;
      const found = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
      return sign * found || first.at - second.at;
    }).map(([, record]) => record);
  }

  function makeHead() {
    const cells = COLUMNS.map((column) => {
      const button = element("button", { type: "button" }, column.title);
      button.addEventListener("click", () => {
        order.sign = order.column === column ? -order.sign : 1;
        order.column = column;
        page = 0;
        showTable();
      });
      return element("th", { "data-column": column.id, scope: "col", class: column.text ? "n" : "" }, button);
    });
    $("problems").tHead.replaceChildren(element("tr", {}, ...cells));
  }

  function makeCell(record, column) {
    const value = column.value(record);
    const cell = element("td", { class: column.text ? "n" : "" });
    if (column.code) cell.append(element("code", {}, value));
    else if (column.id === "engine" && record.wrong.length) {
      const others = record.wrong.filter((name) => name !== record.subject);
      cell.append(value, " ", element("span", { class: "wrong" }, others.length ? `WRONG: ${others.join(", ")}` : "WRONG"));
    } else cell.textContent = column.text ? column.text(value) : value;
    if (column.ratio && value !== null) cell.classList.add(ratioClass(value));
    return cell;
  }

  function makeRow(record) {
    const row = element("tr", { tabindex: "0" }, ...COLUMNS.map((column) => makeCell(record, column)));
    const beside = () => { const box = row.getBoundingClientRect(); return [Math.min(box.right, innerWidth) - 900, box.bottom]; };
    row.addEventListener("focus", () => row.matches(":focus-visible") && showDetails(record, ...beside(), false));
    row.addEventListener("click", (event) => showDetails(record, event.clientX, event.clientY, true));
    row.addEventListener("keydown", (event) => event.key === "Enter" && showDetails(record, ...beside(), true));
    row.addEventListener("blur", hideUnpinned);
    return row;
  }

  function showTable() {
    const sorted = sortRecords(shown);
    const pages = Math.max(1, Math.ceil(sorted.length / ROWS));
    page = Math.min(page, pages - 1);
    const rows = sorted.slice(page * ROWS, (page + 1) * ROWS).map(makeRow);
    $("problems").tBodies[0].replaceChildren(...rows);
    for (const head of $("problems").tHead.rows[0].cells) {
      const own = head.dataset.column === order.column.id;
      head.setAttribute("aria-sort", own ? (order.sign > 0 ? "ascending" : "descending") : "none");
      if (head.dataset.column === "theirs") head.firstChild.textContent = peerName();
      if (head.dataset.column === "ratio") head.firstChild.textContent = `x ${peerName()}`;
    }
    $("page").textContent = sorted.length ? `${page * ROWS + 1} to ${page * ROWS + rows.length} of ${sorted.length}` : "nothing";
    $("previous").disabled = page === 0;
    $("next").disabled = page === pages - 1;
  }

  // -- details -------------------------------------------------------------------------------------------------------

  const details = $("details");
  let pinned = null;

  function contestantRows(record) {
    const raw = record.raw;
    const [predicted, error, workspace, overhead] = [raw.p, raw.e, raw.w, raw.h].map(named);
    const ours = median(record, record.chosen);
    const known = [...record.times.keys(), ...record.wrong, ...predicted.keys(), ...error.keys()];
    const names = different(known).sort((a, b) => (median(record, a) ?? Infinity) - (median(record, b) ?? Infinity));
    return names.map((name) => {
      const [middle, low, high] = record.times.get(name) || [null, null, null];
      const bad = record.wrong.includes(name);
      const cells = [
        seconds(middle), low === null || high === null ? "" : `${seconds(low)} to ${seconds(high)}`,
        ours && middle ? number(middle / ours) : "", percent(record.share.get(name)), tiny(error.get(name)),
        seconds(predicted.get(name)), workspace.has(name) ? si(workspace.get(name), "B") : "", seconds(overhead.get(name)),
      ];
      const first = element("td", {}, name === record.chosen ? element("b", {}, name) : name);
      if (bad) first.append(" ", element("span", { class: "wrong" }, "WRONG"));
      return [first, ...cells.map((text) => element("td", { class: "n" }, text))];
    });
  }

  function contestantTable(record) {
    const titles = ["contestant", "median", "p20 to p80", "over ours", "of roofline", "error", "predicted", "workspace", "overhead"];
    const rows = contestantRows(record);
    // A column that no contestant has is left out.
    const used = titles.map((_, at) => at === 0 || rows.some((cells) => cells[at].textContent));
    const head = titles.map((title, at) => element("th", { class: at ? "n" : "" }, title)).filter((_, at) => used[at]);
    const body = rows.map((cells) => element("tr", {}, ...cells.filter((_, at) => used[at])));
    return element("div", { class: "scroll" },
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
  }

  /** The commit and the command on lines of their own; the device and the versions on one. */
  function machineFacts(machine) {
    const text = (value) => (value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
    const own = ["commit", "command"].filter((name) => name in machine).map((name) => [name, text(machine[name])]);
    const rest = Object.entries(machine).filter(([name]) => name !== "commit" && name !== "command");
    return [["machine", rest.map(([name, value]) => `${name} ${text(value)}`).join(", ")], ...own];
  }

  function facts(record) {
    const raw = record.raw;
    const list = [
      ["suite, layer", `${record.suite}, ${record.label}`],
      ["engine chosen", record.chosen || "none"],
      ["chosen by", nameAt(raw.r)],
      ["best by prediction", nameAt(raw.u)],
      ["knobs", Object.entries(raw.j || {}).map(([name, text]) => `${name}: ${text}`).join("; ")],
      ["work", `${si(record.flops, "FLOP")}, at least ${si(record.bytes, "B")}, ${digits(record.flops / (record.bytes || 1))} FLOP/B`],
      ["reached", record.time ? `${si(record.flops / record.time, "FLOP/s")}, ${si(record.bytes / record.time, "B/s")}` : ""],
      ["ceilings", Object.entries(data.ceilings[raw.o]).map(([name, v]) => `${name} ${si(v, name === "copy" ? "B/s" : "FLOP/s")}`).join(", ")],
      ...[...named(raw.z)].map(([name, note]) => [`${name}:`, note]),
      ...machineFacts(data.machines[raw.v]),
    ];
    return list.filter(([, text]) => text !== "");
  }

  function showDetails(record, x, y, pin) {
    if (pinned && !pin) return;
    const close = element("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
    close.addEventListener("click", hideDetails);
    const ratio = record.ratio === null ? "" : element("span", { class: ratioClass(record.ratio) }, `${number(record.ratio)}x ${peerName()}`);
    const list = element("dl", {}, ...facts(record).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
    details.replaceChildren(close, element("h3", {}, element("code", {}, record.problem)), element("p", {}, ratio), contestantTable(record), list);
    details.hidden = false;
    details.scrollTop = 0;
    pinned = pin ? record : null;
    details.classList.toggle("pinned", pin);
    place(x, y);
  }

  /** Beside the pointer, on the side where there is room. */
  function place(x, y) {
    const box = details.getBoundingClientRect();
    const left = x + 18 + box.width > innerWidth ? x - 18 - box.width : x + 18;
    const top = y + 18 + box.height > innerHeight ? innerHeight - box.height - 8 : y + 18;
    details.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    details.style.top = `${Math.max(8, top)}px`;
  }

  function hideDetails() {
    pinned = null;
    details.hidden = true;
    charts.forEach((chart) => chart.mark(null));
  }

  function hideUnpinned() {
    if (!pinned) hideDetails();
  }

  // -- charts --------------------------------------------------------------------------------------------------------

  const logScale = (low, high, from, to) => (v) => from + ((Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);

  function span(values, least = 4) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
    if (!(low <= high)) return [1, 10];
    const pad = Math.max(1.25, Math.sqrt(least / (high / low)));
    return [low / pad, high * pad];
  }

  /** Round values of a logarithmic axis: 1, 2, 5 of each decade, or decades alone where there are many. */
  function logTicks(low, high, most) {
    const decades = Math.log10(high / low);
    const steps = decades * 3 <= most ? [1, 2, 5] : [1];
    const skip = steps.length === 1 ? Math.ceil(decades / most) : 1;
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      if (((power % skip) + skip) % skip) continue;
      for (const step of steps) {
        const value = Number((step * 10 ** power).toPrecision(3));
        if (value >= low && value <= high) found.push(value);
      }
    }
    return found;
  }

  /** A chart in a box of the page. Marks of a series are one path, so that thousands of them cost little; what lies
      under the pointer is found from the places, nearest first. */
  function makeChart(host, label) {
    const legend = element("div", { class: "legend" });
    const area = element("div", {});
    host.append(legend, area);
    let places = [];
    let at = -1;
    let ring = null;
    let root = null;
    let nearX = false;

    function mark(place) {
      if (!ring) return;
      ring.setAttribute("visibility", place ? "visible" : "hidden");
      if (place) { ring.setAttribute("cx", place.px); ring.setAttribute("cy", place.py); }
    }

    function nearest(event) {
      const box = root.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      let [best, distance] = [-1, nearX ? 20 : 18 * 18];
      places.forEach((place, index) => {
        const far = nearX ? Math.abs(place.px - x) : (place.px - x) ** 2 + (place.py - y) ** 2;
        if (far < distance) [best, distance] = [index, far];
      });
      return best;
    }

    function point(event, pin) {
      const found = nearest(event);
      if (found < 0) { if (pin) hideDetails(); else hideUnpinned(); return; }
      if (pinned && !pin) return;
      at = found;
      mark(places[at]);
      showDetails(places[at].record, event.clientX, event.clientY, pin);
    }

    function onKey(event) {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      const step = steps[event.key] || 0;
      if ((!step && event.key !== "Enter") || !places.length) return;
      event.preventDefault();
      at = (Math.max(at, step > 0 ? -1 : 0) + step + places.length) % places.length;
      pinned = null;
      mark(places[at]);
      const box = root.getBoundingClientRect();
      showDetails(places[at].record, box.left + places[at].px, box.top + places[at].py, event.key === "Enter");
    }

    function listen() {
      let waiting = false;
      root.addEventListener("pointermove", (event) => {
        if (waiting || event.pointerType === "touch") return;
        waiting = true;
        requestAnimationFrame(() => { waiting = false; point(event, false); });
      });
      root.addEventListener("pointerleave", hideUnpinned);
      root.addEventListener("click", (event) => point(event, true));
      root.addEventListener("keydown", onKey);
      root.addEventListener("focus", () => root.matches(":focus-visible") && places.length && onKey(new KeyboardEvent("keydown", { key: "ArrowRight" })));
      root.addEventListener("blur", hideUnpinned);
    }

    /** paint(root, width, height) draws into the element and returns the places of its marks. */
    function draw({ height, entries, paint, column }) {
      const width = Math.max(280, area.clientWidth);
      legend.replaceChildren(...entries.map(legendEntry));
      nearX = Boolean(column);
      at = -1;
      root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", class: "canvas", role: "group", "aria-label": `${label}; arrow keys go from mark to mark` });
      places = paint(root, width, height).sort((a, b) => a.px - b.px);
      ring = svg("circle", { class: "ring", r: 7, visibility: "hidden" });
      root.append(ring);
      listen();
      area.replaceChildren(root);
    }

    function say(text) {
      places = [];
      [root, ring] = [null, null];
      legend.replaceChildren();
      area.replaceChildren(element("div", { class: "empty" }, text));
    }

    return { draw, say, mark };
  }

  function legendEntry({ text, colour, kind }) {
    const sign = svg("svg", { viewBox: "0 0 14 12" });
    sign.append(markPath(kind, colour, [{ px: 7, py: 6 }]));
    return element("span", {}, sign, text);
  }

  const CROSS = 3.5;

  function markPath(kind, colour, places) {
    const shape = kind === "cross"
      ? ({ px, py }) => `M${(px - CROSS).toFixed(1)} ${py.toFixed(1)}h${2 * CROSS}m${-CROSS} ${-CROSS}v${2 * CROSS}`
      : kind === "line" ? ({ px, py }) => `M${px - 7} ${py}h14` : ({ px, py }) => `M${px.toFixed(1)} ${py.toFixed(1)}h.01`;
    return svg("path", { class: kind === "line" ? "roof" : kind, d: places.map(shape).join(""), style: `stroke: ${colour}` });
  }

  function drawAxes(root, frame, { x, y }) {
    const { left, right, top, bottom } = frame;
    for (const tick of y.ticks) {
      const py = y.scale(tick);
      root.append(svg("line", { class: "grid", x1: left, x2: right, y1: py, y2: py }));
      root.append(svg("text", { x: left - 6, y: py + 4, "text-anchor": "end" }, y.text(tick)));
    }
    for (const tick of x.ticks) {
      const px = x.scale(tick);
      root.append(svg("line", { class: "grid", x1: px, x2: px, y1: top, y2: bottom }));
      root.append(svg("text", { x: px, y: bottom + 16, "text-anchor": "middle" }, x.text(tick)));
    }
    root.append(svg("text", { class: "title", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, x.title));
    root.append(svg("text", { class: "title", transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.title));
  }

  /** A scatter on two logarithmic axes; ``roofs`` are the ceilings of a roofline. */
  function scatter(root, width, height, { series, roofs = [], xTitle, yTitle }) {
    const frame = { left: 62, right: width - 12, top: 10, bottom: height - 44 };
    const points = series.flatMap((one) => one.points);
    const [xLow, xHigh] = span([...points.map((p) => p.x), ...roofs.map((roof) => roof.peak / roof.copy)]);
    const [yLow, yHigh] = span([...points.map((p) => p.y), ...roofs.map((roof) => roof.peak)]);
    const x = { scale: logScale(xLow, xHigh, frame.left, frame.right), ticks: logTicks(xLow, xHigh, width / 90), text: (v) => si(v, "", short), title: xTitle };
    const y = { scale: logScale(yLow, yHigh, frame.bottom, frame.top), ticks: logTicks(yLow, yHigh, 8), text: (v) => si(v, "", short), title: yTitle };
    drawAxes(root, frame, { x, y });
    const labels = drawRoofs(root, frame, { x, y, xLow, xHigh, yLow }, roofs);
    const all = [];
    for (const { colour, kind, points: own } of series) {
      const places = own.map((p) => ({ px: x.scale(p.x), py: y.scale(p.y), record: p.record }));
      root.append(markPath(kind, colour, places));
      for (const place of places) all.push(place);
    }
    root.append(...labels); // over the marks
    return all;
  }

  /** Draw the ceilings; returns their labels, one for those that lie close together. */
  function drawRoofs(root, frame, { x, y, xLow, xHigh, yLow }, roofs) {
    const labels = [];
    for (const { copy, peak, text } of roofs) {
      const start = Math.max(xLow, yLow / copy);
      const knee = Math.min(peak / copy, xHigh);
      const path = [[start, start * copy], [knee, knee * copy], [xHigh, Math.min(peak, xHigh * copy)]];
      root.append(svg("path", { class: "roof", d: path.map(([a, b], at) => `${at ? "L" : "M"}${x.scale(a).toFixed(1)} ${y.scale(b).toFixed(1)}`).join("") }));
      const py = y.scale(peak) - 5;
      const near = labels.find((other) => Math.abs(other.py - py) < 13);
      if (!near) labels.push({ py, text });
      else if (!near.text.split("; ").includes(text)) near.text += `; ${text}`;
    }
    return labels.map(({ py, text }) => svg("text", { class: "title over", x: frame.right, y: py, "text-anchor": "end" }, text));
  }

  const charts = [
    makeChart($("ratio"), "Ratio per problem"), makeChart($("roofline"), "Roofline"), makeChart($("growth"), "Speed against size"),
  ];

  function drawRatios(list) {
    $("ratio-title").textContent = `How many times as fast as ${peerName()}: ${contestantName()}, problem by problem`;
    const own = list.filter((record) => record.ratio !== null);
    own.sort((a, b) => a.suite.localeCompare(b.suite) || a.ratio - b.ratio || a.at - b.at);
    if (!own.length) return charts[0].say(`No problem shown has times of both ${contestantName()} and ${peerName()}.`);
    const entries = [
      { text: "faster", colour: "var(--fast)", kind: "dot" }, { text: "slower", colour: "var(--slow)", kind: "dot" },
    ];
    return charts[0].draw({ height: 320, entries, column: true, paint: (root, width, height) => paintRatios(root, width, height, own) });
  }

  function paintRatios(root, width, height, own) {
    const frame = { left: 62, right: width - 12, top: 10, bottom: height - 78 };
    const [low, high] = span([1, ...own.map((record) => record.ratio)]);
    const y = { scale: logScale(low, high, frame.bottom, frame.top), ticks: logTicks(low, high, 8), text: (v) => `${v}x`, title: `x ${peerName()}` };
    const step = (frame.right - frame.left) / own.length;
    const places = own.map((record, at) => ({ px: frame.left + (at + 0.5) * step, py: y.scale(record.ratio), record }));
    drawBands(root, frame, places, step);
    drawAxes(root, frame, { x: { ticks: [], title: "" }, y });
    const thick = Math.max(1, Math.min(14, step * 0.75));
    for (const [colour, bars] of [["var(--fast)", places.filter((p) => p.record.ratio >= 1)], ["var(--slow)", places.filter((p) => p.record.ratio < 1)]]) {
      const d = bars.map(({ px, py }) => `M${px.toFixed(2)} ${y.scale(1).toFixed(1)}V${py.toFixed(1)}`).join("");
      root.append(svg("path", { class: "bar", d, style: `stroke: ${colour}; stroke-width: ${thick}` }));
    }
    root.append(svg("line", { class: "one", x1: frame.left, x2: frame.right, y1: y.scale(1), y2: y.scale(1) }));
    return places;
  }

  /** Every other suite has a shaded ground; names that would run into each other are left to the pointer. */
  function drawBands(root, frame, places, step) {
    const suites = different(places.map((place) => place.record.suite));
    let from = frame.left;
    let free = -Infinity;
    suites.forEach((suite, at) => {
      const size = places.filter((place) => place.record.suite === suite).length * step;
      if (at % 2) root.append(svg("rect", { class: "band", x: from, y: frame.top, width: size, height: frame.bottom - frame.top }));
      const middle = from + size / 2;
      if (middle > free) {
        const text = suite.length > 18 ? `${suite.slice(0, 17)}…` : suite;
        root.append(svg("text", { transform: `translate(${middle + 4} ${frame.bottom + 14}) rotate(-35)`, "text-anchor": "end" }, text));
        free = middle + 28; // lines at this angle need 13 pixels between them
      }
      from += size;
    });
  }

  /** The ceilings of the records shown: the highest of each machine and dtype, of those with most records. */
  function roofsOf(list) {
    const found = new Map();
    for (const record of list) {
      const ceilings = data.ceilings[record.raw.o];
      const [copy, peak] = [ceilings.copy, ceilings[record.raw.i]];
      if (!copy || !peak) continue;
      const key = `${record.run} ${record.raw.i}`;
      const roof = found.get(key) || { copy: 0, peak: 0, count: 0, dtype: record.raw.i };
      found.set(key, { ...roof, copy: Math.max(copy, roof.copy), peak: Math.max(peak, roof.peak), count: roof.count + 1 });
    }
    return [...found.values()].sort((a, b) => b.count - a.count).slice(0, 6)
      .map((roof) => ({ ...roof, text: `${roof.dtype} ${si(roof.peak, "FLOP/s")}` }));
  }

  function drawRoofline(list) {
    const dots = (time) => list.filter((r) => r[time] && r.flops && r.bytes).map((r) => ({ x: r.flops / r.bytes, y: r.flops / r[time], record: r }));
    const series = [
      { text: peerName(), colour: "var(--slow)", kind: "cross", points: dots("theirs") },
      { text: contestantName(), colour: "var(--fast)", kind: "dot", points: dots("time") },
    ].filter((one) => one.points.length);
    if (!series.length) return charts[1].say("No problem shown has been timed.");
    const roofs = roofsOf(list);
    const entries = roofs.length ? [...series, { text: "ceilings, measured", colour: "var(--text)", kind: "line" }] : series;
    const titles = { xTitle: "arithmetic intensity, FLOP per byte", yTitle: "reached, FLOP/s" };
    return charts[1].draw({ height: 360, entries, paint: (root, width, height) => scatter(root, width, height, { series, roofs, ...titles }) });
  }

  function drawGrowth(list) {
    const measure = $("measure").value;
    const timed = list.map((r) => [r, r.time || r.theirs]).filter(([r, time]) => time && r[measure]);
    const series = FAMILIES.map((family, at) => ({
      text: family, colour: `var(--f${at})`, kind: "dot",
      points: timed.filter(([r]) => r.family === family).map(([r, time]) => ({ x: r[measure], y: r[measure] / time, record: r })),
    })).filter((one) => one.points.length);
    if (!series.length) return charts[2].say("No problem shown has been timed.");
    const unit = measure === "flops" ? "FLOP" : "bytes";
    const titles = { xTitle: measure === "flops" ? "work, FLOP" : "least traffic, bytes", yTitle: `reached, ${unit}/s` };
    return charts[2].draw({ height: 360, entries: series, paint: (root, width, height) => scatter(root, width, height, { series, ...titles }) });
  }

  // -- all of it -----------------------------------------------------------------------------------------------------

  function showCharts() {
    drawRatios(shown);
    drawRoofline(shown);
    drawGrowth(shown);
  }

  function update() {
    hideDetails();
    shown = selected();
    page = 0;
    showSummary(shown);
    showMeans(shown);
    showTable();
    showCharts();
  }

  /** Work that is done once a frame, however often it is asked for. */
  function oncePerFrame(work) {
    let pending = 0;
    return () => {
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(work);
    };
  }

  function turn(step) {
    page += step;
    showTable();
  }

  function start() {
    fillControls();
    makeHead();
    for (const id of ["machine", ...Object.keys(FILTERS), "contestant", "peer", "losses"]) $(id).addEventListener("change", update);
    $("search").addEventListener("input", oncePerFrame(update));
    $("measure").addEventListener("change", () => drawGrowth(shown));
    $("previous").addEventListener("click", () => turn(-1));
    $("next").addEventListener("click", () => turn(1));
    $("reset").addEventListener("click", () => {
      for (const select of document.querySelectorAll(".controls select")) select.selectedIndex = 0;
      $("search").value = "";
      $("losses").checked = false;
      update();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && hideDetails());
    window.addEventListener("resize", oncePerFrame(showCharts));
    update();
  }

  start();
})();
