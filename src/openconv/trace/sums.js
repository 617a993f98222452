"use strict";
/** What has happened until a step of a trace, and what all of its steps come to. */
function makeSums(rule) {
  const RESULT = { fprop: "y", dgrad: "x", wgrad: "w" };
  const EVERY = 24; // frames from one copy of the state to the next

  class Player {
    constructor(of) {
      this.trace = of;
      const p = of.problem, sizes = { x: [p.n, p.c, ...p.spatial], w: [p.k, p.c / p.groups, ...p.filter], y: [p.n, p.k, ...p.out] };
      this.counts = Object.fromEntries(Object.entries(sizes).map(([tensor, shape]) => [tensor, rule.product(shape)]));
      this.result = RESULT[p.direction];
      this.copies = [];
      this.reset();
    }

    reset() {
      const { x, w, y } = this.counts;
      this.at = -1;
      this.times = { x: new Uint32Array(x), w: new Uint32Array(w), y: new Uint32Array(y) };
      this.sums = new Uint32Array(this.counts[this.result]);
      this.stored = new Uint8Array(this.counts[this.result]);
      this.slots = new Map();
      this.owner = "";
      this.loaded = new Map();
      this.kept = new Map();
      this.products = this.points = this.elements = 0;
    }

    copy() {
      const { at, sums, stored, owner, products, points, elements } = this;
      const times = Object.fromEntries(Object.entries(this.times).map(([tensor, counts]) => [tensor, counts.slice()]));
      return { at, times, sums: sums.slice(), stored: stored.slice(), slots: new Map(this.slots), owner,
               loaded: new Map(this.loaded), kept: new Map(this.kept), products, points, elements };
    }

    step() {
      const at = this.at + 1, frame = this.trace.frame(at);
      const owner = `${frame.block.launch}/${frame.block.index}`;
      if (owner !== this.owner) {
        this.slots = new Map();
        this.owner = owner;
      }
      for (const load of frame.loads) {
        this.loaded.set(load.tensor, (this.loaded.get(load.tensor) || 0) + load.bytes);
        this.elements += load.elements.length;
        const times = this.times[load.tensor];
        if (times) for (const one of load.elements) ++times[one];
        if (load.to === "shared") this.slots.set(load.slot, { load, at });
      }
      for (const one of frame.products[this.result]) ++this.sums[one];
      this.products += frame.products.x.length;
      this.points += frame.points;
      for (const move of frame.stores) {
        this.kept.set(move.tensor, (this.kept.get(move.tensor) || 0) + move.bytes);
        if (move.tensor === this.result) for (const one of move.elements) ++this.stored[one];
      }
      this.at = at;
      if (at % EVERY === 0 && !this.copies[at / EVERY]) this.copies[at / EVERY] = this.copy();
      return frame;
    }

    /** The state behind a frame, and the frame. */
    seek(at) {
      const nearest = this.copies.slice(0, Math.floor(at / EVERY) + 1).findLast((copy) => copy && copy.at < at);
      if (at <= this.at || (nearest && nearest.at > this.at)) {
        this.reset();
        if (nearest) {
          const copies = this.copies;
          Object.assign(this, Player.prototype.copy.call(nearest));
          this.copies = copies;
        }
      }
      let frame = null;
      while (this.at < at) frame = this.step();
      return frame;
    }
  }

  const sumsOf = new Map();
  /** Of all steps of a trace. */
  function wholeOf(id, facts) {
    if (!sumsOf.has(id)) {
      const of = rule.decode(id, facts), one = { loaded: 0, stored: 0, products: 0, points: 0, elements: 0, steps: of.frames.length,
                                                 blocks: 0, engine: of.engine };
      of.frames.forEach((_, at) => {
        const frame = of.frame(at);
        for (const load of frame.loads) {
          one.loaded += load.bytes;
          one.elements += load.elements.length;
        }
        for (const move of frame.stores) one.stored += move.bytes;
        one.products += frame.products.x.length;
        one.points += frame.points;
      });
      one.blocks = of.launches.reduce((all, launch) => all + (launch.grid.length ? rule.product(launch.grid) : 0), 0);
      one.library = of.launches.some((launch) => !launch.grid.length);
      sumsOf.set(id, one);
    }
    return sumsOf.get(id);
  }

  /** Products of a plain sum, without those with padding: the axes are independent of each other. */
  function exact(p) {
    const along = p.spatial.map((size, i) => {
      let count = 0;
      for (let out = 0; out < p.out[i]; ++out)
        for (let tap = 0; tap < p.filter[i]; ++tap) {
          const at = out * p.stride[i] - p.low[i] + tap * p.dilation[i];
          count += at >= 0 && at < size;
        }
      return count;
    });
    return p.n * p.k * (p.c / p.groups) * rule.product(along);
  }

  return { Player, wholeOf, exact };
}
