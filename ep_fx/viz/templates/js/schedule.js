// The second view: when. Lanes from left to right, under them the life of every gathered unit and the memory they take.
import {KIND, bytesText, msText} from './model.js';
import {Timeline} from './timeline.js';
import {FAINT, FONT, INK, LINE, Surface} from './surface.js';
import {infoOfNode} from './details.js';

const LEFT = 132,
  TOP = 8,
  BAND = 28,
  BLOCK = 24,
  BAR = 27,
  LIFE = 22,
  MEMORY = 170,
  AXIS = 24,
  LANE = 116;
const BANDS = ['#f3f7fc', '#fbf7f0'];

export class Schedule {
  constructor(model, options, details, host) {
    Object.assign(this, {model, options, details});
    this.batches = 1;
    this.pointed = null;
    this.picked = -1;
    this.setTimes(true);
    this.surface = new Surface(host, this, {zoomX: true});
  }
  setTimes(use) {
    this.line = new Timeline(this.model, use);
  }
  setBatches(count) {
    this.batches = count;
    this.fit();
  }
  get total() {
    return this.line.length * this.batches;
  }
  resized(surface) {
    if (this.placed) this.limit(surface);
  }
  limit(surface) {
    const {camera} = surface,
      room = surface.width - LEFT - 16;
    camera.k = Math.max(
      room / this.total,
      Math.min(camera.k, 260 / (this.line.length / Math.max(1, this.model.count))),
    );
    camera.x = Math.max(-LEFT / camera.k, Math.min(camera.x, this.total - (surface.width - 16) / camera.k));
    camera.y = Math.max(0, Math.min(camera.y, Math.max(0, this.heightOf() - surface.height)));
  }
  fit() {
    this.show(0, this.total);
  }
  show(start, end) {
    const {surface} = this,
      room = surface.width - LEFT - 16;
    if (room <= 0) return;
    this.placed = true;
    surface.camera.k = room / Math.max(end - start, 1e-9);
    this.limit(surface);
    surface.camera.x = start - LEFT / surface.camera.k;
    surface.moved();
  }
  reveal(i) {
    const at = this.line.at(i),
      span = this.line.length * Math.min(1, 60 / this.model.count);
    this.picked = i;
    this.show(Math.max(0, at - span / 2), at + span / 2);
    this.details.pin(infoOfNode(this.model, i));
  }
  // ---- rows ----
  rows() {
    let y = TOP + BAND + BLOCK + 14;
    const lanes = this.line.lanes.map((_, n) => this.line.bars[n]).map(bars => {
      const lane = {y, h: Math.min(LANE, bars.rows * BAR) + 10};
      y += lane.h + 8;
      return lane;
    });
    const height = Math.max(3, Math.min(LIFE, LANE / this.line.lifeRows)),
      life = {y: y + 8, bar: height, h: this.line.lifeRows * height + 10};
    const memory = {y: life.y + life.h + 12};
    memory.h = Math.max(MEMORY, (this.surface ? this.surface.height : 0) - memory.y - AXIS - 44);
    return {lanes, life, memory, axis: memory.y + memory.h + 6};
  }
  heightOf() {
    return this.rows().axis + AXIS + 30;
  }
  isOn(backward) {
    return backward ? this.options.backward : this.options.forward;
  }
  // ---- pointer ----
  hit(x, y) {
    return (
      [...(this.drawn || [])].reverse().find(d => x >= d.x - 1 && x <= d.x + d.w + 1 && y >= d.y && y <= d.y + d.h) ||
      null
    );
  }
  over(target, event) {
    if (target !== this.pointed) {
      this.pointed = target;
      this.surface.redraw();
    }
    this.surface.canvas.style.cursor = target ? 'pointer' : 'grab';
    this.details.hover(target && this.infoOf(target), event);
  }
  click(target) {
    if (!target) {
      this.picked = -1;
      this.details.unpin();
      this.surface.redraw();
      return;
    }
    if (target.block) {
      this.show(target.start, target.end);
      return;
    }
    if (target.node !== undefined) {
      this.picked = target.node;
      this.details.pin(this.infoOf(target));
    }
    this.surface.redraw();
  }
  infoOf(target) {
    const {model} = this;
    if (target.block)
      return {
        title: target.block.name,
        sub: target.block.backward ? 'backward' : 'forward',
        color: FAINT,
        rows: [],
        hint: 'click to see it closer',
      };
    if (target.life) {
      const {life} = target,
        rows = [
          ['from', this.when(life.start)],
          ['to', this.when(life.end)],
          ['gathered', bytesText(life.bytes)],
        ];
      return {
        title: `life of unit ${life.unit || 'root'}`,
        sub: 'from unshard to reshard',
        color: model.kinds[KIND.unshard].stroke,
        rows,
        nodes: [life.node],
      };
    }
    if (target.memory)
      return {
        title: bytesText(target.memory[1]),
        sub: 'gathered parameters alive',
        color: FAINT,
        rows: [['at', this.when(target.memory[0])]],
      };
    const info = infoOfNode(model, target.node),
      wait = model.columns.wait[target.node];
    if (wait >= 0) info.rows.push(['waited for by', `%${model.name(wait)}`]);
    info.rows.push(['when', this.when(target.bar.start)]);
    return info;
  }
  when(x) {
    return this.line.times ? msText(x) : `operator ${Math.round(x).toLocaleString('en')}`;
  }
  // ---- drawing ----
  draw(surface) {
    if (!surface.width || !this.surface) return;
    if (!this.placed) this.fit();
    const rows = this.rows(),
      {ctx} = surface;
    this.drawn = [];
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, surface.width - LEFT - 8, surface.height);
    ctx.clip();
    for (let m = 0; m < this.batches; m++) {
      const shift = m * this.line.length;
      this.drawBand(surface, rows, m, shift);
    }
    this.rules(surface, rows);
    for (let m = 0; m < this.batches; m++) {
      const shift = m * this.line.length;
      this.drawBlocks(surface, shift);
      rows.lanes.forEach((row, n) => this.drawBars(surface, this.line.bars[n], row, shift));
      this.drawLives(surface, rows.life, shift);
    }
    this.drawMemory(surface, rows.memory);
    this.drawAxis(surface, rows.axis);
    ctx.restore();
    this.names(surface, rows);
  }
  names(surface, rows) {
    const y = h => h - surface.camera.y,
      name = (text, at, note) => {
        surface.label(text, 14, y(at), {size: 12.5, weight: 700, room: LEFT - 20});
        if (note) surface.label(note, 14, y(at + 16), {size: 10.5, color: FAINT, room: LEFT - 18});
      };
    name('micro-batch', TOP + BAND / 2);
    name('module', TOP + BAND + BLOCK / 2 + 4);
    this.line.lanes.forEach((lane, n) => name(lane.name, rows.lanes[n].y + Math.min(rows.lanes[n].h / 2, 24)));
    name('unit lives', rows.life.y + 14, 'unshard to reshard');
    name('memory', rows.memory.y + 14, 'gathered bytes');
    name(this.line.times ? 'time' : 'operators', rows.axis + AXIS / 2);
    surface.label(
      'wheel: closer \u00b7 drag: move \u00b7 click a module: see it alone \u00b7 0: whole step',
      surface.width - 20,
      y(rows.axis + AXIS + 14),
      {size: 11.5, color: FAINT, align: 'right'},
    );
  }
  rules(surface, rows) {
    surface.ctx.fillStyle = LINE;
    for (const row of [...rows.lanes, rows.life, rows.memory, {y: rows.axis}])
      surface.ctx.fillRect(0, row.y - 4 - surface.camera.y, surface.width, 1);
  }
  drawBand(surface, rows, m, shift) {
    const {ctx} = surface,
      bottom = rows.axis - surface.camera.y,
      top = TOP - surface.camera.y;
    const parts = [
      [0, this.line.turn, 'forward'],
      [this.line.turn, this.line.length, 'backward'],
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
  drawBlocks(surface, shift) {
    const y = TOP + BAND - surface.camera.y;
    let free = LEFT;
    this.line.blocks.forEach((block, n) => {
      if (!this.isOn(block.backward)) return;
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
        surface.label(short(block.name, right - left), middle, y + 2 + BLOCK / 2, {
          size: 11,
          align: 'center',
          room: right - left - 8,
          keepEnd: true,
        });
      else if (middle - 12 > free && w > 3 && /\d$/.test(block.name) && middle + 12 < surface.width) {
        surface.label(block.name.split('.').pop(), middle, y + 2 + BLOCK / 2, {size: 10, align: 'center', room: 24});
        free = middle + 12;
      }
      this.drawn.push({
        x,
        y,
        w: Math.max(w, 2),
        h: BLOCK + 2,
        block,
        start: block.start + shift,
        end: block.end + shift,
      });
    });
  }
  drawBars(surface, bars, lane, shift) {
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
      if (!this.isOn(this.model.isBackward(bar.node))) continue;
      if (w < 1.5) {
        const pixel = Math.floor(x),
          last = seen.get(bar.row),
          plain = bar.kind === KIND.compute;
        if (last && last.pixel === pixel && (plain || !last.plain)) continue;
        seen.set(bar.row, {pixel, plain});
      }
      const y = top + rank.get(bar.row) * h,
        kind = this.model.kinds[bar.kind],
        strong = this.picked === bar.node || (this.pointed && this.pointed.bar === bar);
      if (w < 5 || h < 5) {
        ctx.fillStyle = bar.kind === KIND.compute ? '#a3aebb' : bar.kind === KIND.wait ? '#e4e9ef' : kind.stroke;
        ctx.fillRect(x, y, w, h < 5 ? Math.max(1, h - 0.8) : h - 2);
      } else
        this.barBox(surface, bar, x, y, w, h, strong);
      if (this.hits && this.hits(bar.node)) surface.box(x - 1, y, w + 2, h - 1, 3, null, INK, 2);
      const left = Math.max(x, LEFT),
        right = Math.min(x + w, surface.width - 8);
      if (h >= 14 && right - left > 14) this.inside(surface, this.barText(bar), left, right, y + h / 2);
      this.drawn.push({x, y, w, h: h - 1, node: bar.node, bar});
    }
  }
  // A text in a bar: whole, or cut where the bar has room for half a word.
  inside(surface, text, left, right, y) {
    const room = right - left - 8;
    if (room > 28 || surface.measure(text, `400 10.50px ${FONT}`) <= room)
      surface.label(text, left + 4, y, {size: 10.5, room});
  }
  barBox(surface, bar, x, y, w, h, strong) {
    const kind = this.model.kinds[bar.kind];
    const dash = bar.kind === KIND.wait ? [3, 3] : null;
    surface.box(x + 0.5, y + 1, w - 1, h - 3, 3, strong ? '#ffffff' : kind.fill, kind.stroke, strong ? 2.4 : 1, dash);
  }
  barText(bar) {
    if (bar.kind === KIND.wait) return 'wait';
    const box = this.model.atomOf(bar.node);
    return box && bar.kind !== KIND.compute ? box.title : this.model.shortOp(bar.node);
  }
  drawLives(surface, rows, shift) {
    const top = rows.y + 4 - surface.camera.y,
      kind = this.model.kinds[KIND.unshard];
    for (const life of this.line.lives) {
      const x = surface.sx(life.start + shift),
        w = Math.max(surface.sx(life.end + shift) - x, 1);
      if (x + w < LEFT + 1 || x > surface.width || !this.isOn(this.model.isBackward(life.node))) continue;
      const h = rows.bar,
        y = top + life.row * h,
        strong = this.pointed && this.pointed.life === life;
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
      if (h >= 14 && right - left > 34)
        this.inside(surface, `${life.unit || 'root'} \u00b7 ${bytesText(life.bytes)}`, left, right, y + h / 2 - 1);
      this.drawn.push({x, y, w, h: h - 1, life, node: life.node});
    }
  }
  drawMemory(surface, rows) {
    const {ctx} = surface,
      bottom = rows.y + rows.h - surface.camera.y,
      [, peak] = this.line.peak,
      scale = (rows.h - 26) / (peak || 1);
    const color = this.model.kinds[KIND.unshard];
    for (let m = 0; m < this.batches; m++) {
      const shift = m * this.line.length,
        points = this.line.memory;
      ctx.beginPath();
      ctx.moveTo(surface.sx(shift), bottom);
      points.forEach(([x, bytes], i) => {
        const next = i + 1 < points.length ? points[i + 1][0] : this.line.length;
        ctx.lineTo(surface.sx(x + shift), bottom - bytes * scale);
        ctx.lineTo(surface.sx(next + shift), bottom - bytes * scale);
      });
      ctx.lineTo(surface.sx(this.line.length + shift), bottom);
      ctx.fillStyle = color.fill;
      ctx.fill();
      ctx.strokeStyle = color.stroke;
      ctx.lineWidth = 1.2;
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
    surface.label(`peak ${bytesText(peak)}, ${this.when(this.line.peak[0])}`, LEFT + 10, y - 10, {
      size: 12,
      weight: 700,
      room: surface.width - LEFT - 30,
    });
  }
  drawAxis(surface, top) {
    const {ctx} = surface,
      y = top - surface.camera.y,
      k = surface.camera.k;
    const powers = [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];
    const steps = powers.flatMap(p => [1, 2, 5].map(s => s * 10 ** p));
    const step = steps.find(s => s * k > 90 && (this.line.times || s >= 1)) || steps[steps.length - 1];
    for (let m = 0; m < this.batches; m++)
      for (let x = 0; x < this.line.length; x += step) {
        const at = surface.sx(x + m * this.line.length);
        if (at < LEFT || at > surface.width - 70 || (m && x === 0) || (this.line.length - x) * k < 60) continue;
        ctx.fillStyle = FAINT;
        ctx.fillRect(at, y, 1, 5);
        surface.label(this.line.times ? unit(x, step) : x.toLocaleString('en'), at + 4, y + AXIS / 2, {
          size: 10.5,
          color: FAINT,
          room: 64,
        });
      }
  }
}
const unit = (ms, step) => (step < 0.1 ? `${Math.round(ms * 1e4) / 10} \u00b5s` : `${Math.round(ms * 100) / 100} ms`);
const short = (name, room) => (room < 60 ? name.split('.').pop() : name);
