// What is known of a node, a box or a group: beside the pointer while it hovers, in a panel once it is picked.
import {KIND, bytesText, plural} from './model.js';

const MOST_LINES = 60;

// Rows [label, text] about the nodes that a box stands for; `main` is the one it is named for.
export function about(model, nodes, main) {
  const rows = [],
    list = column => [...new Set(nodes.map(i => model.text(column, i)).filter(Boolean))];
  const some = (items, most = 6) =>
    items.slice(0, most).join(', ') + (items.length > most ? `, and ${items.length - most} more` : '');
  const put = (label, text) => {
    if (text) rows.push([label, text]);
  };
  const {ins} = model.neighbours();
  put('name', nodes.length === 1 ? `%${model.name(main)}` : plural(nodes.length, 'node'));
  put('operator', nodes.length === 1 ? model.op(main) : some([...new Set(nodes.map(i => model.shortOp(i)))]));
  const shapes = nodes.length === 1 ? ins[main].map(e => model.type(model.edges.from[e])).filter(Boolean) : [];
  put('takes', some(shapes, 4));
  put('gives', model.type(main));
  put('module', model.path(main));
  put('source', some(list('source'), 3));
  const groups = list('group');
  put('group', groups.length ? `over ${groups.join(' and ')}` : '');
  put('bytes', bytesOf(model, nodes, main));
  put('parameters', some([...new Set(list('params').flatMap(text => text.split(', ')))], 8));
  put('phase', model.isBackward(main) ? 'backward' : 'forward');
  return rows;
}

function bytesOf(model, nodes, main) {
  const sending = nodes.filter(i => model.columns.group[i]),
    sizes = (sending.length ? sending : [main]).map(i => model.bytes(i));
  if (sizes.every(size => typeof size === 'number')) {
    const total = sizes.reduce((a, b) => a + b, 0);
    return total ? bytesText(total) + (sending.length ? ' moved' : '') : '';
  }
  return `${[...new Set(sizes)].slice(0, 2).join(' + ')} B${sending.length ? ' moved' : ''}`;
}

export class Details {
  constructor(model) {
    this.model = model;
    this.tip = document.getElementById('tip');
    this.panel = document.getElementById('details');
    document.getElementById('details-close').addEventListener('click', () => this.unpin());
    this.body = document.getElementById('details-body');
  }
  hover(info, event) {
    this.tip.hidden = !info;
    if (!info) return;
    this.fill(this.tip, info, false);
    const width = this.tip.offsetWidth,
      height = this.tip.offsetHeight;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 16, innerWidth - width - 8))}px`;
    const below = event.clientY + 18 + height < innerHeight;
    this.tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - height - 12)}px`;
  }
  pin(info) {
    this.fill(this.body, info, true);
    this.panel.style.borderLeftColor = info.color;
    this.panel.hidden = false;
    this.tip.hidden = true;
  }
  unpin() {
    this.panel.hidden = true;
  }
  // info: title, sub, color, rows, and nodes for the panel's lines of the text form
  fill(host, info, lines) {
    const make = (tag, text, name) => {
      const element = document.createElement(tag);
      element.textContent = text;
      if (name) element.className = name;
      return element;
    };
    const table = document.createElement('dl');
    for (const [label, text] of info.rows) table.append(make('dt', label), make('dd', text));
    host.replaceChildren(make('h3', info.title), ...(info.sub ? [make('p', info.sub, 'sub')] : []), table);
    if (info.hint && !lines) host.append(make('p', info.hint, 'hint'));
    if (!lines || !info.nodes) return;
    const shown = info.nodes
      .slice(0, MOST_LINES)
      .map(i => this.model.line(i))
      .filter(Boolean);
    if (shown.length) host.append(make('pre', shown.join('\n'), 'code'));
  }
}

export function infoOfNode(model, i) {
  const kind = model.kinds[model.kind(i)];
  return {
    title: `%${model.name(i)}`,
    sub: kind.legend || kind.name,
    color: kind.stroke,
    rows: about(model, [i], i),
    nodes: [i],
  };
}

export function infoOfAtom(model, atom, backward) {
  const live = atom.nodes.filter(i => model.kind(i) !== KIND.placeholder),
    nodes = live.length ? live : atom.nodes;
  const main = nodes.find(i => model.columns.group[i]) ?? nodes[0];
  return {
    title: atom.title,
    sub: atom.sub,
    color: model.kinds[atom.kind].stroke,
    rows: about(model, nodes, main),
    nodes,
    backward,
  };
}

export function infoOfGroup(model, item, backward) {
  const rows = [];
  for (const [b, word] of [
    [0, 'forward'],
    [1, 'backward'],
  ]) {
    const half = item.half[b];
    if (!half.nodes) continue;
    const kinds = Object.entries(half.kinds).filter(
      ([k]) => ![KIND.compute, KIND.wait, KIND.placeholder, KIND.output].includes(+k),
    );
    rows.push([
      word,
      [plural(half.nodes, 'node'), ...kinds.map(([k, n]) => `${n} ${model.kinds[k].name}`)].join(' \u00b7 '),
    ]);
  }
  const title = item.path && item.type === 'group' ? item.path : item.name;
  return {
    title,
    sub: item.note || '',
    color: '#4b5666',
    rows,
    hint: item.open ? 'click to fold' : 'click to open',
    backward,
  };
}
