// The first view: what talks to what. Nested modules that fold; forward left, backward right; contexts between them.
import {EDGE, KIND, plural} from './model.js';
import {WIDTH, layOut} from './layout.js';
import {arrowsOf, boxesOfNodes, colorOf, isShown} from './edges.js';
import {FAINT, FONT, INK, LINE, Surface} from './surface.js';
import {drawGlyph, hasGlyph} from './glyphs.js';
import {infoOfAtom, infoOfGroup} from './details.js';

const HEAD = 34;
const COLUMNS = [
  ['gathers \u00b7 frees', 184],
  ['forward \u2193', 502],
  ['contexts', 790],
  ['backward \u2191', 1078],
  ['gathers \u00b7 reductions', 1396],
];
const TINTS = ['#ffffff', '#f6f8fb', '#eef2f7', '#e7ecf3'];

export class Structure {
  constructor(model, tree, options, details, host) {
    Object.assign(this, {model, tree, options, details});
    this.pointed = this.picked = null;
    this.surface = new Surface(host, this);
    this.relayout();
  }
  relayout(keep = null) {
    const before = keep && this.screenOf(keep);
    this.scene = layOut(this.tree);
    this.boxOfNode = boxesOfNodes(this.model, this.tree, this.scene);
    this.arrows = arrowsOf(this.model, this.boxOfNode);
    this.pointed = null;
    const after = keep && this.screenOf(keep);
    if (before !== null && after !== null && keep) this.surface.camera.y += (after - before) / this.surface.camera.k;
    this.surface.moved();
  }
  // Where a group's upper edge stands on the screen, null where it is not shown.
  screenOf(item) {
    if (!this.scene) return null;
    const frame = this.scene.frames.find(f => f.item === item),
      boxes = this.scene.boxOf.get(item);
    const box = frame || (boxes && (boxes[0] || boxes[1]));
    return box ? this.surface.sy(box.y) : null;
  }
  resized(surface) {
    if (!this.sized) surface.camera.k = surface.width / WIDTH;
    this.sized = true;
  }
  limit(surface) {
    const {camera} = surface,
      fit = surface.width / WIDTH;
    camera.k = Math.max(Math.min(fit, 0.3), Math.min(camera.k, 4));
    const over = WIDTH - surface.width / camera.k;
    camera.x = over < 0 ? over / 2 : Math.max(0, Math.min(camera.x, over));
    const height = (surface.height - HEAD) / camera.k,
      most = this.scene ? this.scene.height - height : 0;
    camera.y = Math.max(0, Math.min(camera.y, Math.max(0, most)));
  }
  fit() {
    const {surface} = this,
      {camera} = surface;
    camera.k = Math.min(surface.width / WIDTH, Math.max(0.3, (surface.height - HEAD) / this.scene.height));
    camera.y = 0;
    surface.moved();
  }
  reveal(i) {
    this.tree.reveal(i);
    this.relayout();
    const box = this.boxOfNode[i],
      {surface} = this;
    this.picked = box;
    surface.camera.k = Math.max(surface.camera.k, surface.width / WIDTH);
    surface.camera.y = box.y + box.h / 2 - (surface.height - HEAD) / 2 / surface.camera.k;
    surface.moved();
    this.details.pin(this.infoOf(box));
  }
  // ---- pointer ----
  hit(x, y) {
    if (y < HEAD) return null;
    const wx = this.surface.wx(x),
      wy = this.surface.wy(y - HEAD);
    const inside = b => wx >= b.x && wx <= b.x + b.w && wy >= b.y && wy <= b.y + b.h && this.isOn(b);
    for (let n = this.scene.boxes.length - 1; n >= 0; n--) if (inside(this.scene.boxes[n])) return this.scene.boxes[n];
    const frames = this.scene.frames.filter(f => inside(f) && wy <= f.y + 28);
    return frames.length ? frames[frames.length - 1] : null;
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
      this.picked = null;
      this.details.unpin();
      this.surface.redraw();
      return;
    }
    if (target.type === 'leaf') {
      this.picked = target;
      this.details.pin(this.infoOf(target));
      this.surface.redraw();
      return;
    }
    target.item.open = !target.item.open;
    this.picked = null;
    this.details.hover(null);
    this.relayout(target.item);
  }
  infoOf(box) {
    const {item} = box;
    if (item.type === 'atom') return infoOfAtom(this.model, item, box.backward);
    if (item.type === 'run') {
      const nodes = item.items.flatMap(atom => atom.nodes);
      return {
        ...infoOfAtom(this.model, {...item, nodes}, box.backward),
        hint: item.open ? 'click to fold' : 'click to open',
      };
    }
    return infoOfGroup(this.model, item, box.backward);
  }
  isOn(box) {
    if (box.backward === undefined) return box.type === 'frame';
    return box.backward ? this.options.backward : this.options.forward;
  }
  // ---- drawing ----
  draw(surface) {
    const {ctx, camera} = surface,
      k = camera.k;
    const screen = b => ({x: surface.sx(b.x), y: surface.sy(b.y) + HEAD, w: b.w * k, h: b.h * k});
    const top = camera.y,
      bottom = camera.y + (surface.height - HEAD) / k,
      seen = b => b.y < bottom && b.y + b.h > top;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, HEAD, surface.width, surface.height - HEAD);
    ctx.clip();
    surface.clipTop = HEAD;
    for (const frame of this.scene.frames) if (seen(frame)) this.drawFrame(surface, frame, screen(frame));
    const focus = this.pointed || this.picked;
    const lit = arrow => focus && focus.id !== undefined && (arrow.a === focus || arrow.b === focus);
    this.drawLives(surface);
    for (const arrow of this.arrows)
      if (arrow.top < bottom && arrow.bottom > top && isShown(arrow, this.options) && !lit(arrow))
        this.drawArrow(surface, arrow, false);
    for (const frame of this.scene.frames) if (seen(frame)) this.drawTitle(surface, frame, screen(frame));
    for (const box of this.scene.boxes) if (seen(box) && this.isOn(box)) this.drawBox(surface, box, screen(box));
    for (const arrow of this.arrows)
      if (lit(arrow) && this.isOn(arrow.a) && this.isOn(arrow.b)) this.drawArrow(surface, arrow, true);
    ctx.restore();
    surface.clipTop = 0;
    this.drawHead(surface);
  }
  drawHead(surface) {
    const {ctx} = surface;
    ctx.fillStyle = '#ffffff';
    ctx.fillRect(0, 0, surface.width, HEAD);
    ctx.fillStyle = LINE;
    ctx.fillRect(0, HEAD - 1, surface.width, 1);
    const room = 190 * surface.camera.k;
    for (const [text, x] of COLUMNS)
      surface.label(text, surface.sx(x), HEAD / 2, {size: 13, weight: 700, align: 'center', room});
  }
  drawFrame(surface, frame, r) {
    surface.box(r.x, r.y, r.w, r.h, 9 * surface.camera.k, tintOf(frame), frame === this.pointed ? INK : '#c3ccd8', 1);
  }
  drawTitle(surface, frame, r) {
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
  drawBox(surface, box, r) {
    const k = surface.camera.k,
      kind = this.model.kinds[box.kind],
      {ctx} = surface;
    const strong = box === this.pointed || box === this.picked,
      dash = box.kind === KIND.reshard || box.kind === KIND.wait ? [4, 3] : null;
    if (box.item.type === 'alike' && box.type === 'fold')
      for (const n of [2, 1]) surface.box(r.x + n * 4 * k, r.y + n * 4 * k, r.w, r.h, 6 * k, '#ffffff', kind.stroke, 1);
    const fold = box.type === 'fold',
      hit = this.hits && this.hits(box);
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
    const right = fold && box.item.half ? this.drawInside(surface, box, r) : r.x + r.w;
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
    surface.label(box.title, left, r.y + r.h / 2 - 7.5 * k, {size: 12 * k, weight: 600, room, keepEnd: box.lane === 0});
    surface.label(box.sub, left, r.y + r.h / 2 + 8 * k, {size: 10.5 * k, color: FAINT, room});
  }
  // A band from each gather to its free: the time in which the whole weights are in memory.
  drawLives(surface) {
    const {
        ctx,
        camera: {k},
      } = surface,
      open = new Map();
    for (const box of this.scene.boxes) {
      if (box.type !== 'leaf' || (box.kind !== KIND.unshard && box.kind !== KIND.reshard) || !this.isOn(box)) continue;
      const key = `${box.item.path} ${box.backward}`,
        other = open.get(key);
      if (!other || other.kind === box.kind) {
        open.set(key, box);
        continue;
      }
      open.delete(key);
      if (
        Math.max(other.y, box.y) < surface.camera.y ||
        Math.min(other.y, box.y) > surface.camera.y + surface.height / k
      )
        continue;
      const [above, below] = other.y < box.y ? [other, box] : [box, other],
        x = box.backward ? box.x + box.w - 18 : box.x + 6;
      ctx.fillStyle = this.model.kinds[KIND.unshard].stroke;
      ctx.globalAlpha = 0.22;
      ctx.fillRect(surface.sx(x), surface.sy(above.y + above.h) + HEAD, 12 * k, (below.y - above.y - above.h) * k);
      ctx.globalAlpha = 1;
    }
  }
  // The exchanges inside a folded group, on the right of its box; returns where they begin.
  drawInside(surface, box, r) {
    const k = surface.camera.k,
      half = box.item.half[+box.backward];
    let x = r.x + r.w - 8 * k;
    for (const kind of [KIND.combine, KIND.dispatch]) {
      const count = half.kinds[kind];
      if (!count) continue;
      x -= surface.label(String(count), x, r.y + r.h / 2, {size: 11 * k, weight: 600, align: 'right'}) + 11 * k;
      drawGlyph(surface.ctx, kind, x, r.y + r.h / 2, 5 * k, this.model.kinds[kind].stroke);
      x -= 14 * k;
    }
    return x;
  }
  drawArrow(surface, arrow, lit) {
    const {ctx} = surface,
      p = arrow.points,
      at = n => [surface.sx(p[n]), surface.sy(p[n + 1]) + HEAD];
    const [x0, y0] = at(0),
      [x1, y1] = at(2),
      [x2, y2] = at(4),
      [x3, y3] = at(6);
    ctx.strokeStyle = ctx.fillStyle = lit && arrow.kind === EDGE.data ? INK : colorOf(arrow, this.model);
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
