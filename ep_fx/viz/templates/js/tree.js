// Modules as nested groups. In them stand atoms (one box of the picture: an operator with the elements of its result,
// or a whole gather, dispatch, ..), runs (neighbouring operators of one module) and "alike" groups (repeated layers).
import {KIND, LANE, plural} from './model.js';

export const STORED = '(parameters and buffers)';
const VIEWS = new Set([
  't',
  'view',
  'reshape',
  'transpose',
  'expand',
  'unsqueeze',
  'squeeze',
  'slice',
  'alias',
  'detach',
  'permute',
  'unsafe_view',
  'clone',
  'to_copy',
  'select',
  'unbind',
  'split',
  'sym_size',
]);

export class Tree {
  constructor(model) {
    this.model = model;
    this.root = group('', '', null);
    this.groups = new Map([['', this.root]]);
    this.atomOfNode = new Array(model.count);
    this.atoms = makeAtoms(model, this.atomOfNode);
    for (const atom of this.atoms) this.groupAt(atom.path).atoms.push(atom);
    finish(this.root, model);
    this.reset();
  }
  groupAt(path) {
    const known = this.groups.get(path);
    if (known) return known;
    const cut = path.lastIndexOf('.'),
      parent = this.groupAt(cut < 0 ? '' : path.slice(0, cut));
    const leaf = path.slice(cut + 1);
    const made = group(path, /^\d+$/.test(leaf) && parent.path ? `${parent.name}.${leaf}` : leaf, parent);
    this.groups.set(path, made);
    parent.groups.push(made);
    return made;
  }
  every(visit, item = this.root) {
    visit(item);
    for (const child of item.items || []) this.every(visit, child);
  }
  // The first sight: containers of layers open, of each kind of layer the first, with its routing and experts.
  reset() {
    this.every(item => {
      item.open = false;
    });
    this.root.open = true;
    let shown = false;
    this.every(item => {
      if (item.type !== 'group' || item.key === STORED) return;
      if (item.groups.some(isLayer)) for (let up = item; up; up = up.owner) up.open = true;
      if (shown || item.regions === 0 || !isLayer(item)) return;
      shown = true;
      this.every(inner => {
        if (inner.regions > 0 && inner.type === 'group') inner.open = true;
      }, item);
    });
  }
  setAll(open) {
    this.every(item => {
      if (item.items) item.open = open || item === this.root;
    });
  }
  // Opens everything around node i.
  reveal(i) {
    for (let up = this.atomOfNode[i].owner; up; up = up.owner) up.open = true;
  }
}

function group(path, name, parent) {
  return {type: 'group', key: path, path, name, parent, owner: parent, groups: [], atoms: [], items: [], open: false};
}

// ---- atoms ----------------------------------------------------------------------------------------------------------
function makeAtoms(model, atomOfNode) {
  const atoms = [],
    byBox = new Map(),
    {ins} = model.neighbours();
  for (let i = 0; i < model.count; i++) {
    const box = model.atomOf(i),
      number = model.columns.atom[i];
    let atom = box ? byBox.get(number) : elementOf(model, i, ins, atomOfNode);
    if (!atom) {
      atom = {type: 'atom', key: `n${i}`, nodes: [], title: '', sub: '', lane: box ? box.lane : LANE.main};
      atoms.push(atom);
      if (box) byBox.set(number, Object.assign(atom, box));
    }
    atom.nodes.push(i);
    atomOfNode[i] = atom;
  }
  for (const atom of atoms) {
    describe(atom, model);
    atom.reads = atom.nodes.flatMap(i => ins[i].map(e => model.edges.from[e]));
  }
  return atoms;
}

function elementOf(model, i, ins, atomOfNode) {
  if (model.op(i) !== 'getitem' || ins[i].length !== 1) return null;
  const source = model.edges.from[ins[i][0]];
  return model.atomOf(source) || model.isBackward(source) !== model.isBackward(i) ? null : atomOfNode[source];
}

function describe(atom, model) {
  const live = atom.nodes.filter(i => model.kind(i) !== KIND.placeholder);
  const first = live.length ? live[0] : atom.nodes[0];
  atom.first = first;
  atom.pos = first;
  atom.backward = model.isBackward(first);
  atom.kind = model.kind(first);
  if (live.length && atom.title) {
    const main = live.find(i => ![KIND.wait, KIND.placeholder].includes(model.kind(i)));
    if (main !== undefined) atom.kind = model.kind(main);
  }
  atom.path = model.path(first);
  if (!atom.title) {
    atom.title = live.length ? model.shortOp(first) : model.name(first);
    atom.sub = model.type(first);
  }
}

// ---- groups ---------------------------------------------------------------------------------------------------------
function finish(group, model) {
  for (const child of group.groups) finish(child, model);
  const inner = [...group.groups, ...group.atoms];
  group.half = [0, 1].map(b => ({
    pos: Math.min(...inner.map(x => (x.type === 'group' ? x.half[b].pos : +x.backward === b ? x.pos : Infinity))),
    nodes: inner.reduce(
      (n, x) => n + (x.type === 'group' ? x.half[b].nodes : +x.backward === b ? x.nodes.length : 0),
      0,
    ),
    kinds: countKinds(inner, b),
  }));
  group.regions = group.half[0].kinds[KIND.dispatch] || 0;
  group.sign = signature(group, model);
  group.items = [...alike(group), ...runs(group, false), ...runs(group, true)];
  own(group);
}

function own(item) {
  for (const child of item.items) {
    child.owner = item;
    if (child.type === 'run') own(child);
  }
}

function countKinds(inner, backward) {
  const counts = {};
  for (const x of inner) {
    if (x.type === 'group')
      for (const [kind, n] of Object.entries(x.half[backward].kinds)) counts[kind] = (counts[kind] || 0) + n;
    else if (+x.backward === backward) counts[x.kind] = (counts[x.kind] || 0) + 1;
  }
  return counts;
}

// Equal for groups whose forward has the same operators in the same inner modules.
function signature(group, model) {
  let sum = 0;
  for (const atom of group.atoms)
    if (!atom.backward)
      for (const i of atom.nodes)
        if (model.kind(i) !== KIND.placeholder)
          sum = (sum + hash(`${model.op(i)} ${model.type(i).replace(/\bu\d+/g, 'u')}`)) | 0;
  for (const child of group.groups) sum = (sum + Math.imul(child.sign, 31) + hash(child.path.split('.').pop())) | 0;
  return sum;
}
function hash(text) {
  let value = 7;
  for (let i = 0; i < text.length; i++) value = (Math.imul(value, 31) + text.charCodeAt(i)) | 0;
  return value;
}

// Child groups in order; of three or more neighbours that are alike the first stands alone, the rest in one group.
function alike(group) {
  group.groups = inOrder(group.groups);
  const found = [],
    all = group.groups;
  for (let i = 0; i < all.length;) {
    let end = i + 1;
    while (end < all.length && layerSign(all[end]) === layerSign(all[i])) end++;
    found.push(all[i]);
    if (end - i >= 3) found.push(together(all.slice(i + 1, end)));
    else found.push(...all.slice(i + 1, end));
    i = end;
  }
  return found;
}
// By forward; a group of backward alone stands where backward, which runs up, comes to it.
function inOrder(groups) {
  const order = groups.filter(x => x.half[0].nodes).sort((a, b) => a.half[0].pos - b.half[0].pos);
  for (const late of groups.filter(x => !x.half[0].nodes).sort((a, b) => a.half[1].pos - b.half[1].pos)) {
    const place = order.findIndex(x => x.half[1].nodes && x.half[1].pos < late.half[1].pos);
    order.splice(place < 0 ? order.length : place, 0, late);
  }
  return order;
}
const isLayer = group => /^\d+$/.test(group.path.split('.').pop());
const layerSign = group => (isLayer(group) ? group.sign : group.path);

function together(groups) {
  const half = [0, 1].map(b => ({
    pos: Math.min(...groups.map(x => x.half[b].pos)),
    nodes: groups.reduce((n, x) => n + x.half[b].nodes, 0),
    kinds: countKinds(groups, b),
  }));
  const [first, last] = [groups[0], groups[groups.length - 1]];
  const made = {
    type: 'alike',
    key: `${first.path}..`,
    path: first.path,
    half,
    items: groups,
    groups,
    open: false,
    name: `${first.name} \u2026 ${last.path.split('.').pop()}`,
    regions: half[0].kinds[KIND.dispatch] || 0,
    note: `${plural(groups.length, 'layer')} like the one above`,
  };
  for (const inner of groups) inner.owner = made;
  return made;
}

// Neighbouring compute of one module and half, two operators or more, shares a foldable box.
function runs(group, backward) {
  const mine = group.atoms.filter(atom => atom.backward === backward).sort((a, b) => a.pos - b.pos);
  const cuts = group.groups.map(child => child.half[+backward].pos).sort((a, b) => a - b);
  const found = [];
  let open = [],
    cut = 0;
  const close = () => {
    if (open.length >= 2) found.push(makeRun(open, backward));
    else found.push(...open);
    open = [];
  };
  for (const atom of mine) {
    if (cut < cuts.length && cuts[cut] < atom.pos) close();
    while (cut < cuts.length && cuts[cut] < atom.pos) cut++;
    if (atom.kind !== KIND.compute) close();
    if (atom.kind !== KIND.compute) found.push(atom);
    else open.push(atom);
  }
  close();
  return found;
}
function makeRun(atoms, backward) {
  const all = [...new Set(atoms.map(atom => atom.title))],
    work = all.filter(name => !VIEWS.has(name)),
    names = work.length ? work : all;
  const nodes = atoms.reduce((n, atom) => n + atom.nodes.length, 0);
  return {
    type: 'run',
    key: `${atoms[0].key}-run`,
    items: atoms,
    backward,
    pos: atoms[0].pos,
    kind: KIND.compute,
    lane: LANE.main,
    open: false,
    nodes,
    first: atoms[0].first,
    title: names.slice(0, 4).join(', ') + (names.length > 4 ? ', \u2026' : ''),
    sub: plural(nodes, 'node'),
  };
}
