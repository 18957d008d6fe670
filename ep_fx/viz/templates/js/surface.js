// A canvas with a camera: drag and wheel move it, the view draws what is in sight. Every text goes through `label`,
// which cuts it to its room and notes where it stands, so that a test can ask whether two texts meet.

export const FONT = "'Inter', 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif";
export const INK = '#0f172a';
export const FAINT = '#4b5666';
export const LINE = '#d5dce5';

export class Surface {
  // view: draw(surface), hit(x, y), over(target, event), click(target), limit(surface); zoomX: zoom in x only.
  constructor(host, view, {zoomX = false} = {}) {
    this.host = host;
    this.view = view;
    this.zoomX = zoomX;
    this.canvas = document.createElement('canvas');
    host.append(this.canvas);
    this.ctx = this.canvas.getContext('2d');
    this.camera = {x: 0, y: 0, k: 1};
    this.labels = [];
    this.widths = new Map();
    this.pending = false;
    this.listen();
    new ResizeObserver(() => this.resize()).observe(host);
    this.resize();
  }
  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.host.clientWidth;
    this.height = this.host.clientHeight;
    this.canvas.width = Math.max(1, this.width * ratio);
    this.canvas.height = Math.max(1, this.height * ratio);
    this.ratio = ratio;
    if (this.width && this.view.resized) this.view.resized(this);
    this.redraw();
  }
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }
  draw() {
    if (!this.width) return;
    this.ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.ctx.clearRect(0, 0, this.width, this.height);
    this.labels = [];
    this.clipTop = 0;
    this.view.draw(this);
  }
  // ---- camera ----
  sx(x) {
    return (x - this.camera.x) * this.camera.k;
  }
  sy(y) {
    return this.zoomX ? y - this.camera.y : (y - this.camera.y) * this.camera.k;
  }
  wx(x) {
    return x / this.camera.k + this.camera.x;
  }
  wy(y) {
    return this.zoomX ? y + this.camera.y : y / this.camera.k + this.camera.y;
  }
  zoom(factor, px, py) {
    const x = this.wx(px),
      y = this.wy(py),
      {camera} = this;
    camera.k *= factor;
    if (this.view.limit) this.view.limit(this);
    camera.x = x - px / camera.k;
    if (!this.zoomX) camera.y = y - py / camera.k;
    this.moved();
  }
  move(dx, dy) {
    this.camera.x += dx / this.camera.k;
    this.camera.y += this.zoomX ? dy : dy / this.camera.k;
    this.moved();
  }
  moved() {
    if (this.view.limit) this.view.limit(this);
    this.redraw();
  }
  listen() {
    let drag = null,
      far = false;
    const at = event => {
      const r = this.canvas.getBoundingClientRect();
      return [event.clientX - r.left, event.clientY - r.top];
    };
    this.canvas.addEventListener(
      'wheel',
      event => {
        event.preventDefault();
        const [x, y] = at(event);
        if (
          event.ctrlKey ||
          event.metaKey ||
          (this.zoomX && !event.shiftKey && Math.abs(event.deltaY) >= Math.abs(event.deltaX))
        )
          this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0018)), x, y);
        else this.move(event.deltaX || (event.shiftKey ? event.deltaY : 0), event.shiftKey ? 0 : event.deltaY);
      },
      {passive: false},
    );
    this.canvas.addEventListener('pointerdown', event => {
      drag = at(event);
      far = false;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener('pointermove', event => {
      const [x, y] = at(event);
      if (!drag) return this.view.over(this.view.hit(x, y), event);
      if (!far && Math.hypot(x - drag[0], y - drag[1]) < 4) return;
      far = true;
      this.move(drag[0] - x, drag[1] - y);
      drag = [x, y];
    });
    this.canvas.addEventListener('pointerup', event => {
      const [x, y] = at(event);
      if (drag && !far) this.view.click(this.view.hit(x, y), event, x, y);
      drag = null;
    });
    this.canvas.addEventListener('pointerleave', event => this.view.over(null, event));
  }
  // ---- texts and shapes, in pixels of the screen ----
  measure(text, font) {
    const key = font + text;
    let width = this.widths.get(key);
    if (width === undefined) {
      this.ctx.font = font;
      width = this.ctx.measureText(text).width;
      if (this.widths.size > 20000) this.widths.clear();
      this.widths.set(key, width);
    }
    return width;
  }
  // Draws `text` with its middle line at y, cut to `room`; returns the width drawn, 0 where there is no room.
  label(text, x, y, {size = 12, weight = 400, color = INK, align = 'left', room = Infinity, keepEnd = false} = {}) {
    if (size < 6.5 || !text || y - size / 2 < this.clipTop) return 0; // half hidden is worse than hidden
    const font = `${weight} ${size.toFixed(2)}px ${FONT}`,
      shown = this.fit(text, font, room, keepEnd);
    if (!shown) return 0;
    const width = this.measure(shown, font),
      {ctx} = this;
    ctx.font = font;
    ctx.fillStyle = color;
    ctx.textAlign = align;
    ctx.textBaseline = 'middle';
    ctx.fillText(shown, x, y);
    const left = align === 'center' ? x - width / 2 : align === 'right' ? x - width : x;
    const box = {text: shown, x: left, y: y - size * 0.5, w: width, h: size};
    if (box.x + box.w > 0 && box.x < this.width && box.y + box.h > 0 && box.y < this.height) this.labels.push(box);
    return width;
  }
  fit(text, font, room, keepEnd) {
    if (this.measure(text, font) <= room) return text;
    let low = 0,
      high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.measure(shortTo(text, middle, keepEnd), font) <= room) low = middle;
      else high = middle - 1;
    }
    return low < Math.min(2, text.length) ? '' : shortTo(text, low, keepEnd);
  }
  box(x, y, w, h, radius, fill, stroke, line = 1.2, dash = null) {
    const {ctx} = this;
    ctx.beginPath();
    ctx.roundRect(x, y, Math.max(w, 0.5), Math.max(h, 0.5), Math.max(0, Math.min(radius, w / 2, h / 2)));
    if (fill) {
      ctx.fillStyle = fill;
      ctx.fill();
    }
    if (!stroke) return;
    ctx.lineWidth = line;
    ctx.strokeStyle = stroke;
    ctx.setLineDash(dash || []);
    ctx.stroke();
    ctx.setLineDash([]);
  }
}

// The first `count` characters of a text, or the last, without the dot that would come first.
function shortTo(text, count, keepEnd) {
  return keepEnd ? `\u2026${text.slice(-count).replace(/^\./, '')}` : `${text.slice(0, count)}\u2026`;
}
