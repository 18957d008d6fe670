// The graph as the page holds it: columns of numbers, texts from one pool, edges by node. Nothing here draws.

// In the order of the enumerations of viz/model.py.
export const KIND = {
  compute: 0,
  dispatch: 1,
  combine: 2,
  context: 3,
  exchange: 4,
  unshard: 5,
  reshard: 6,
  reduce: 7,
  sum: 8,
  wait: 9,
  placeholder: 10,
  output: 11,
};
export const EDGE = {data: 0, context: 1, saved: 2, effect: 3};
export const LANE = {unit: 0, main: 1, spine: 2};

export class Model {
  constructor(data) {
    this.data = data;
    this.columns = data.nodes;
    this.count = data.nodes.name.length;
    this.kinds = data.kinds.map(([name, fill, stroke, legend]) => ({name, fill, stroke, legend}));
    this.arrows = data.arrows.map(([name, stroke, legend]) => ({name, stroke, legend}));
    this.edges = {from: data.edges[0] || [], to: data.edges[1] || [], kind: data.edges[2] || []};
    this.haystacks = new Array(this.count);
    this.lines = null;
  }
  text(column, i) {
    return this.data.strings[this.columns[column][i]];
  }
  name(i) {
    return this.columns.name[i];
  }
  op(i) {
    return this.text('op', i);
  }
  shortOp(i) {
    return this.op(i).split('::').pop().replace(/^_+/, '');
  }
  type(i) {
    return this.text('type', i);
  }
  path(i) {
    return this.text('path', i);
  }
  kind(i) {
    return this.columns.kind[i];
  }
  isBackward(i) {
    return this.columns.phase[i] === 1;
  }
  bytes(i) {
    return this.columns.bytes[i];
  }

  // The title, second line and lane of the box that the folded picture gives node i; null for plain compute.
  atomOf(i) {
    const atom = this.data.atoms[this.columns.atom[i]];
    if (!atom || !atom[0]) return null;
    return {title: this.data.strings[atom[0]], sub: this.data.strings[atom[1]], lane: atom[2]};
  }
  haystack(i) {
    if (!this.haystacks[i]) {
      const parts = [this.name(i), this.op(i), this.path(i), this.text('params', i), this.kinds[this.kind(i)].name];
      this.haystacks[i] = parts.join('\n').toLowerCase();
    }
    return this.haystacks[i];
  }
  // Nodes whose name, operator, module or parameters hold all words of the query; exact names first.
  find(query, most = Infinity) {
    const words = query.trim().toLowerCase().replace(/^%/, '').split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const exact = [],
      others = [];
    for (let i = 0; i < this.count; i++) {
      if (this.name(i).toLowerCase() === words[0] && words.length === 1) exact.push(i);
      else if (words.every(word => this.haystack(i).includes(word))) others.push(i);
    }
    return exact.concat(others).slice(0, most);
  }
  // The line of the text form that node i has.
  line(i) {
    if (!this.lines) {
      this.lines = new Map();
      for (const line of this.data.text.split('\n')) {
        const match = /^ {2}%([^ :]+)(?::| =)/.exec(line);
        if (match && !this.lines.has(match[1])) this.lines.set(match[1], line.trim());
      }
    }
    return this.lines.get(this.name(i)) || '';
  }
  neighbours() {
    if (!this.near) {
      const ins = Array.from({length: this.count}, () => []),
        outs = ins.map(() => []);
      this.edges.from.forEach((from, e) => {
        outs[from].push(e);
        ins[this.edges.to[e]].push(e);
      });
      this.near = {ins, outs};
    }
    return this.near;
  }
}

export function bytesText(bytes) {
  if (typeof bytes === 'string') return `${bytes} B`;
  let amount = bytes;
  for (const unit of ['B', 'KiB', 'MiB', 'GiB'])
    if (amount < 1024 || unit === 'GiB') return unit === 'B' ? `${bytes} B` : `${amount.toFixed(1)} ${unit}`;
    else amount /= 1024;
}

export function plural(count, noun) {
  return `${count.toLocaleString('en')} ${noun}${count === 1 ? '' : 's'}`;
}
export function msText(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms > 0 && ms < 0.1) return `${(ms * 1000).toFixed(1)} \u00b5s`;
  return `${ms.toFixed(ms < 10 ? 2 : 1)} ms`;
}
