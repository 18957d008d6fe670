// When everything happens: bars of the lanes, lives of gathered units, blocks of the model, memory; by place in
// the order, or by the clock of the cost model's nominal machine. Micro-batches run one
// after the other: the step again, shifted.
import {KIND} from './model.js';

export const LANES = [
  {name: 'compute', kinds: [KIND.compute, KIND.context]},
  {name: 'EP exchange', kinds: [KIND.dispatch, KIND.combine, KIND.exchange]},
  {name: 'FSDP gather', kinds: [KIND.unshard]},
  {name: 'FSDP reduce', kinds: [KIND.reduce]},
  {name: 'TP sum', kinds: [KIND.sum]},
];
const laneOf = new Map(LANES.flatMap((lane, n) => lane.kinds.map(kind => [kind, n])));

export class Timeline {
  constructor(model, useTimes) {
    this.model = model;
    this.times = useTimes;
    this.first = 0;
    while (this.first < model.count && model.kind(this.first) === KIND.placeholder) this.first++;
    this.place = this.times ? this.clock() : this.places();
    this.slices = this.times ? this.makeSlices() : null;
    this.length = this.place[model.count] || 1;
    if (this.times) for (const slice of this.slices.values()) this.length = Math.max(this.length, slice.end);
    this.bars = this.makeBars();
    for (const lane of this.bars) pack(lane);
    this.lanes = LANES.filter((lane, n) => lane.kinds[0] !== KIND.sum || this.bars[n].length);
    this.lives = model.data.lives.map(([unit, start, end, bytes]) => ({
      unit: model.data.strings[unit],
      start: this.at(start),
      end: this.at(end),
      bytes,
      node: start,
    }));
    this.lifeRows = pack(this.lives);
    this.blocks = this.makeBlocks();
    this.memory = model.data.memory
      .map(([position, bytes]) => [this.at(position), bytes])
      .filter(([x], i, all) => x >= 0 || i === all.length - 1);
    this.peak = this.memory.reduce((most, point) => (point[1] > most[1] ? point : most), [0, 0]);
    this.turn = this.turnOf();
  }
  // How many operators run before each node; elements of results and sizes are no operators.
  places() {
    const {model} = this,
      found = new Array(model.count + 1);
    for (let i = 0, n = 0; i <= model.count; i++) {
      found[i] = n;
      if (i >= this.first && i < model.count && !isPlumbing(model, i) && model.kind(i) !== KIND.output) n++;
    }
    return found;
  }
  // The host's clock before each node, in milliseconds.
  clock() {
    const found = [0];
    for (const step of this.model.data.times.clock) found.push(found[found.length - 1] + step / 1e6);
    return found;
  }
  makeSlices() {
    const found = new Map(),
      numbers = this.model.data.times.slices;
    for (let n = 0; n < numbers.length; n += 3)
      found.set(numbers[n], {start: numbers[n + 1] / 1e6, end: (numbers[n + 1] + numbers[n + 2]) / 1e6});
    return found;
  }
  // The moment at which the run comes to the node at `position`.
  at(position) {
    return this.place[position];
  }
  // Where node i is at work: until its own end, or in the order a collective until its wait; null where nothing runs.
  workOf(i) {
    const {model} = this;
    if (this.times) return this.slices.get(i) || null;
    if (isPlumbing(model, i) || model.kind(i) === KIND.wait) return null;
    const wait = model.columns.wait[i];
    return {start: this.place[i], end: this.place[(wait >= 0 ? wait : i) + 1]};
  }
  turnOf() {
    for (let i = this.first; i < this.model.count; i++) if (this.model.isBackward(i)) return this.at(i);
    return this.length;
  }
  makeBars() {
    const lanes = LANES.map(() => []);
    for (let i = this.first; i < this.model.count; i++) {
      const lane = this.laneOf(i),
        work = lane < 0 ? null : this.workOf(i);
      if (work) lanes[lane].push({node: i, ...work, kind: this.model.kind(i)});
    }
    return lanes;
  }
  // The lane of node i, -1 for none. What a gather or exchange computes on its own rank, and a wait, stands in compute.
  laneOf(i) {
    const {model} = this,
      kind = model.kind(i);
    if (kind === KIND.wait) return 0;
    if (model.text('group', i) !== '' || isLogical(model, i)) return laneOf.get(kind) ?? 0;
    return [KIND.placeholder, KIND.output, KIND.reshard].includes(kind) ? -1 : 0;
  }
  makeBlocks() {
    const {model} = this,
      blocks = [];
    for (let i = this.first; i < model.count; i++) {
      const lane = this.laneOf(i),
        work = lane === 0 || lane === 1 ? this.workOf(i) : null;
      if (!work || model.kind(i) === KIND.wait) continue;
      const name = blockOf(model.path(i)) || 'model',
        last = blocks[blocks.length - 1],
        backward = model.isBackward(i);
      if (last && last.name === name && last.backward === backward) last.end = Math.max(last.end, work.end);
      else blocks.push({name, backward, ...work});
    }
    return blocks;
  }
}
const isPlumbing = (model, i) => model.op(i) === 'getitem' || model.op(i).startsWith('aten::sym_');
const isLogical = (model, i) => /^ep_fx::(dispatch|combine)/.test(model.op(i));

export function blockOf(path) {
  const parts = path.split('.'),
    index = parts.findIndex(part => /^\d+$/.test(part));
  return index < 0 ? parts.slice(0, 2).join('.') : parts.slice(0, index + 1).join('.');
}

// Gives each bar the first row in which nothing else stands at its time; returns the number of rows.
function pack(bars) {
  const ends = [];
  for (const bar of bars) {
    let row = ends.findIndex(end => end <= bar.start + 3e-6); // times are rounded to nanoseconds
    if (row < 0) row = ends.length;
    ends[row] = bar.end;
    bar.row = row;
  }
  bars.rows = Math.max(1, ends.length);
  return bars.rows;
}
