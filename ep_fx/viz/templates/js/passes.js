// The third view: what did this pass change. A slider over the pipeline; the order before and after as two strips with
// what became of each stretch between them; under it what was added, removed and moved, by module and node by node.
import {msText, plural} from './model.js';
import {Surface} from './surface.js';
import {Ribbon} from './ribbon.js';

const MOST_ROWS = 400;

export class Passes {
  constructor(model, details, host) {
    Object.assign(this, {model, details, host});
    this.data = model.data.passes;
    this.step = 0;
    if (!this.data) return this.empty();
    this.unpack();
    this.slider = host.querySelector('#step');
    this.slider.max = this.data.records.length;
    this.slider.addEventListener('input', () => this.go(+this.slider.value));
    this.ribbon = new Ribbon(this);
    this.surface = new Surface(host.querySelector('#ribbon'), this.ribbon, {zoomX: true});
    this.ribbon.surface = this.surface;
    this.makeStops();
    host.querySelector('#changes').addEventListener('pointerover', event => this.point(event));
    this.go(this.mostChanging());
  }
  empty() {
    const note = document.createElement('p');
    note.className = 'empty';
    note.textContent =
      'No passes are recorded with this picture: it was made from a graph alone. ' +
      'module.visualize("graph.html") after a transform records them.';
    this.host.replaceChildren(note);
  }
  // Notes by number, and orders as lists of numbers.
  unpack() {
    const {data, model} = this,
      gone = [...data.gone],
      texts = model.data.strings;
    this.notes = data.place.map(place => {
      if (place >= 0)
        return {
          name: model.name(place),
          op: model.op(place),
          path: model.path(place),
          backward: model.isBackward(place),
          kind: model.kind(place),
          node: place,
        };
      const [name, op, path, backward, kind] = gone.shift();
      return {name, op: texts[op], path: texts[path], backward: backward === 1, kind, node: -1};
    });
    this.orders = data.orders.map(runs => {
      const order = [];
      for (let r = 0; r < runs.length; r += 2) for (let n = 0; n < runs[r + 1]; n++) order.push(runs[r] + n);
      return order;
    });
    this.changes = data.records.map((_, k) => {
      const before = new Set(this.orders[k]),
        after = new Set(this.orders[k + 1]);
      return {
        added: this.orders[k + 1].filter(n => !before.has(n)),
        removed: this.orders[k].filter(n => !after.has(n)),
        moved: data.moved[k],
      };
    });
  }
  mostChanging() {
    const sizes = this.changes.map(c => c.added.length + c.removed.length + c.moved.length);
    return sizes.length ? sizes.indexOf(Math.max(...sizes)) + 1 : 0;
  }
  makeStops() {
    const host = this.host.querySelector('#stops'),
      records = this.data.records;
    const most = Math.max(...records.map(r => r[1] + r[2]), 0.001);
    const stop = (title, sub, share, n) => {
      const button = document.createElement('button'),
        bar = document.createElement('i');
      const name = document.createElement('b'),
        note = document.createElement('small');
      name.textContent = title;
      note.textContent = sub;
      bar.style.width = `${Math.max(share * 100, n ? 2 : 0)}%`;
      button.append(name, note, bar);
      button.addEventListener('click', () => this.go(n));
      host.append(button);
    };
    stop('captured', plural(this.orders[0].length, 'node'), 0, 0);
    records.forEach((r, k) =>
      stop(`${k + 1}  ${r[0]}`, `${msText(r[1])} + ${msText(r[2])} check`, (r[1] + r[2]) / most, k + 1),
    );
  }
  go(step) {
    if (!this.data) return;
    this.step = Math.max(0, Math.min(step, this.data.records.length));
    this.slider.value = this.step;
    [...this.host.querySelectorAll('#stops button')].forEach((button, n) =>
      button.classList.toggle('on', n === this.step),
    );
    this.headline();
    this.table();
    this.list();
    this.ribbon.reset();
    this.surface.redraw();
    if (this.onStep) this.onStep(this.step);
  }
  headline() {
    const host = this.host.querySelector('#verdict');
    if (!this.step) {
      host.textContent =
        `As captured: ${plural(this.orders[0].length, 'node')}, before any pass. ` +
        `Move the slider, or press \u2192.`;
      return;
    }
    const [name, ms, check, added, removed, moved] = this.data.records[this.step - 1];
    const change =
      added + removed + moved
        ? `added ${count(added)}, removed ${count(removed)}, moved ${count(moved)}`
        : 'changed nothing';
    host.textContent =
      `${name} ${change}; ${plural(this.orders[this.step - 1].length, 'node')} became ` +
      `${count(this.orders[this.step].length)}. ` +
      `${msText(ms)}, and ${msText(check)} to check the rules.`;
  }
  // ---- tables ----
  table() {
    const rows = new Map(),
      change = this.step ? this.changes[this.step - 1] : {added: [], removed: [], moved: []};
    for (const word of ['added', 'removed', 'moved'])
      for (const n of change[word]) {
        const note = this.notes[n],
          module = (note.path || 'model').replace(/(^|\.)\d+(?=\.|$)/g, '$1*'),
          op = note.op.split('::').pop();
        const key = `${note.backward ? 'backward' : 'forward'}|${module}|${op}`;
        if (!rows.has(key)) rows.set(key, {added: 0, removed: 0, moved: 0, kind: note.kind});
        rows.get(key)[word]++;
      }
    const sorted = [...rows].sort((a, b) => total(b[1]) - total(a[1])),
      most = Math.max(1, ...sorted.map(([, r]) => total(r)));
    this.fill(
      '#by-module',
      sorted.slice(0, MOST_ROWS).map(([key, row]) => {
        const [phase, module, op] = key.split('|');
        return [
          cell(op, this.swatch(row.kind)),
          cell(module),
          cell(phase),
          ...['added', 'removed', 'moved'].map(word => number(row[word], word)),
          bar(row, most),
        ];
      }),
      this.step ? 'This pass changed nothing.' : 'Nothing has run yet.',
    );
  }
  list() {
    const change = this.step ? this.changes[this.step - 1] : {added: [], removed: [], moved: []};
    const all = ['removed', 'added', 'moved'].flatMap(word => change[word].map(n => [word, n]));
    this.host.querySelector('#count').textContent =
      all.length > MOST_ROWS
        ? `the first ${MOST_ROWS} of ${all.length.toLocaleString('en')} nodes`
        : plural(all.length, 'node');
    this.fill(
      '#nodes',
      all.slice(0, MOST_ROWS).map(([word, n]) => {
        const note = this.notes[n],
          name = cell(`%${note.name}`, this.swatch(note.kind));
        name.dataset.number = n;
        return [badge(word), name, cell(note.op.split('::').pop()), cell(note.path || 'model')];
      }),
      '',
    );
  }
  fill(selector, rows, nothing) {
    const body = this.host.querySelector(`${selector} tbody`);
    body.replaceChildren(
      ...rows.map(cells => {
        const tr = document.createElement('tr');
        tr.append(...cells);
        return tr;
      }),
    );
    if (!rows.length && nothing) {
      const tr = document.createElement('tr'),
        td = cell(nothing);
      td.colSpan = 7;
      tr.append(td);
      body.append(tr);
    }
  }
  swatch(kind) {
    const mark = document.createElement('i');
    mark.className = 'swatch';
    mark.style.background = this.model.kinds[kind].fill;
    mark.style.borderColor = this.model.kinds[kind].stroke;
    return mark;
  }
  point(event) {
    const td = event.target.closest('[data-number]'),
      number = td ? +td.dataset.number : -1;
    if (this.ribbon.pointedNumber !== number) {
      this.ribbon.pointedNumber = number;
      this.surface.redraw();
    }
  }
  reveal(i) {
    const number = this.data ? this.data.place.indexOf(i) : -1;
    if (number < 0) return;
    this.ribbon.pointedNumber = number;
    const step = this.changes.findIndex(c => c.added.includes(number) || c.moved.includes(number)) + 1;
    if (step) this.go(step);
    this.surface.redraw();
  }
}
const count = number => number.toLocaleString('en');
const total = row => row.added + row.removed + row.moved;
function cell(text, before) {
  const td = document.createElement('td');
  if (before) td.append(before);
  td.append(text);
  td.title = text;
  return td;
}
function number(count, word) {
  const td = cell(
    count ? `${{added: '+', removed: '\u2212', moved: '\u2195'}[word]}${count.toLocaleString('en')}` : '',
  );
  td.className = `n ${word}`;
  return td;
}
function badge(word) {
  const td = cell(word);
  td.className = `word ${word}`;
  return td;
}
function bar(row, most) {
  const td = document.createElement('td');
  td.className = 'bars';
  for (const word of ['added', 'removed', 'moved']) {
    const part = document.createElement('i');
    part.className = word;
    part.style.width = `${(row[word] / most) * 100}%`;
    td.append(part);
  }
  return td;
}
