"use strict";
/** The rule of openconv/trace/model.py: walks to elements of x, w and y. `data` is what page.py wrote. */
function makeRule(data) {
  const pools = data.pools;
  const text = (at) => pools.texts[at];
  const VARIABLES = new Map();
  const variable = (name) => {
    if (!VARIABLES.has(name)) VARIABLES.set(name, VARIABLES.size);
    return VARIABLES.get(name);
  };
  const [N, G, C, K] = ["n", "g", "c", "k"].map(variable);
  const PLACES = ["d", "h", "w"].map(variable), OUTS = ["o", "p", "q"].map(variable), TAPS = ["t", "r", "s"].map(variable);
  const product = (sizes) => sizes.reduce((all, size) => all * size, 1);

  /** All positions of a walk: pairs of a variable and its value, or null where there is nothing. */
  const known = [];
  function positions(id) {
    if (known[id]) return known[id];
    const [axisIds, lo, hi, row = 0, inner = 1] = pools.walks[id];
    const axes = axisIds.map((at) => pools.axes[at]).map(([name, count, start, step]) => [variable(text(name)), count, start, step]);
    const every = [];
    for (let at = lo; at < hi; ++at) {
      let rest = at, there = true;
      if (row) {
        const within = product(axes.slice(-inner).map((axis) => axis[1]));
        there = at % row < within;
        rest = Math.floor(at / row) * within + (at % row);
      }
      const pairs = [];
      for (let i = axes.length - 1; there && i >= 0; --i) {
        const [name, count, start, step] = axes[i];
        if (!count) there = false;
        pairs.push(name, start + step * (rest % count));
        rest = Math.floor(rest / count);
      }
      every.push(there && rest === 0 ? pairs : null);
    }
    const some = [];
    every.forEach((pairs, at) => pairs && some.push([at, pairs]));
    const names = axes.map((axis) => axis[0]);
    return (known[id] = { every, some, names });
  }

  const namesOf = (walks) => new Set(walks.flatMap((id) => positions(id).names));

  /** Calls `visit(values, places)` for each combination of positions that are there; places count from a walk's start. */
  function combine(walks, visit) {
    const found = walks.map((id) => positions(id).some), values = new Int32Array(32), places = new Int32Array(walks.length);
    (function go(at) {
      if (at === found.length) return visit(values, places);
      for (const [place, pairs] of found[at]) {
        places[at] = place;
        for (let i = 0; i < pairs.length; i += 2) values[pairs[i]] += pairs[i + 1];
        go(at + 1);
        for (let i = 0; i < pairs.length; i += 2) values[pairs[i]] -= pairs[i + 1];
      }
    })(0);
  }

  /** `element(tensor, has)(values)`: the element's number, or -1 where there is none. */
  function elements(problem) {
    const rank = problem.spatial.length, groups = problem.groups, cg = problem.c / groups, kg = problem.k / groups;
    const place = PLACES.slice(-rank), out = OUTS.slice(-rank), taps = TAPS.slice(-rank);
    return (tensor, has) => {
      if (tensor === "w")
        return (v) => {
          if (v[K] >= kg || v[C] >= cg || v[K] < 0 || v[C] < 0) return -1;
          let at = (v[G] * kg + v[K]) * cg + v[C];
          for (let i = 0; i < rank; ++i) {
            const tap = v[taps[i]];
            if (tap < 0 || tap >= problem.filter[i]) return -1;
            at = at * problem.filter[i] + tap;
          }
          return at;
        };
      const ofX = tensor === "x", sizes = ofX ? problem.spatial : problem.out;
      const direct = (ofX ? place : out).map((name) => has.has(name));
      return (v) => {
        if ((ofX ? v[C] >= cg : v[K] >= kg) || v[N] >= problem.n || v[G] >= groups) return -1;
        let at = ofX ? v[N] * problem.c + v[G] * cg + v[C] : v[N] * problem.k + v[G] * kg + v[K];
        for (let i = 0; i < rank; ++i) {
          let where;
          if (direct[i]) where = v[ofX ? place[i] : out[i]];
          else if (ofX) where = v[out[i]] * problem.stride[i] - problem.low[i] + v[taps[i]] * problem.dilation[i];
          else {
            const way = v[place[i]] + problem.low[i] - v[taps[i]] * problem.dilation[i];
            if (way % problem.stride[i]) return -1;
            where = way / problem.stride[i];
          }
          if (where < 0 || where >= sizes[i]) return -1;
          at = at * sizes[i] + where;
        }
        return at;
      };
    };
  }

  const own = (tensor) => tensor === "x" || tensor === "w" || tensor === "y";

  /** A trace, decoded: launches, blocks, and frames, which are the steps of all blocks in order. */
  function decode(number, problem) {
    const raw = data.traces[number], element = elements(problem);
    const blocks = raw.blocks.map((id, at) => {
      const [launch, index, outputs, list, makes, part] = pools.blocks[id];
      return { at, launch, index, outputs, steps: pools.lists[list], makes: text(makes), part: text(part) };
    });
    const frames = blocks.flatMap((block) => block.steps.map((id) => ({ block, id })));
    const launches = raw.launches.map((id) => {
      const [name, source, does, grid, threads, shared, owner] = pools.launches[id];
      return {
        name: text(name), source: text(source), does: text(does), grid, threads, shared,
        owner: owner.length ? { unit: text(owner[0]), terms: owner[1] } : null,
      };
    });
    const sizes = new Map(raw.sizes.map(([name, size]) => [text(name), size]));
    const BYTES = { f64: 8, f32: 4, f16: 2, bf16: 2, e4m3: 1, e5m2: 1, i64: 8, i32: 4, i16: 2, i8: 1, u8: 1 };
    const size = (tensor) => (own(tensor) ? BYTES[problem.bytes["xwy".indexOf(tensor)]] : sizes.get(tensor));

    /** The elements that a move moves. */
    function moved(block, id) {
      const [tensorText, to, slot, met, of, walkIds] = pools.moves[id];
      const tensor = text(tensorText), walks = [...of.map((at) => block.outputs[at]), ...walkIds];
      const has = namesOf(walks), find = own(tensor) ? element(tensor, has) : () => 0;
      const needed = [...text(met)].map((name) => element(name, has));
      const found = [];
      combine(walks, (values) => {
        const at = find(values);
        if (at >= 0 && needed.every((other) => other(values) >= 0)) found.push(at);
      });
      return { tensor, to: text(to), slot: text(slot), walks, elements: found, bytes: found.length * size(tensor) };
    }

    /** What a frame does. Products are three arrays of elements and the place of each in the walks. */
    function frame(at) {
      const { block, id } = frames[at], [words, loads, terms, stores, points] = pools.steps[id];
      const products = { x: [], w: [], y: [], places: [], walks: null };
      if (terms !== -1) {
        const walks = [...block.outputs, ...terms], has = namesOf(walks), owner = launches[block.launch].owner;
        const [x, w, y] = ["x", "w", "y"].map((tensor) => element(tensor, has));
        products.walks = walks;
        combine(walks, (values, places) => {
          const a = x(values), b = w(values), c = y(values);
          if (a < 0 || b < 0 || c < 0) return;
          products.x.push(a);
          products.w.push(b);
          products.y.push(c);
          products.places.push(owner ? ownerOf(owner, places) : 0);
        });
      }
      return {
        block, text: text(words), points, products,
        loads: loads.map((move) => moved(block, move)), stores: stores.map((move) => moved(block, move)),
      };
    }

    const ownerOf = (owner, places) =>
      owner.terms.reduce((all, [walk, divide, times]) => all + Math.floor((places[walk] || 0) / divide) * times, 0);

    const result = { fprop: "y", dgrad: "x", wgrad: "w" }[problem.direction];

    /** The results that walks stand for; `visit` gets each with the places in the walks. */
    function results(walks, visit) {
      const find = element(result, namesOf(walks));
      combine(walks, (values, places) => {
        const at = find(values);
        if (at >= 0) visit(at, places);
      });
    }

    /** Which block stores each result and which one sums it, if that is another, and which of its threads or warps has
     *  it; -1 where there is none, or where that is not told. */
    function owners() {
      const count = { y: problem.n * problem.k * product(problem.out), x: problem.n * problem.c * product(problem.spatial),
                      w: (problem.k * problem.c / problem.groups) * product(problem.filter) }[result];
      const found = { stores: new Int32Array(count).fill(-1), sums: new Int32Array(count).fill(-1), unit: new Int32Array(count).fill(-1) };
      for (const one of blocks)
        for (const id of one.steps)
          for (const move of pools.steps[id][3]) {
            const [tensorText, , , , of, walkIds] = pools.moves[move], tensor = text(tensorText);
            const owner = launches[one.launch].owner, partial = tensor === "partial sums";
            if (tensor !== result && !partial) continue;
            const whole = owner && owner.terms.every(([walk]) => walk < one.outputs.length);
            results([...of.map((at) => one.outputs[at]), ...walkIds], (at, places) => {
              if (partial ? found.sums[at] >= 0 : (found.stores[at] = one.at) && found.sums[at] >= 0) return;
              if (partial) found.sums[at] = one.at;
              const all = [];
              of.forEach((output, i) => (all[output] = places[i]));
              found.unit[at] = whole ? ownerOf(owner, all) : -1;
            });
          }
      return found;
    }

    /** The results that a block works on: those that it stores, or adds products to. */
    function makes(block) {
      if (block.made) return block.made;
      block.made = new Set();
      for (const id of block.steps) {
        const [, , terms, stores] = pools.steps[id];
        for (const move of stores)
          if (text(pools.moves[move][0]) === result)
            results([...pools.moves[move][4].map((at) => block.outputs[at]), ...pools.moves[move][5]], (at) => block.made.add(at));
        if (terms !== -1 && block.makes === "partial sums") results(block.outputs, (at) => block.made.add(at));
      }
      return block.made;
    }

    /** A slot as a matrix: its last long walk across, the others down; what is nothing at the ends is left out. */
    function matrix(load) {
      const has = namesOf(load.walks), find = own(load.tensor) ? element(load.tensor, has) : () => 0;
      const long = load.walks.filter((id) => positions(id).every.length > 1);
      const single = load.walks.filter((id) => positions(id).every.length === 1);
      const across = long.length ? long[long.length - 1] : single[single.length - 1], down = long.slice(0, -1);
      const rows = down.reduce((all, id) => all.flatMap((one) => positions(id).every.map((p) => [...one, p])), [[]]);
      const columns = positions(across).every, fixed = single.filter((id) => id !== across).map((id) => positions(id).every[0]);
      const cells = rows.map((row) =>
        columns.map((column) => {
          const all = [...fixed, ...row, column];
          if (all.some((pairs) => pairs === null)) return -2;
          const values = new Int32Array(32);
          for (const pairs of all) for (let i = 0; i < pairs.length; i += 2) values[pairs[i]] += pairs[i + 1];
          return find(values);
        }));
      const keptRows = cells.filter((row) => row.some((cell) => cell !== -2));
      const keptColumns = columns.map((_, i) => i).filter((i) => keptRows.some((row) => row[i] !== -2));
      return { rows: rows.length, columns: columns.length, cells: keptRows.map((row) => keptColumns.map((i) => row[i])) };
    }

    const transforms = raw.transforms === undefined ? null : JSON.parse(text(raw.transforms));
    return {
      number, blocks, frames, launches, frame, owners, makes, matrix, size, transforms, problem, engine: text(raw.engine),
      knobs: text(raw.knobs), notes: raw.notes.map(text),
    };
  }

  /** By the definition: the products of one result, as elements of x, w and y. */
  function definition(problem, at) {
    const rank = problem.spatial.length, cg = problem.c / problem.groups, kg = problem.k / problem.groups, found = [];
    const digits = (value, sizes) => {
      const each = [];
      for (let i = sizes.length - 1; i >= 0; --i) {
        each.unshift(value % sizes[i]);
        value = Math.floor(value / sizes[i]);
      }
      return each;
    };
    const index = (values, sizes) => values.reduce((all, value, i) => all * sizes[i] + value, 0);
    const add = (n, k, c, out, tap) => {
      const place = out.map((p, i) => p * problem.stride[i] - problem.low[i] + tap[i] * problem.dilation[i]);
      if (place.some((v, i) => v < 0 || v >= problem.spatial[i])) return;
      found.push([index([n, Math.floor(k / kg) * cg + c, ...place], [problem.n, problem.c, ...problem.spatial]),
                  index([k, c, ...tap], [problem.k, cg, ...problem.filter]),
                  index([n, k, ...out], [problem.n, problem.k, ...problem.out])]);
    };
    const all = (sizes, visit) => {
      for (let i = 0; i < product(sizes); ++i) visit(digits(i, sizes));
    };
    if (problem.direction === "fprop") {
      const [n, k, ...out] = digits(at, [problem.n, problem.k, ...problem.out]);
      for (let c = 0; c < cg; ++c) all(problem.filter, (tap) => add(n, k, c, out, tap));
    } else if (problem.direction === "wgrad") {
      const [k, c, ...tap] = digits(at, [problem.k, cg, ...problem.filter]);
      for (let n = 0; n < problem.n; ++n) all(problem.out, (out) => add(n, k, c, out, tap));
    } else {
      const [n, channel, ...place] = digits(at, [problem.n, problem.c, ...problem.spatial]);
      const group = Math.floor(channel / cg);
      for (let k = group * kg; k < (group + 1) * kg; ++k)
        all(problem.filter, (tap) => {
          const way = place.map((h, i) => h + problem.low[i] - tap[i] * problem.dilation[i]);
          if (way.some((v, i) => v < 0 || v % problem.stride[i] || v / problem.stride[i] >= problem.out[i])) return;
          add(n, k, channel % cg, way.map((v, i) => v / problem.stride[i]), tap);
        });
    }
    return found;
  }

  return { decode, definition, product, text };
}
