// The second view: when. Lanes from left to right, under them the life of every gathered unit and the memory they take.
import {KIND, bytesText, msText} from './model.js';
import {Timeline} from './timeline.js';
import {FAINT, Surface} from './surface.js';
import {infoOfNode} from './details.js';
import {AXIS, BAND, BAR, BLOCK, LANE, LEFT, LIFE, MEMORY, TOP} from './lanes.js';
import {drawAxis, drawBand, drawBars, drawBlocks, drawLives, drawMemory, names, rules} from './lanes.js';

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
  // Shows the first part of the step in which the block `name` runs.
  goTo(name) {
    const block = this.line.blocks.find(other => other.name === name);
    if (block) this.show(block.start, block.end);
  }
  // ---- rows ----
  rows() {
    let y = TOP + BAND + BLOCK + 14;
    const lanes = this.line.lanes
      .map((_, n) => this.line.bars[n])
      .map(bars => {
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
      drawBand(this, surface, rows, m, shift);
    }
    rules(this, surface, rows);
    for (let m = 0; m < this.batches; m++) {
      const shift = m * this.line.length;
      drawBlocks(this, surface, shift);
      rows.lanes.forEach((row, n) => drawBars(this, surface, this.line.bars[n], row, shift));
      drawLives(this, surface, rows.life, shift);
    }
    drawMemory(this, surface, rows.memory);
    drawAxis(this, surface, rows.axis);
    ctx.restore();
    names(this, surface, rows);
  }
}
