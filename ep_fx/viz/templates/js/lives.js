// From where to where the structure draws a unit's whole weights in memory: from each gather to its free, in the
// order of the graph. A gather that is freed in backward lives to the end of forward (the lower edge), then up from it.
import {KIND} from './model.js';

const X = [98, 1470]; // left edges of the bands: forward, backward

// [{path, backward, x, top, bottom}] in the picture's coordinates; no band where a folded box holds both ends.
export function livesOf(tree, boxOfNode, height) {
  const open = new Map(),
    found = [];
  const ends = tree.atoms.filter(atom => atom.kind === KIND.unshard || atom.kind === KIND.reshard);
  for (const atom of ends.sort((p, q) => p.pos - q.pos)) {
    const gather = open.get(atom.path);
    if (atom.kind === KIND.unshard) {
      open.set(atom.path, atom);
      continue;
    }
    if (!gather) continue;
    open.delete(atom.path);
    add(found, gather, boxOfNode[gather.first], atom, boxOfNode[atom.first], height);
  }
  for (const gather of open.values()) add(found, gather, boxOfNode[gather.first], null, null, height);
  return found;
}

function add(found, gather, from, free, to, height) {
  if (from === to) return;
  const band = (backward, top, bottom) => found.push({path: gather.path, backward, x: X[+backward], top, bottom});
  if (free && gather.backward === free.backward) {
    if (free.backward) band(true, far(to, true), near(from, true));
    else band(false, near(from, false), far(to, false));
    return;
  }
  if (gather.backward) band(true, 0, near(from, true));
  else band(false, near(from, false), height);
  if (!gather.backward) band(true, free ? far(to, true) : 0, height);
}

// Edge of a gather's box from which time goes on, and that of a free's to which it came; the middle of a folded box.
const isFolded = box => box.type === 'fold';
const near = (box, up) => (isFolded(box) ? box.y + box.h / 2 : up ? box.y : box.y + box.h);
const far = (box, up) => near(box, !up);
