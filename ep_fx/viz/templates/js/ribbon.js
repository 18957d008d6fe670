// Two strips, the order before a pass above the order after it, each node in the colour of its kind; between them bands
// lead each stretch that stayed to its new place, wedges open where nodes came and close where nodes went.
import {plural} from './model.js';
import {FAINT, INK} from './surface.js';

const LEFT = 92,
  RIGHT = 20,
  TOP = 14,
  STRIP = 34;
export const CHANGE = {added: '#0072b2', removed: '#b84600', moved: '#a84f82'};

export class Ribbon {
  constructor(view) {
    this.view = view;
    this.surface = null;
    this.pointedNumber = -1;
  }
  reset() {
    const {view} = this,
      k = view.step;
    this.before = view.orders[Math.max(0, k - 1)];
    this.after = view.orders[k];
    this.most = Math.max(this.before.length, this.after.length, 1);
    const change = k ? view.changes[k - 1] : {added: [], removed: [], moved: []};
    this.state = new Map();
    for (const word of ['added', 'removed', 'moved']) for (const n of change[word]) this.state.set(n, word);
    this.bands = stretches(this.before, this.after, this.state);
    if (this.surface && this.surface.width) this.limit(this.surface, true);
  }
  resized(surface) {
    if (this.most) this.limit(surface, true);
  }
  limit(surface, whole = false) {
    const {camera} = surface,
      room = surface.width - LEFT - RIGHT,
      fit = room / this.most;
    camera.k = whole ? fit : Math.max(fit, Math.min(camera.k, 60));
    camera.x = whole
      ? -LEFT / camera.k
      : Math.max(-LEFT / camera.k, Math.min(camera.x, this.most - (surface.width - RIGHT) / camera.k));
    camera.y = 0;
  }
  rowsOf(surface) {
    return {before: TOP, after: Math.max(TOP + STRIP + 60, surface.height - STRIP - 14)};
  }
  hit(x, y) {
    if (!this.before) return null;
    const rows = this.rowsOf(this.surface),
      at = Math.floor(this.surface.wx(x));
    for (const side of ['before', 'after'])
      if (y >= rows[side] && y <= rows[side] + STRIP && this[side][at] !== undefined && x > LEFT)
        return {number: this[side][at], side};
    return null;
  }
  over(target, event) {
    const number = target ? target.number : -1;
    if (number !== this.pointedNumber) {
      this.pointedNumber = number;
      this.surface.redraw();
    }
    this.surface.canvas.style.cursor = target ? 'pointer' : 'grab';
    this.view.details.hover(target && this.infoOf(target), event);
  }
  click(target) {
    if (target) this.view.details.pin(this.infoOf(target));
    else this.view.details.unpin();
  }
  infoOf({number}) {
    const note = this.view.notes[number],
      kind = this.view.model.kinds[note.kind];
    const rows = [
      ['operator', note.op],
      ['module', note.path || 'model'],
      ['phase', note.backward ? 'backward' : 'forward'],
      ['this pass', this.state.get(number) || 'left it alone'],
      ['kind', kind.legend || kind.name],
    ];
    if (note.node >= 0)
      rows.push(['gives', this.view.model.type(note.node)], ['source', this.view.model.text('source', note.node)]);
    return {
      title: `%${note.name}`,
      sub: '',
      color: kind.stroke,
      rows: rows.filter(row => row[1]),
      nodes: note.node >= 0 ? [note.node] : null,
    };
  }
  // ---- drawing ----
  draw(surface) {
    if (!this.before) return;
    const rows = this.rowsOf(surface),
      {ctx} = surface,
      first = this.view.step === 0;
    const title = (text, note, y) => {
      surface.label(text, 14, y + STRIP / 2 - 8, {size: 12.5, weight: 700, room: LEFT - 18});
      surface.label(note, 14, y + STRIP / 2 + 9, {size: 11, color: FAINT, room: LEFT - 18});
    };
    if (!first) title('before', plural(this.before.length, 'node'), rows.before);
    title(first ? 'captured' : 'after', plural(this.after.length, 'node'), rows.after);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, surface.width - LEFT - 8, surface.height);
    ctx.clip();
    if (!first) {
      for (const band of this.bands) this.drawBand(surface, band, rows.before + STRIP, rows.after);
      this.drawStrip(surface, this.before, rows.before, 'removed');
    }
    this.drawStrip(surface, this.after, rows.after, 'added');
    ctx.restore();
  }
  drawBand(surface, band, y0, y1) {
    const {ctx} = surface,
      [a0, a1, b0, b1] = [
        band.from,
        band.from + band.size * +(band.word !== 'added'),
        band.to,
        band.to + band.size * +(band.word !== 'removed'),
      ].map(x => surface.sx(x));
    if (Math.max(a1, b1) < LEFT || Math.min(a0, b0) > surface.width) return;
    if (band.word === 'kept' && a1 - a0 < 0.4) return;
    const middle = (y0 + y1) / 2,
      color = CHANGE[band.word];
    ctx.beginPath();
    ctx.moveTo(a0, y0);
    ctx.bezierCurveTo(a0, middle, b0, middle, b0, y1);
    ctx.lineTo(Math.max(b1, b0 + 0.4), y1);
    ctx.bezierCurveTo(Math.max(b1, b0 + 0.4), middle, Math.max(a1, a0 + 0.4), middle, Math.max(a1, a0 + 0.4), y0);
    ctx.closePath();
    ctx.fillStyle = color || '#dfe5ec';
    ctx.globalAlpha = color ? 0.55 : 0.55;
    ctx.fill();
    ctx.globalAlpha = 1;
  }
  drawStrip(surface, order, y, word) {
    const {ctx} = surface,
      k = surface.camera.k,
      kinds = this.view.model.kinds;
    const first = Math.max(0, Math.floor(surface.wx(LEFT))),
      last = Math.min(order.length, Math.ceil(surface.wx(surface.width)));
    const step = Math.max(1, Math.floor(1 / k));
    for (let i = first; i < last; i += step) {
      const note = this.view.notes[pick(order, i, step, this.view.notes)],
        x = surface.sx(i),
        w = Math.max(step * k, 1);
      const plain = kinds[note.kind].name === 'compute' || kinds[note.kind].name === 'placeholder';
      ctx.fillStyle = plain ? '#cfd6df' : kinds[note.kind].stroke;
      ctx.fillRect(x, y, k > 4 ? w - 1 : w, STRIP - 8);
      if (this.state.get(order[i]) === word || this.state.get(order[i]) === 'moved') {
        ctx.fillStyle = CHANGE[this.state.get(order[i])];
        ctx.fillRect(x, word === 'removed' ? y + STRIP - 7 : y - 7, w, 5);
      }
      if (k > 34)
        surface.label(note.op.split('::').pop(), x + 3, y + (STRIP - 8) / 2, {
          size: 10,
          room: k - 7,
          color: plain ? INK : '#ffffff',
        });
    }
    const at = order.indexOf(this.pointedNumber);
    if (at >= 0) surface.box(surface.sx(at) - 2, y - 3, Math.max(k, 2) + 4, STRIP - 2, 2, null, INK, 2.4);
  }
}
// Of several nodes under one pixel the one that is no plain compute.
function pick(order, start, step, notes) {
  for (let i = start; i < Math.min(start + step, order.length); i++) if (notes[order[i]].kind !== 0) return order[i];
  return order[start];
}

// Stretches that stayed or moved together, came together, or went together: {from, to, size, word}.
function stretches(before, after, state) {
  const place = new Map(before.map((n, i) => [n, i])),
    bands = [];
  let from = 0;
  after.forEach((n, to) => {
    const word = state.get(n) || 'kept',
      last = bands[bands.length - 1];
    const at = word === 'added' ? from : place.get(n);
    if (word === 'kept') from = at + 1;
    const follows =
      last && last.word === word && last.to + last.size === to && (word === 'added' || last.from + last.size === at);
    if (follows) last.size++;
    else bands.push({from: at, to, size: 1, word});
  });
  const rank = new Map(after.map((n, i) => [n, i]));
  let to = 0,
    last = null;
  before.forEach((n, at) => {
    if (rank.has(n)) {
      if (!state.has(n)) to = rank.get(n) + 1;
      last = null;
      return;
    }
    if (last) last.size++;
    else bands.push((last = {from: at, to, size: 1, word: 'removed'}));
  });
  return bands.sort((a, b) => +(a.word !== 'kept') - +(b.word !== 'kept'));
}
