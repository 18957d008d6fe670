'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const views = [...document.querySelectorAll('.view')];
const panel = document.getElementById('details');
const lines = document.getElementById('lines');
const plain = lines.textContent;
let current = null, pinned = null;

// ---- views ----------------------------------------------------------------------------------------------------------
function show(name) {
  for (const view of views) view.hidden = view.dataset.view !== name;
  for (const tab of document.querySelectorAll('#tabs button')) tab.classList.toggle('on', tab.dataset.view === name);
  current = views.find(view => !view.hidden);
  unpin();
  find(document.getElementById('search').value);
}
const svgOf = () => current.querySelector('svg');
const boxes = svg => [...svg.querySelectorAll('[data-box]')];

// ---- pan and zoom ---------------------------------------------------------------------------------------------------
for (const svg of document.querySelectorAll('.view svg')) {
  const full = svg.viewBox.baseVal;
  svg.full = [full.x, full.y, full.width, full.height];
  svg.removeAttribute('width');
  svg.removeAttribute('height');
  svg.setAttribute('preserveAspectRatio', 'xMidYMin meet');
  let drag = null, moved = false;
  svg.addEventListener('wheel', event => {
    event.preventDefault();
    zoom(svg, Math.exp(event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX, event.clientY);
  }, {passive: false});
  svg.addEventListener('pointerdown', event => { drag = [event.clientX, event.clientY]; moved = false; });
  svg.addEventListener('pointermove', event => {
    if (!drag) return;
    const scale = svg.getScreenCTM().a, dx = event.clientX - drag[0], dy = event.clientY - drag[1];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    if (!moved) { moved = true; svg.setPointerCapture(event.pointerId); svg.classList.add('moving'); }
    svg.viewBox.baseVal.x -= dx / scale;
    svg.viewBox.baseVal.y -= dy / scale;
    drag = [event.clientX, event.clientY];
  });
  svg.addEventListener('pointerup', () => { drag = null; svg.classList.remove('moving'); });
  svg.addEventListener('click', event => {
    const box = event.target.closest('[data-box]');
    if (!moved) box ? pin(box) : unpin();
  });
  svg.addEventListener('pointerover', event => {
    const box = event.target.closest('[data-box]');
    if (box && !drag && !pinned) tell(box);
  });
  svg.addEventListener('pointerleave', () => { if (!pinned) panel.hidden = true; });
  for (const title of svg.querySelectorAll('.node > title')) title.remove();   // the panel says more
}
function zoom(svg, factor, clientX, clientY) {
  const at = new DOMPoint(clientX, clientY).matrixTransform(svg.getScreenCTM().inverse()), v = svg.viewBox.baseVal;
  v.x = at.x - (at.x - v.x) * factor;
  v.y = at.y - (at.y - v.y) * factor;
  v.width *= factor;
  v.height *= factor;
}
function frame(svg, x, y, width, height) {
  svg.setAttribute('viewBox', `${x} ${y} ${width} ${height}`);
}
function start(svg) {                                     // from the top, large enough to read
  const [x, y, width] = svg.full, ratio = svg.clientHeight / svg.clientWidth || 0.6;
  const shown = Math.min(width, 2000), first = svg.querySelector('[data-box]').getBBox();
  const left = Math.max(x, Math.min(first.x + first.width / 2 - shown / 2, x + width - shown));
  frame(svg, left, y + 40, shown, shown * ratio);
}

// ---- details --------------------------------------------------------------------------------------------------------
function tell(box) {
  const node = data[+current.dataset.view][+box.dataset.box];
  panel.replaceChildren();
  const add = (tag, text, name) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    panel.append(element);
  };
  add('h3', node.title);
  add('p', `${node.kind}, ${node.phase}${node.subtitle ? ' \u00b7 ' + node.subtitle : ''}`, 'sub');
  for (const [label, text] of node.details) {
    add('dt', label);
    add('dd', text, label === 'nodes' ? 'code' : '');
  }
  panel.style.borderLeftColor = node.color;
  panel.hidden = false;
}
function pin(box) {
  unpin();
  pinned = box;
  box.classList.add('picked');
  for (const edge of svgOf().querySelectorAll(`[data-from="${box.dataset.box}"],[data-to="${box.dataset.box}"]`))
    edge.classList.add('touched');
  tell(box);
}
function unpin() {
  if (pinned) pinned.classList.remove('picked');
  for (const edge of document.querySelectorAll('.touched')) edge.classList.remove('touched');
  pinned = null;
  panel.hidden = true;
}

// ---- search ---------------------------------------------------------------------------------------------------------
function find(query) {
  const wanted = query.trim().toLowerCase(), count = document.getElementById('hits');
  if (current.dataset.view === 'text') return findText(wanted, count);
  const svg = svgOf(), nodes = data[+current.dataset.view], hits = [];
  for (const box of boxes(svg)) {
    const node = nodes[+box.dataset.box];
    const all = [node.title, node.subtitle, ...node.members, ...node.details.flat()].join('\n').toLowerCase();
    const hit = wanted !== '' && all.includes(wanted.replace(/^%/, ''));
    box.classList.toggle('hit', hit);
    if (hit) hits.push(box);
  }
  svg.classList.toggle('dim', wanted !== '');
  count.textContent = wanted === '' ? '' : `${hits.length} box${hits.length === 1 ? '' : 'es'}`;
  return hits;
}
function findText(wanted, count) {
  lines.replaceChildren();
  const parts = wanted === '' ? [plain] : plain.split(new RegExp(`(${wanted.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')})`, 'i'));
  parts.forEach((part, index) => {
    if (index % 2 === 0) return lines.append(part);
    const mark = document.createElement('mark');
    mark.textContent = part;
    lines.append(mark);
  });
  count.textContent = wanted === '' ? '' : `${(parts.length - 1) / 2} places`;
  return [...lines.querySelectorAll('mark')];
}
let turn = 0;
const search = document.getElementById('search');
search.addEventListener('input', () => { turn = 0; find(search.value); });
search.addEventListener('keydown', event => {
  if (event.key !== 'Enter') return;
  const hits = find(search.value);
  if (!hits.length) return;
  const hit = hits[turn++ % hits.length];
  if (current.dataset.view === 'text') return hit.scrollIntoView({block: 'center'});
  const r = hit.getBBox(), svg = svgOf(), v = svg.viewBox.baseVal, width = Math.min(v.width, 1500), height = v.height * width / v.width;
  frame(svg, r.x + r.width / 2 - width / 2, r.y + r.height / 2 - height / 2, width, height);
  pin(hit);
});

// ---- controls -------------------------------------------------------------------------------------------------------
for (const tab of document.querySelectorAll('#tabs button')) tab.addEventListener('click', () => show(tab.dataset.view));
for (const box of document.querySelectorAll('[data-hide]'))
  box.addEventListener('change', () => document.body.classList.toggle(`hide-${box.dataset.hide}`, !box.checked));
const fit = () => { if (current.dataset.view !== 'text') frame(svgOf(), ...svgOf().full); };
document.getElementById('fit').addEventListener('click', fit);
addEventListener('keydown', event => {
  if (event.target === search) return;
  if (event.key === 'Escape') unpin();
  if (event.key === '0') fit();
  if (event.key === '/') { event.preventDefault(); search.focus(); }
});
for (const view of views.filter(v => v.querySelector('svg'))) {
  view.hidden = false;
  start(view.querySelector('svg'));
  view.hidden = true;
}
show('0');
