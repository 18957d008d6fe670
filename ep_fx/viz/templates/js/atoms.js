// What stands in a group beside its modules: atoms, one box each, and runs, neighbouring operators that share a box.
import {KIND, LANE, plural} from './model.js';

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

// One atom for each operator with the elements of its result, and for each box of the folded picture.
export function makeAtoms(model, atomOfNode) {
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

// Neighbouring compute of one module and half, two operators or more, shares a foldable box; so do three waits or more
// at one place of the outer lanes, as those for all gradients at the end.
export function runs(group, backward) {
  const mine = group.atoms.filter(atom => atom.backward === backward).sort((a, b) => a.pos - b.pos);
  const cuts = group.groups.map(child => child.half[+backward].pos).sort((a, b) => a - b);
  const found = [];
  let open = [],
    waits = [],
    cut = 0;
  const close = () => {
    if (open.length >= 2) found.push(makeRun(open, backward));
    else found.push(...open);
    open = [];
  };
  const closeWaits = () => {
    if (waits.length >= 3) found.push(makeWaits(waits, backward));
    else found.push(...waits);
    waits = [];
  };
  for (const atom of mine) {
    if (cut < cuts.length && cuts[cut] < atom.pos) close();
    while (cut < cuts.length && cuts[cut] < atom.pos) cut++;
    const isWait = atom.kind === KIND.wait && atom.lane === LANE.unit;
    if (!isWait || (waits.length && waits[0].next !== atom.next)) closeWaits();
    if (isWait) {
      close();
      waits.push(atom);
      continue;
    }
    if (atom.kind !== KIND.compute) close();
    if (atom.kind !== KIND.compute) found.push(atom);
    else open.push(atom);
  }
  close();
  closeWaits();
  return found;
}
function makeWaits(atoms, backward) {
  const whats = new Set(atoms.map(atom => atom.title.slice(0, atom.title.lastIndexOf(' '))));
  const what = whats.size === 1 ? [...whats][0] : 'wait';
  return {
    ...makeRun(atoms, backward),
    kind: KIND.wait,
    lane: LANE.unit,
    title: `${what} \u00d7 ${atoms.length}`,
  };
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
