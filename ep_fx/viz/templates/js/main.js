// Starts the page: tabs, toggles, keys, and the state in the address, so that a link can lead to one sight of it.
import {Model} from './model.js';
import {Tree} from './tree.js';
import {Structure} from './structure.js';
import {Schedule} from './schedule.js';
import {Passes} from './passes.js';
import {Details} from './details.js';
import {Search} from './search.js';
import {TextView} from './text.js';
import {legend} from './glyphs.js';

const byId = id => document.getElementById(id);
const model = new Model(JSON.parse(byId('data').textContent));
const details = new Details(model);
const options = {forward: true, backward: true, saved: false, order: false};
const hosts = Object.fromEntries(['structure', 'schedule', 'passes', 'text'].map(name => [name, byId(name)]));
const tree = new Tree(model);
const views = {};
const makers = {
  structure: () => new Structure(model, tree, options, details, hosts.structure),
  schedule: () => new Schedule(model, options, details, hosts.schedule),
  passes: () => new Passes(model, details, hosts.passes),
  text: () => new TextView(model.data, hosts.text),
};
let current = '';
let hitNodes = new Set();

function show(name) {
  current = name;
  for (const [other, host] of Object.entries(hosts)) host.hidden = other !== name;
  for (const tab of document.querySelectorAll('#tabs button')) tab.classList.toggle('on', tab.dataset.view === name);
  for (const part of document.querySelectorAll('[data-for]')) part.hidden = !part.dataset.for.split(' ').includes(name);
  views[name] = views[name] || makers[name]();
  details.unpin();
  details.hover(null);
  if (name === 'text') views.text.show();
  if (name === 'passes') views.passes.onStep = step => remember({step});
  mark();
  remember({view: name});
}
function redraw() {
  for (const view of Object.values(views)) if (view.surface) view.surface.redraw();
}
function mark() {
  if (views.structure) {
    const boxes = new Set([...hitNodes].map(i => views.structure.boxOfNode[i]));
    views.structure.hits = hitNodes.size ? box => boxes.has(box) : null;
  }
  if (views.schedule) views.schedule.hits = hitNodes.size ? i => hitNodes.has(i) : null;
  redraw();
}
function reveal(i) {
  const view = views[current];
  if (current === 'text') view.reveal(model.line(i));
  else view.reveal(i);
  mark();
}
function toggle(name) {
  const box = document.querySelector(`[data-option="${name}"]`);
  box.checked = options[name] = !options[name];
  redraw();
}

// ---- state in the address ----
// `#schedule` is short for `#view=schedule`.
function address() {
  const text = location.hash.slice(1);
  return new URLSearchParams(text in hosts ? {view: text} : text);
}
const state = address();
function remember(changes) {
  for (const [key, value] of Object.entries(changes)) state.set(key, value);
  history.replaceState(null, '', `#${state}`);
}
function restore() {
  const wanted = address();
  if (wanted.get('fold') === 'all') tree.setAll(false);
  if (wanted.get('fold') === 'none') tree.setAll(true);
  const names = wanted.get('open') ? wanted.get('open').split(',') : [];
  for (const name of names) for (let item = tree.groups.get(name); item; item = item.owner) item.open = true;
  show(wanted.get('view') in hosts ? wanted.get('view') : 'structure');
  const view = views[current];
  if (current === 'schedule' && wanted.has('batches')) setBatches(+wanted.get('batches'));
  if (current === 'schedule' && wanted.get('axis') === 'order') setTimes(false);
  if (current === 'schedule' && wanted.has('from'))
    requestAnimationFrame(() => view.show(+wanted.get('from'), +wanted.get('to')));
  if (view.goTo && wanted.has('at')) requestAnimationFrame(() => view.goTo(wanted.get('at')));
  if (current === 'passes' && wanted.has('step')) view.go(+wanted.get('step'));
  const node = wanted.get('node'),
    index = node ? model.columns.name.indexOf(node) : -1;
  if (index >= 0) requestAnimationFrame(() => reveal(index));
}

// ---- controls ----
for (const tab of document.querySelectorAll('#tabs button'))
  tab.addEventListener('click', () => show(tab.dataset.view));
for (const box of document.querySelectorAll('[data-option]'))
  box.addEventListener('change', () => {
    options[box.dataset.option] = box.checked;
    redraw();
  });
function fold(open) {
  tree.setAll(open);
  views.structure.relayout();
  mark();
}
byId('fold').addEventListener('click', () => fold(false));
byId('unfold').addEventListener('click', () => fold(true));
byId('layers').addEventListener('click', () => {
  tree.reset();
  views.structure.relayout();
  mark();
});
byId('fit').addEventListener('click', () => views[current].fit && views[current].fit());
function setBatches(count) {
  byId('batches').value = count;
  views.schedule.setBatches(Math.max(1, Math.min(8, count || 1)));
  remember({batches: count});
}
byId('batches').addEventListener('change', event => setBatches(+event.target.value));
function setTimes(use) {
  byId('times').checked = use;
  views.schedule.setTimes(use);
  views.schedule.fit();
  remember({axis: use ? 'time' : 'order'});
}
byId('times').addEventListener('change', event => setTimes(event.target.checked));
const search = new Search(model, reveal, hits => {
  hitNodes = hits;
  mark();
});
addEventListener('keydown', event => {
  if (event.target === search.input || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    '/': () => {
      search.input.focus();
      search.input.select();
    },
    f: () => toggle('forward'),
    b: () => toggle('backward'),
    s: () => toggle('saved'),
    o: () => toggle('order'),
    0: () => byId('fit').click(),
    Escape: () => details.unpin(),
    1: () => show('structure'),
    2: () => show('schedule'),
    3: () => show('passes'),
    4: () => show('text'),
  };
  if (current === 'passes' && views.passes.data) {
    keys.ArrowRight = () => views.passes.go(views.passes.step + 1);
    keys.ArrowLeft = () => views.passes.go(views.passes.step - 1);
  }
  const act = keys[event.key];
  if (!act || event.target.type === 'number') return;
  event.preventDefault();
  act();
});
addEventListener('hashchange', restore);
legend(model, byId('legend'));
restore();
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark('drawn')));

// What a test asks: the texts on the canvas in sight, and where its boxes stand.
window.epfx = {
  labels: () => (views[current].surface ? views[current].surface.labels : []),
  boxes: () => views.structure.scene.boxes,
  frames: () => views.structure.scene.frames,
  lives: () => views.structure.lives,
  drawn: () => views.schedule.drawn,
  screen: box => [
    views.structure.surface.sx(box.x + box.w / 2),
    views.structure.surface.sy(box.y + Math.min(box.h, 28) / 2) + 34,
  ],
  options,
  model,
  views,
};
