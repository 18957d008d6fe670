// Where the boxes of the structure stand: forward runs down on the left, backward up on the right, side by side.
//
//   | gathers | compute and exchanges | contexts | compute and exchanges | gathers, reductions |
//             forward, down                         backward, up
//
// A group is a band over all five lanes, so a layer's backward stands beside its forward. Linear in what is open.
import {KIND, LANE, plural} from './model.js';

export const WIDTH = 1580;
const SPAN = {
  unit: [
    [92, 276],
    [1304, 1488],
  ],
  main: [
    [322, 682],
    [898, 1258],
  ],
  spine: [
    [716, 864],
    [716, 864],
  ],
};
const GAP = 12,
  HEADER = 28,
  INSET = 9,
  COLUMNS = 3;
const HEIGHT = {one: 26, two: 40, row: 34};

export function layOut(tree) {
  const scene = {boxes: [], frames: [], boxOf: new Map(), height: 0};
  scene.height = placeGroup(scene, tree.root, 0, 8) + 20;
  return scene;
}

const spanOf = (lane, backward) => SPAN[['unit', 'main', 'spine'][lane]][+backward];

function placeGroup(scene, group, depth, top) {
  let y = top;
  const frame = {
    type: 'frame',
    item: group,
    x: 8 + depth * INSET,
    y: top,
    w: WIDTH - 2 * (8 + depth * INSET),
    h: 0,
    depth,
  };
  if (depth > 0) {
    scene.frames.push(frame);
    y += HEADER;
  }
  const children = group.items.filter(x => x.type === 'group' || x.type === 'alike');
  const gaps = gapsOf(group, children);
  gaps.forEach((gap, k) => {
    y = placeGap(scene, gap, y);
    if (k < children.length) y = placeChild(scene, children[k], depth, y) + GAP;
  });
  frame.h = y - top;
  return y;
}

function placeChild(scene, child, depth, y) {
  if (child.open) return placeGroup(scene, child, depth + 1, y);
  const backs = child.type === 'alike' ? 8 : 0;
  for (const b of [0, 1]) {
    if (!child.half[b].nodes) continue;
    const [left, right] = spanOf(LANE.main, b);
    const note = child.type === 'alike' ? child.note : plural(child.half[b].nodes, 'node');
    add(
      scene,
      {
        type: 'fold',
        item: child,
        backward: !!b,
        lane: LANE.main,
        kind: KIND.compute,
        x: left,
        y,
        w: right - left,
        h: HEIGHT.row,
        title: child.name,
        sub: note,
        depth,
      },
      child,
    );
    badges(scene, child, b, y);
  }
  return y + HEIGHT.row + backs;
}

// What a folded group gathers, frees and reduces, as counts in the outer lane.
function badges(scene, child, backward, y) {
  const kinds = [KIND.unshard, KIND.reshard, KIND.reduce].filter(kind => child.half[backward].kinds[kind]);
  const [left, right] = spanOf(LANE.unit, backward),
    width = 56;
  kinds.forEach((kind, k) => {
    const x = backward ? left + k * (width + 6) : right - (kinds.length - k) * (width + 6) + 6;
    scene.boxes.push({
      type: 'badge',
      item: child,
      backward: !!backward,
      lane: LANE.unit,
      kind,
      x,
      y: y + 5,
      w: width,
      h: HEIGHT.row - 10,
      title: String(child.half[backward].kinds[kind]),
      sub: '',
    });
  });
}

// What stands between two child groups: forward in order, backward in reverse.
function gapsOf(group, children) {
  const gaps = Array.from({length: children.length + 1}, () => [[], []]);
  for (const item of group.items) {
    if (item.type === 'group' || item.type === 'alike') continue;
    const b = +item.backward;
    let k = 0;
    if (!b)
      children.forEach((child, n) => {
        if (child.half[0].pos < item.pos) k = n + 1;
      });
    else
      children.forEach((child, n) => {
        if (child.half[1].nodes && child.half[1].pos > item.pos) k = n + 1;
      });
    gaps[k][b].push(item);
  }
  for (const gap of gaps) {
    gap[0].sort((p, q) => p.pos - q.pos);
    gap[1].sort((p, q) => q.pos - p.pos);
  }
  return gaps;
}

function placeGap(scene, gap, top) {
  let bottom = top;
  for (const b of [0, 1]) {
    let y = top,
      row = null;
    for (const item of gap[b]) {
      const height = heightOf(item);
      if (row && !row.lanes.has(item.lane) && !row.open && item.type !== 'run' && sharesRow(row.last, item, b)) {
        placeItem(scene, item, b, row.y, height);
        row.lanes.add(item.lane);
        row.h = Math.max(row.h, height);
        y = Math.max(y, row.y + row.h + GAP);
      } else {
        placeItem(scene, item, b, y, height);
        row = {y, h: height, lanes: new Set([item.lane]), open: item.type === 'run' && item.open, last: item};
        y += height + GAP;
      }
    }
    bottom = Math.max(bottom, y);
  }
  return bottom;
}

// A gather may stand beside the step before it, a free beside the step after: neither reads the other.
const sharesRow = (above, item, backward) => {
  const [before, after] = backward ? [item, above] : [above, item];
  return (
    (before.kind === KIND.reshard && after.lane === LANE.main) ||
    (after.kind === KIND.unshard && before.lane === LANE.main)
  );
};

function heightOf(item) {
  if (item.type !== 'run' || !item.open) return item.sub ? HEIGHT.two : HEIGHT.one;
  return HEADER + rowsOf(item).length * (HEIGHT.two + 8) + 6;
}

function placeItem(scene, item, b, y, height) {
  const [left, right] = spanOf(item.lane, b);
  if (item.type === 'run' && item.open) return placeRun(scene, item, b, y, height, left, right);
  add(
    scene,
    {
      type: item.type === 'run' ? 'fold' : 'leaf',
      item,
      backward: !!b,
      lane: item.lane,
      kind: item.kind,
      x: left,
      y,
      w: right - left,
      h: height,
      title: item.title,
      sub: item.sub,
    },
    item,
  );
}

// ---- an open run: its operators in rows, each below what it reads, at most three side by side (waits: one) ----------
function rowsOf(run) {
  if (run.rows) return run.rows;
  const row = new Map(),
    rows = [],
    index = new Map();
  run.items.forEach(atom => atom.nodes.forEach(i => index.set(i, atom)));
  for (const atom of run.items) {
    let at = 0;
    for (const source of atom.reads || [])
      if (index.has(source)) at = Math.max(at, (row.get(index.get(source)) ?? -1) + 1);
    while (rows[at] && rows[at].length >= (run.lane === LANE.main ? COLUMNS : 1)) at++;
    (rows[at] = rows[at] || []).push(atom);
    row.set(atom, at);
  }
  return (run.rows = rows.filter(Boolean));
}

function placeRun(scene, run, b, top, height, left, right) {
  scene.frames.push({
    type: 'frame',
    item: run,
    x: left - 8,
    y: top,
    w: right - left + 16,
    h: height,
    depth: 9,
    small: true,
  });
  const rows = rowsOf(run),
    drawn = b ? [...rows].reverse() : rows;
  drawn.forEach((atoms, r) => {
    const width = (right - left - (atoms.length - 1) * 8) / atoms.length;
    atoms.forEach((atom, c) =>
      add(
        scene,
        {
          type: 'leaf',
          item: atom,
          backward: !!b,
          lane: run.lane,
          kind: atom.kind,
          x: left + c * (width + 8),
          y: top + HEADER + r * (HEIGHT.two + 8),
          w: width,
          h: HEIGHT.two,
          title: atom.title,
          sub: atom.sub,
          inRun: true,
        },
        atom,
      ),
    );
  });
}

function add(scene, box, item) {
  box.id = scene.boxes.length;
  scene.boxes.push(box);
  const known = scene.boxOf.get(item) || [null, null];
  known[+box.backward] = box;
  scene.boxOf.set(item, known);
}
