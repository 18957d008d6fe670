// A shape for each kind beside its colour, so that no picture depends on colours alone.
import {KIND} from './model.js';

const SHAPES = {
  [KIND.unshard]: [
    [-1, 0.8],
    [0, -0.9],
    [1, 0.8],
  ], // up: memory grows
  [KIND.reshard]: [
    [-1, -0.8],
    [0, 0.9],
    [1, -0.8],
  ], // down: memory shrinks
  [KIND.reduce]: [
    [0, -1],
    [1, 0],
    [0, 1],
    [-1, 0],
  ],
  [KIND.dispatch]: [
    [-1, -0.7],
    [0.1, -0.7],
    [1, 0],
    [0.1, 0.7],
    [-1, 0.7],
  ], // towards the experts
  [KIND.combine]: [
    [1, -0.7],
    [-0.1, -0.7],
    [-1, 0],
    [-0.1, 0.7],
    [1, 0.7],
  ], // and back
  [KIND.exchange]: [
    [-0.8, -0.8],
    [0.8, -0.8],
    [0.8, 0.8],
    [-0.8, 0.8],
  ],
  [KIND.sum]: plus(0.35),
};

// A cross, its arms `a` wide to each side.
function plus(a) {
  return [
    [-a, -1],
    [a, -1],
    [a, -a],
    [1, -a],
    [1, a],
    [a, a],
    [a, 1],
    [-a, 1],
    [-a, a],
    [-1, a],
    [-1, -a],
    [-a, -a],
  ];
}

export const hasGlyph = kind => kind in SHAPES || kind === KIND.context;

export function drawGlyph(ctx, kind, x, y, radius, color) {
  ctx.fillStyle = color;
  ctx.beginPath();
  if (kind === KIND.context) ctx.arc(x, y, radius * 0.9, 0, 7);
  else SHAPES[kind].forEach(([dx, dy], i) => ctx[i ? 'lineTo' : 'moveTo'](x + dx * radius, y + dy * radius));
  ctx.fill();
}

// The legend that stays in sight: boxes, then arrows, of the kinds that this graph has.
export function legend(model, host) {
  const present = new Set(model.columns.kind),
    arrows = new Set(model.edges.kind);
  model.kinds.forEach((kind, k) => {
    if (kind.legend && present.has(k)) host.append(entry(kind.legend, ctx => swatch(ctx, k, kind)));
  });
  model.arrows.forEach((arrow, k) => {
    if (arrows.has(k))
      host.append(
        entry(arrow.legend, ctx => {
          ctx.strokeStyle = arrow.stroke;
          ctx.lineWidth = 2;
          if (arrow.name === 'effect') ctx.setLineDash([4, 3]);
          ctx.beginPath();
          ctx.moveTo(1, 8);
          ctx.lineTo(21, 8);
          ctx.stroke();
        }),
      );
  });
}
function swatch(ctx, k, kind) {
  ctx.fillStyle = kind.fill;
  ctx.strokeStyle = kind.stroke;
  ctx.lineWidth = 1.4;
  if (k === KIND.wait || k === KIND.reshard) ctx.setLineDash([3, 2]);
  ctx.beginPath();
  ctx.roundRect(1, 1, 20, 14, 3);
  ctx.fill();
  ctx.stroke();
  if (hasGlyph(k)) drawGlyph(ctx, k, 11, 8, 4.2, kind.stroke);
}
function entry(text, paint) {
  const item = document.createElement('span'),
    canvas = document.createElement('canvas'),
    ratio = window.devicePixelRatio || 1;
  canvas.width = 22 * ratio;
  canvas.height = 16 * ratio;
  canvas.getContext('2d').scale(ratio, ratio);
  paint(canvas.getContext('2d'));
  item.className = 'key';
  item.append(canvas, text);
  return item;
}
