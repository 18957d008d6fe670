// The first view: what talks to what. Nested modules that fold; forward left, backward right; contexts between them.
import {WIDTH, layOut} from './layout.js';
import {arrowsOf, boxesOfNodes, isShown} from './edges.js';
import {livesOf} from './lives.js';
import {Surface} from './surface.js';
import {infoOfAtom, infoOfGroup} from './details.js';
import {HEAD, drawArrow, drawBox, drawFrame, drawHead, drawLives, drawTitle} from './paint.js';

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
    this.lives = livesOf(this.tree, this.boxOfNode, this.scene.height);
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
  // Brings the module `path` to the top.
  goTo(path) {
    const item = this.tree.groups.get(path);
    if (!item) return;
    for (let up = item; up; up = up.owner) up.open = true;
    this.relayout();
    this.surface.camera.y = this.scene.frames.find(frame => frame.item === item).y - 8;
    this.surface.moved();
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
    for (const frame of this.scene.frames) if (seen(frame)) drawFrame(this, surface, frame, screen(frame));
    const focus = this.pointed || this.picked;
    const lit = arrow => focus && focus.id !== undefined && (arrow.a === focus || arrow.b === focus);
    drawLives(this, surface);
    for (const arrow of this.arrows)
      if (arrow.top < bottom && arrow.bottom > top && isShown(arrow, this.options) && !lit(arrow))
        drawArrow(this, surface, arrow, false);
    for (const frame of this.scene.frames) if (seen(frame)) drawTitle(this, surface, frame, screen(frame));
    for (const box of this.scene.boxes) if (seen(box) && this.isOn(box)) drawBox(this, surface, box, screen(box));
    for (const arrow of this.arrows)
      if (lit(arrow) && this.isOn(arrow.a) && this.isOn(arrow.b)) drawArrow(this, surface, arrow, true);
    ctx.restore();
    surface.clipTop = 0;
    drawHead(this, surface);
  }
}
