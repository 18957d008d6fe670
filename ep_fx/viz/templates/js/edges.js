// Arrows between the boxes that are visible now: each edge of the graph ends at the innermost visible box around its
// node; many edges between two boxes are one arrow of the strongest kind.
import {EDGE, KIND} from './model.js';
import {STORED} from './tree.js';

const STRENGTH = [EDGE.context, EDGE.data, EDGE.saved, EDGE.effect];

// The visible box of each node.
export function boxesOfNodes(model, tree, scene) {
  const visible = new Map();
  const found = new Array(model.count);
  for (let i = 0; i < model.count; i++) {
    const atom = tree.atomOfNode[i],
      key = atom;
    if (!visible.has(key)) visible.set(key, innermost(atom, scene, model.isBackward(atom.first)));
    found[i] = visible.get(key);
  }
  return found;
}

function innermost(atom, scene, backward) {
  let shown = null;
  for (let item = atom; item; item = item.owner) {
    const boxes = scene.boxOf.get(item);
    if (boxes) shown = boxes[+backward] || boxes[+!backward];
  }
  return shown;
}

export function arrowsOf(model, boxOfNode) {
  const found = new Map();
  const {from, to, kind} = model.edges;
  for (let e = 0; e < from.length; e++) {
    const a = boxOfNode[from[e]],
      b = boxOfNode[to[e]];
    if (!a || !b || a === b) continue;
    const key = a.id * 1e6 + b.id,
      known = found.get(key);
    if (!known) found.set(key, {a, b, kind: kind[e], count: 1, stored: isStored(model, from[e])});
    else {
      known.count++;
      known.stored = known.stored && isStored(model, from[e]);
      if (STRENGTH.indexOf(kind[e]) < STRENGTH.indexOf(known.kind)) known.kind = kind[e];
    }
  }
  const arrows = [...found.values()];
  for (const arrow of arrows) {
    route(arrow);
    arrow.top = Math.min(arrow.a.y, arrow.b.y);
    arrow.bottom = Math.max(arrow.a.y + arrow.a.h, arrow.b.y + arrow.b.h);
  }
  return arrows;
}
const isStored = (model, i) => model.path(i) === STORED;

// Whether an arrow is drawn when nothing is pointed at.
export function isShown(arrow, options) {
  if (!options.forward && (!arrow.a.backward || !arrow.b.backward)) return false;
  if (!options.backward && (arrow.a.backward || arrow.b.backward)) return false;
  if (arrow.kind === EDGE.saved) return options.saved;
  if (arrow.kind === EDGE.effect) return options.order;
  if (arrow.kind === EDGE.context) return true;
  return !arrow.stored && arrow.a.backward === arrow.b.backward;
}

export function colorOf(arrow, model) {
  if (arrow.kind !== EDGE.data) return model.arrows[arrow.kind].stroke;
  for (const kind of [KIND.reduce, KIND.reshard]) if (arrow.b.kind === kind) return model.kinds[kind].stroke;
  return arrow.a.kind === KIND.unshard ? model.kinds[KIND.unshard].stroke : model.arrows[EDGE.data].stroke;
}

// Four points of a curve, in the picture's coordinates: down (backward: up) where one box follows the other, around the
// side where others stand between, across where the lanes differ. Operators in an open run are met from above or below.
function route(arrow) {
  const {a, b} = arrow,
    below = b.y >= a.y + a.h - 1,
    above = b.y + b.h <= a.y + 1,
    same = a.lane === b.lane && a.backward === b.backward;
  const gap = below ? b.y - a.y - a.h : a.y - b.y - b.h,
    inRun = a.inRun || b.inRun;
  if (same && (below || above) && arrow.kind !== EDGE.context && (inRun || gap < 70))
    arrow.points = vertical(a, b, below);
  else if (same) arrow.points = around(a, b, arrow.kind === EDGE.context ? !a.backward : a.backward);
  else arrow.points = across(a, b);
}
function vertical(a, b, below) {
  const y0 = below ? a.y + a.h : a.y,
    y1 = below ? b.y : b.y + b.h,
    bend = (y1 - y0) / 2;
  return [a.x + a.w / 2, y0, a.x + a.w / 2, y0 + bend, b.x + b.w / 2, y1 - bend, b.x + b.w / 2, y1];
}
function around(a, b, onRight) {
  const ay = a.y + a.h / 2,
    by = b.y + b.h / 2,
    bulge = Math.min(30, 8 + Math.log2(1 + Math.abs(by - ay) / 40) * 5);
  const [sa, sb] = onRight ? [a.x + a.w, b.x + b.w] : [a.x, b.x];
  const x = onRight ? Math.max(sa, sb) + bulge : Math.min(sa, sb) - bulge;
  return [sa, ay, x, ay, x, by, sb, by];
}
function across(a, b) {
  const right = b.x + b.w / 2 > a.x + a.w / 2,
    x0 = right ? a.x + a.w : a.x,
    x1 = right ? b.x : b.x + b.w,
    bend = (x1 - x0) / 2;
  const ay = a.y + a.h / 2,
    by = b.y + b.h / 2;
  if (b.inRun) {
    const x = b.x + b.w / 2,
      y = ay < by ? b.y : b.y + b.h;
    return [x0, ay, x, ay, x, y - (y - ay) / 3, x, y];
  }
  if (a.inRun) {
    const x = a.x + a.w / 2,
      y = by < ay ? a.y : a.y + a.h;
    return [x, y, x, y + (by - y) / 3, x, by, x1, by];
  }
  return [x0, ay, x0 + bend, ay, x1 - bend, by, x1, by];
}
