// How the structure's boxes, frames and arrows look. `view` is the Structure.
import {EDGE, KIND, LANE, plural} from './model.js';
import {colorOf} from './edges.js';
import {FAINT, FONT, INK, LINE} from './surface.js';
import {drawGlyph, hasGlyph} from './glyphs.js';

// The height of the row of column names.
export const HEAD = 34;
const COLUMNS = [
  ['gathers \u00b7 frees', 184],
  ['forward \u2193', 502],
  ['contexts', 790],
  ['backward \u2191', 1078],
  ['gathers \u00b7 reductions', 1396],
];
const TINTS = ['#ffffff', '#f6f8fb', '#eef2f7', '#e7ecf3'];

export function drawHead(view, surface) {
  const {ctx} = surface;
  ctx.fillStyle = '#ffffff';
  ctx.fillRect(0, 0, surface.width, HEAD);
  ctx.fillStyle = LINE;
  ctx.fillRect(0, HEAD - 1, surface.width, 1);
  const room = 190 * surface.camera.k;
  for (const [text, x] of COLUMNS)
    surface.label(text, surface.sx(x), HEAD / 2, {size: 13, weight: 700, align: 'center', room});
}

export function drawFrame(view, surface, frame, r) {
  surface.box(r.x, r.y, r.w, r.h, 9 * surface.camera.k, tintOf(frame), frame === view.pointed ? INK : '#c3ccd8', 1);
}

export function drawTitle(view, surface, frame, r) {
  const {ctx} = surface,
    k = surface.camera.k;
  drawTwist(ctx, r.x + 14 * k, r.y + 14 * k, 4.5 * k, true);
  const item = frame.item,
    title = item.type === 'run' ? item.title : item.type === 'alike' ? item.name : item.path;
  const room = (frame.small ? 200 : 560) * k,
    y = r.y + 14 * k;
  const font = {size: 12.5 * k, weight: 700, room, keepEnd: !frame.small};
  ctx.fillStyle = tintOf(frame);
  ctx.fillRect(
    r.x + 24 * k,
    r.y + 5 * k,
    Math.min(room, surface.measure(title, `700 ${12.5 * k}px ${FONT}`)) + 90 * k,
    19 * k,
  );
  const width = surface.label(title, r.x + 26 * k, y, font);
  const note = item.type === 'run' ? item.sub : item.note || plural(item.half[0].nodes + item.half[1].nodes, 'node');
  surface.label(note, r.x + 36 * k + width, y, {size: 11 * k, color: FAINT, room: frame.small ? 90 * k : 300 * k});
}

export function drawBox(view, surface, box, r) {
  const k = surface.camera.k,
    kind = view.model.kinds[box.kind],
    {ctx} = surface;
  const strong = box === view.pointed || box === view.picked,
    dash = box.kind === KIND.reshard || box.kind === KIND.wait ? [4, 3] : null;
  if (box.item.type === 'alike' && box.type === 'fold')
    for (const n of [2, 1]) surface.box(r.x + n * 4 * k, r.y + n * 4 * k, r.w, r.h, 6 * k, '#ffffff', kind.stroke, 1);
  const fold = box.type === 'fold',
    hit = view.hits && view.hits(box);
  surface.box(
    r.x,
    r.y,
    r.w,
    r.h,
    6 * k,
    fold ? '#ffffff' : kind.fill,
    hit ? '#0f172a' : kind.stroke,
    strong || hit ? 2.8 : 1.3,
    dash,
  );
  if (box.type === 'badge') {
    drawGlyph(ctx, box.kind, r.x + 16 * k, r.y + r.h / 2, 5 * k, kind.stroke);
    surface.label(box.title, r.x + 28 * k, r.y + r.h / 2, {size: 11.5 * k, weight: 600, room: r.w - 32 * k});
    return;
  }
  const mark = fold || hasGlyph(box.kind),
    left = r.x + (mark ? 28 : 10) * k;
  if (fold) drawTwist(ctx, r.x + 14 * k, r.y + r.h / 2, 4.5 * k, false);
  else if (hasGlyph(box.kind)) drawGlyph(ctx, box.kind, r.x + 15 * k, r.y + r.h / 2, 5.5 * k, kind.stroke);
  const right = fold && box.item.half ? drawInside(view, surface, box, r) : r.x + r.w;
  const room = right - left - 8 * k,
    isRow = fold && box.item.half;
  if (!box.sub || isRow) {
    const width = surface.label(box.title, left, r.y + r.h / 2, {size: 12.5 * k, weight: 600, room});
    if (isRow)
      surface.label(box.sub, left + width + 10 * k, r.y + r.h / 2, {
        size: 11 * k,
        color: FAINT,
        room: room - width - 12 * k,
      });
    return;
  }
  const title = box.lane === LANE.unit ? verbAndEnd(surface, box.title, 12 * k, room) : box.title;
  surface.label(title, left, r.y + r.h / 2 - 7.5 * k, {size: 12 * k, weight: 600, room});
  surface.label(box.sub, left, r.y + r.h / 2 + 8 * k, {size: 10.5 * k, color: FAINT, room});
}

// A band for each time in which a unit's whole weights are in memory, from `livesOf`.
export function drawLives(view, surface) {
  const {ctx, camera} = surface,
    bottom = camera.y + (surface.height - HEAD) / camera.k;
  ctx.fillStyle = view.model.kinds[KIND.unshard].stroke;
  ctx.globalAlpha = 0.22;
  for (const life of view.lives) {
    if (!(life.backward ? view.options.backward : view.options.forward)) continue;
    if (life.bottom < camera.y || life.top > bottom) continue;
    ctx.fillRect(surface.sx(life.x), surface.sy(life.top) + HEAD, 12 * camera.k, (life.bottom - life.top) * camera.k);
  }
  ctx.globalAlpha = 1;
}

// The exchanges inside a folded group, on the right of its box; returns where they begin.
function drawInside(view, surface, box, r) {
  const k = surface.camera.k,
    half = box.item.half[+box.backward];
  let x = r.x + r.w - 8 * k;
  for (const kind of [KIND.combine, KIND.dispatch]) {
    const count = half.kinds[kind];
    if (!count) continue;
    x -= surface.label(String(count), x, r.y + r.h / 2, {size: 11 * k, weight: 600, align: 'right'}) + 11 * k;
    drawGlyph(surface.ctx, kind, x, r.y + r.h / 2, 5 * k, view.model.kinds[kind].stroke);
    x -= 14 * k;
  }
  return x;
}

export function drawArrow(view, surface, arrow, lit) {
  const {ctx} = surface,
    p = arrow.points,
    at = n => [surface.sx(p[n]), surface.sy(p[n + 1]) + HEAD];
  const [x0, y0] = at(0),
    [x1, y1] = at(2),
    [x2, y2] = at(4),
    [x3, y3] = at(6);
  ctx.strokeStyle = ctx.fillStyle = lit && arrow.kind === EDGE.data ? INK : colorOf(arrow, view.model);
  ctx.lineWidth =
    (lit ? 2.4 : arrow.kind === EDGE.context ? 2.2 : arrow.kind === EDGE.saved ? 0.9 : 1.3) *
    Math.min(1.3, surface.camera.k);
  ctx.setLineDash(arrow.kind === EDGE.effect ? [4, 3] : []);
  if (!lit && arrow.kind !== EDGE.context && Math.abs(p[1] - p[7]) > 300) ctx.globalAlpha = 0.3; // far away: faint
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(x1, y1, x2, y2, x3, y3);
  ctx.stroke();
  ctx.setLineDash([]);
  const angle = Math.atan2(y3 - y2, x3 - x2),
    size = 6.5 * Math.min(1.2, surface.camera.k);
  ctx.beginPath();
  ctx.moveTo(x3, y3);
  for (const turn of [2.7, -2.7]) ctx.lineTo(x3 + Math.cos(angle + turn) * size, y3 + Math.sin(angle + turn) * size);
  ctx.fill();
  ctx.globalAlpha = 1;
}

// `unshard \u2026mlp.experts`: what a box does and the end of its module path.
function verbAndEnd(surface, title, size, room) {
  const font = `600 ${size.toFixed(2)}px ${FONT}`,
    cut = title.lastIndexOf(' ') + 1,
    verb = title.slice(0, cut);
  return verb + surface.fit(title.slice(cut), font, room - surface.measure(verb, font), true);
}

const tintOf = frame => (frame.small ? '#ffffff' : TINTS[Math.min(frame.depth, TINTS.length - 1)]);

function drawTwist(ctx, x, y, r, open) {
  ctx.fillStyle = FAINT;
  ctx.beginPath();
  const points = open
    ? [
        [-1, -0.6],
        [1, -0.6],
        [0, 0.8],
      ]
    : [
        [-0.6, -1],
        [0.8, 0],
        [-0.6, 1],
      ];
  points.forEach(([dx, dy], i) => ctx[i ? 'lineTo' : 'moveTo'](x + dx * r, y + dy * r));
  ctx.fill();
}
