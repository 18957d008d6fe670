// Modules as nested groups. In them stand atoms (one box of the picture: an operator with the elements of its result,
// or a whole gather, dispatch, ..), runs (neighbouring operators of one module) and "alike" groups (repeated layers).
import {KIND, LANE, plural} from './model.js';
import {makeAtoms, runs} from './atoms.js';

export const STORED = '(parameters and buffers)';

export class Tree {
  constructor(model) {
    this.model = model;
    this.root = group('', '', null);
    this.groups = new Map([['', this.root]]);
    this.atomOfNode = new Array(model.count);
    this.atoms = makeAtoms(model, this.atomOfNode);
    for (const atom of this.atoms) if (!isUnit(atom)) this.groupAt(atom.path).atoms.push(atom);
    for (const b of [false, true]) this.placeUnits(this.atoms.filter(atom => atom.backward === b));
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
  // Gathers, frees, reductions and their waits stand where they are in the order of the graph, not in the module that
  // they are for: in the innermost group that holds both the operator before and the one after.
  placeUnits(atoms) {
    const order = atoms.filter(atom => atom.kind !== KIND.placeholder).sort((p, q) => p.pos - q.pos);
    let next = null;
    for (const atom of order.slice().reverse())
      if (!isUnit(atom)) next = atom.lane === LANE.main ? atom : next;
      else atom.next = next;
    let last = null;
    for (const atom of order)
      if (!isUnit(atom)) last = atom.lane === LANE.main ? atom : last;
      else {
        this.groups.get(last && atom.next ? shared(last.path, atom.next.path) : '').atoms.push(atom);
        const home = this.groups.get(atom.path);
        if (home) home.units.push(atom);
      }
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
  const lists = {groups: [], atoms: [], units: [], items: []};
  return {type: 'group', key: path, path, name, parent, owner: parent, open: false, ...lists};
}
const isUnit = atom => atom.lane === LANE.unit && ![KIND.placeholder, KIND.output].includes(atom.kind);

// The innermost module that holds both.
function shared(a, b) {
  const left = a.split('.'),
    right = b.split('.');
  let n = 0;
  while (n < left.length && n < right.length && left[n] === right[n]) n++;
  return left.slice(0, n).join('.');
}

// ---- groups ---------------------------------------------------------------------------------------------------------
function finish(group, model) {
  for (const child of group.groups) finish(child, model);
  const inner = [...group.groups, ...group.atoms];
  group.half = [0, 1].map(b => ({
    pos: Math.min(...inner.map(x => (x.type === 'group' ? x.half[b].pos : +x.backward === b ? x.pos : Infinity))),
    end: Math.max(...inner.map(x => (x.type === 'group' ? x.half[b].end : +x.backward === b ? x.pos : -1))),
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
  for (const atom of [...group.atoms.filter(atom => !isUnit(atom)), ...group.units])
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
    if (end - i >= 3) found.push(together(group, all.slice(i + 1, end)));
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

// They and what stands between them.
function together(group, groups) {
  const range = [0, 1].map(b => ({
    pos: Math.min(...groups.map(x => x.half[b].pos)),
    end: Math.max(...groups.map(x => x.half[b].end)),
  }));
  const within = atom => isUnit(atom) && atom.pos > range[+atom.backward].pos && atom.pos < range[+atom.backward].end;
  const atoms = group.atoms.filter(within);
  group.atoms = group.atoms.filter(atom => !within(atom));
  const half = range.map((place, b) => ({
    ...place,
    nodes:
      groups.reduce((n, x) => n + x.half[b].nodes, 0) +
      atoms.reduce((n, x) => n + (+x.backward === b ? x.nodes.length : 0), 0),
    kinds: countKinds([...groups, ...atoms], b),
  }));
  const [first, last] = [groups[0], groups[groups.length - 1]];
  const made = {
    type: 'alike',
    key: `${first.path}..`,
    path: first.path,
    half,
    groups,
    atoms,
    open: false,
    name: `${first.name} \u2026 ${last.path.split('.').pop()}`,
    regions: half[0].kinds[KIND.dispatch] || 0,
    note: `${plural(groups.length, 'layer')} like the one above`,
  };
  made.items = [...groups, ...runs(made, false), ...runs(made, true)];
  own(made);
  return made;
}
