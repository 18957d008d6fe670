// What the schedule draws, part by part: bands, blocks, bars, lives, memory, axis. `view` is the Schedule.
import {KIND, bytesText} from './model.js';
import {FAINT, FONT, INK, LINE} from './surface.js';

// Heights of the rows and the width of their names, in pixels.
export const LEFT = 132;
export const TOP = 8;
export const BAND = 28;
export const BLOCK = 24;
export const BAR = 27;
export const LIFE = 22;
export const MEMORY = 170;
export const AXIS = 24;
export const LANE = 116;
const BANDS = ['#f3f7fc', '#fbf7f0'];

export function names(view, surface, rows) {
  const y = h => h - surface.camera.y,
    name = (text, at, note) => {
      surface.label(text, 14, y(at), {size: 12.5, weight: 700, room: LEFT - 20});
      if (note) surface.label(note, 14, y(at + 16), {size: 10.5, color: FAINT, room: LEFT - 18});
    };
  name('micro-batch', TOP + BAND / 2);
  name('module', TOP + BAND + BLOCK / 2 + 4);
  view.line.lanes.forEach((lane, n) => name(lane.name, rows.lanes[n].y + Math.min(rows.lanes[n].h / 2, 24)));
  name('unit lives', rows.life.y + 14, 'unshard to reshard');
  name('memory', rows.memory.y + 14, 'gathered bytes');
  name(view.line.times ? 'nominal time' : 'operators', rows.axis + AXIS / 2);
  surface.label(
    'wheel: closer \u00b7 drag: move \u00b7 click a module: see it alone \u00b7 0: whole step',
    surface.width - 20,
    y(rows.axis + AXIS + 14),
    {size: 11.5, color: FAINT, align: 'right'},
  );
}

export function rules(view, surface, rows) {
  surface.ctx.fillStyle = LINE;
  for (const row of [...rows.lanes, rows.life, rows.memory, {y: rows.axis}])
    surface.ctx.fillRect(0, row.y - 4 - surface.camera.y, surface.width, 1);
}

export function drawBand(view, surface, rows, m, shift) {
  const {ctx} = surface,
    bottom = rows.axis - surface.camera.y,
    top = TOP - surface.camera.y;
  const parts = [
    [0, view.line.turn, 'forward'],
    [view.line.turn, view.line.length, 'backward'],
  ];
  for (const [start, end, word] of parts) {
    const x0 = surface.sx(start + shift),
      x1 = surface.sx(end + shift);
    if (x1 <= x0 || x1 < LEFT || x0 > surface.width) continue;
    ctx.fillStyle = BANDS[word === 'forward' ? 0 : 1];
    ctx.fillRect(x0, top, x1 - x0, bottom - top);
    ctx.fillStyle = word === 'forward' ? '#9db4d3' : '#d8bd8f';
    ctx.fillRect(x0, top, 1.5, bottom - top);
    const left = Math.max(x0, LEFT),
      right = Math.min(x1, surface.width - 8);
    surface.label(`micro-batch ${m} \u00b7 ${word}`, (left + right) / 2, top + BAND / 2, {
      size: 12,
      weight: 600,
      align: 'center',
      room: right - left - 12,
    });
  }
}

export function drawBlocks(view, surface, shift) {
  const y = TOP + BAND - surface.camera.y;
  const names = []; // written once all boxes are drawn
  let free = LEFT;
  view.line.blocks.forEach((block, n) => {
    if (!view.isOn(block.backward)) return;
    const x = surface.sx(block.start + shift),
      w = surface.sx(block.end + shift) - x;
    if (x + w < LEFT || x > surface.width) return;
    const left = Math.max(x, LEFT),
      right = Math.min(x + w, surface.width - 8),
      middle = (left + right) / 2;
    if (w > 26) surface.box(x + 0.5, y + 2, w - 1, BLOCK, 3, '#ffffff', '#9aa7b8', 1);
    else {
      surface.ctx.fillStyle = n % 2 ? '#e6ecf3' : '#cdd7e3';
      surface.ctx.fillRect(x, y + 2, Math.max(w, 0.6), BLOCK);
    }
    if (right - left > 40)
      names.push([fitting(surface, shorter(block.name), 11, right - left - 8), middle, 11, Infinity]);
    else if (middle - 12 > free && w > 3 && /\d$/.test(block.name) && middle + 12 < surface.width) {
      names.push([block.name.split('.').pop(), middle, 10, 24]);
      free = middle + 12;
    }
    view.drawn.push({
      x,
      y,
      w: Math.max(w, 2),
      h: BLOCK + 2,
      block,
      start: block.start + shift,
      end: block.end + shift,
    });
  });
  for (const [text, middle, size, room] of names)
    surface.label(text, middle, y + 2 + BLOCK / 2, {size, align: 'center', room, keepEnd: true});
}

export function drawBars(view, surface, bars, lane, shift) {
  const top = lane.y + 5 - surface.camera.y,
    {ctx} = surface;
  const inSight = bars.filter(
    bar => surface.sx(bar.end + shift) > LEFT + 1 && surface.sx(bar.start + shift) < surface.width,
  );
  const taken = [...new Set(inSight.map(bar => bar.row))].sort((a, b) => a - b),
    rank = new Map(taken.map((row, n) => [row, n]));
  const h = Math.max(1, Math.min(BAR, (lane.h - 10) / Math.max(1, taken.length)));
  const seen = new Map(); // by row the last pixel, and whether it shows more than compute
  for (const bar of inSight) {
    const x = surface.sx(bar.start + shift),
      w = Math.max(surface.sx(bar.end + shift) - x, 1);
    if (!view.isOn(view.model.isBackward(bar.node))) continue;
    if (w < 1.5) {
      const pixel = Math.floor(x),
        last = seen.get(bar.row),
        plain = bar.kind === KIND.compute;
      if (last && last.pixel === pixel && (plain || !last.plain)) continue;
      seen.set(bar.row, {pixel, plain});
    }
    const y = top + rank.get(bar.row) * h,
      kind = view.model.kinds[bar.kind],
      strong = view.picked === bar.node || (view.pointed && view.pointed.bar === bar);
    if (w < 5 || h < 5) {
      ctx.fillStyle = bar.kind === KIND.compute ? '#a3aebb' : bar.kind === KIND.wait ? '#e4e9ef' : kind.stroke;
      ctx.fillRect(x, y, w, h < 5 ? Math.max(1, h - 0.8) : h - 2);
    } else barBox(view, surface, bar, x, y, w, h, strong);
    if (view.hits && view.hits(bar.node)) surface.box(x - 1, y, w + 2, h - 1, 3, null, INK, 2);
    const left = Math.max(x, LEFT),
      right = Math.min(x + w, surface.width - 8);
    if (h >= 14 && right - left > 14) inside(surface, barTexts(view, bar), left, right, y + h / 2);
    view.drawn.push({x, y, w, h: h - 1, node: bar.node, bar});
  }
}

// A text in a bar: the longest of `texts` that has room, or the shortest one cut where half a word of it has.
function inside(surface, texts, left, right, y) {
  const text = fitting(surface, texts, 10.5, right - left - 8);
  if (text) surface.label(text, left + 4, y, {size: 10.5});
}
function fitting(surface, texts, size, room) {
  const font = `400 ${size.toFixed(2)}px ${FONT}`;
  const whole = texts.find(text => surface.measure(text, font) <= room);
  return whole ?? (room > 28 ? surface.fit(texts[texts.length - 1], font, room, false) : '');
}
// A module path, and shorter: its last two parts, its last.
function shorter(path) {
  const parts = path.split('.');
  return [path, ...[2, 1].filter(n => n < parts.length).map(n => parts.slice(-n).join('.'))];
}

function barBox(view, surface, bar, x, y, w, h, strong) {
  const kind = view.model.kinds[bar.kind];
  const dash = bar.kind === KIND.wait ? [3, 3] : null;
  surface.box(x + 0.5, y + 1, w - 1, h - 3, 3, strong ? '#ffffff' : kind.fill, kind.stroke, strong ? 2.4 : 1, dash);
}

function barTexts(view, bar) {
  if (bar.kind === KIND.wait) return ['wait'];
  const box = view.model.atomOf(bar.node);
  if (!box || bar.kind === KIND.compute) return [view.model.shortOp(bar.node)];
  if (bar.kind !== KIND.unshard && bar.kind !== KIND.reduce) return [box.title];
  const cut = box.title.lastIndexOf(' ') + 1,
    verb = box.title.slice(0, cut);
  return [...shorter(box.title.slice(cut)).map(path => verb + path), verb.trim()];
}

export function drawLives(view, surface, rows, shift) {
  const top = rows.y + 4 - surface.camera.y,
    kind = view.model.kinds[KIND.unshard];
  for (const life of view.line.lives) {
    const x = surface.sx(life.start + shift),
      w = Math.max(surface.sx(life.end + shift) - x, 1);
    if (x + w < LEFT + 1 || x > surface.width || !view.isOn(view.model.isBackward(life.node))) continue;
    const h = rows.bar,
      y = top + life.row * h,
      strong = view.pointed && view.pointed.life === life;
    surface.box(
      x,
      y + 1,
      w,
      h - Math.min(4, h / 3),
      3,
      strong ? '#ffffff' : kind.fill,
      w > 3 ? kind.stroke : null,
      strong ? 2.4 : 1,
    );
    if (w <= 3) {
      surface.ctx.fillStyle = kind.stroke;
      surface.ctx.fillRect(x, y + 1, w, h - Math.min(4, h / 3));
    }
    const left = Math.max(x, LEFT),
      right = Math.min(x + w, surface.width - 8);
    if (h >= 14 && right - left > 34) inside(surface, lifeTexts(life), left, right, y + h / 2 - 1);
    view.drawn.push({x, y, w, h: h - 1, life, node: life.node});
  }
}

function lifeTexts(life) {
  const names = shorter(life.unit || 'root'),
    last = names[names.length - 1];
  return [...names.map(name => `${name} \u00b7 ${bytesText(life.bytes)}`), ...names, last];
}

export function drawMemory(view, surface, rows) {
  const {ctx} = surface,
    bottom = rows.y + rows.h - surface.camera.y,
    [, peak] = view.line.peak,
    scale = (rows.h - 26) / (peak || 1);
  const color = view.model.kinds[KIND.unshard];
  for (let m = 0; m < view.batches; m++) {
    const shift = m * view.line.length,
      points = view.line.memory;
    ctx.beginPath();
    ctx.moveTo(surface.sx(shift), bottom);
    points.forEach(([x, bytes], i) => {
      const next = i + 1 < points.length ? points[i + 1][0] : view.line.length;
      ctx.lineTo(surface.sx(x + shift), bottom - bytes * scale);
      ctx.lineTo(surface.sx(next + shift), bottom - bytes * scale);
    });
    ctx.lineTo(surface.sx(view.line.length + shift), bottom);
    ctx.fillStyle = color.fill;
    ctx.fill();
    ctx.strokeStyle = color.stroke;
    ctx.lineWidth = (surface.camera.k * view.line.length) / points.length < 4 ? 0.5 : 1.2;
    ctx.stroke();
  }
  if (!peak) {
    surface.label('nothing is gathered', LEFT + 12, bottom - 20, {size: 12, color: FAINT});
    return;
  }
  const y = bottom - peak * scale;
  ctx.strokeStyle = INK;
  ctx.setLineDash([5, 4]);
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(LEFT, y);
  ctx.lineTo(surface.width - 8, y);
  ctx.stroke();
  ctx.setLineDash([]);
  surface.label(`peak ${bytesText(peak)}, ${view.when(view.line.peak[0])}`, LEFT + 10, y - 10, {
    size: 12,
    weight: 700,
    room: surface.width - LEFT - 30,
  });
}

export function drawAxis(view, surface, top) {
  const {ctx} = surface,
    y = top - surface.camera.y,
    k = surface.camera.k;
  const powers = [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];
  const steps = powers.flatMap(p => [1, 2, 5].map(s => s * 10 ** p));
  const step = steps.find(s => s * k > 90 && (view.line.times || s >= 1)) || steps[steps.length - 1];
  for (let m = 0; m < view.batches; m++)
    for (let x = 0; x < view.line.length; x += step) {
      const at = surface.sx(x + m * view.line.length);
      if (at < LEFT || at > surface.width - 70 || (m && x === 0) || (view.line.length - x) * k < 60) continue;
      ctx.fillStyle = FAINT;
      ctx.fillRect(at, y, 1, 5);
      surface.label(view.line.times ? unit(x, step) : x.toLocaleString('en'), at + 4, y + AXIS / 2, {
        size: 10.5,
        color: FAINT,
        room: 64,
      });
    }
}

const unit = (ms, step) => (step < 0.1 ? `${Math.round(ms * 1e4) / 10} \u00b5s` : `${Math.round(ms * 100) / 100} ms`);
