// One search over all views: names, operators, modules, parameters, kinds. Enter goes to the next hit.

const MOST = 12;

export class Search {
  constructor(model, onGo, onHits) {
    Object.assign(this, {model, onGo, onHits});
    this.input = document.getElementById('search');
    this.list = document.getElementById('hits');
    this.count = document.getElementById('hit-count');
    this.hits = [];
    this.turn = -1;
    this.input.addEventListener('input', () => this.find());
    this.input.addEventListener('keydown', event => this.key(event));
    this.input.addEventListener('blur', () =>
      setTimeout(() => {
        this.list.hidden = true;
      }, 150),
    );
    this.input.addEventListener('focus', () => this.show());
  }
  find() {
    this.hits = this.model.find(this.input.value);
    this.turn = -1;
    this.count.textContent = this.input.value.trim() ? `${this.hits.length.toLocaleString('en')} found` : '';
    this.onHits(new Set(this.hits));
    this.show();
  }
  show() {
    const start = Math.max(0, Math.min(this.turn - 5, this.hits.length - MOST));
    this.list.replaceChildren(...this.hits.slice(start, start + MOST).map((i, n) => this.entry(i, start + n)));
    this.list.hidden = !this.hits.length || document.activeElement !== this.input;
  }
  entry(i, n) {
    const item = document.createElement('li'),
      name = document.createElement('b'),
      where = document.createElement('span');
    name.textContent = `%${this.model.name(i)}`;
    const half = this.model.isBackward(i) ? 'backward' : 'forward';
    where.textContent = [this.model.shortOp(i), this.model.path(i) || 'model', half].join(' \u00b7 ');
    item.append(name, where);
    item.classList.toggle('on', n === this.turn);
    item.addEventListener('pointerdown', event => {
      event.preventDefault();
      this.go(n);
    });
    return item;
  }
  key(event) {
    if (event.key === 'Escape') {
      this.input.value = '';
      this.find();
      this.input.blur();
    }
    const step = {Enter: event.shiftKey ? -1 : 1, ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!step || !this.hits.length) return;
    event.preventDefault();
    this.go((this.turn + step + this.hits.length) % this.hits.length);
  }
  go(n) {
    this.turn = n;
    this.show();
    this.onGo(this.hits[n]);
  }
}
