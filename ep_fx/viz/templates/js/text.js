// The graph as text, laid out only when it is asked for; the search marks its places.

export class TextView {
  constructor(data, host) {
    this.host = host;
    this.lines = host.querySelector('#lines');
    this.summary = host.querySelector('#summary');
    this.text = data.text;
    this.table = data.summary;
    this.filled = false;
  }
  show() {
    if (this.filled) return;
    this.filled = true;
    this.summary.textContent = this.table;
    this.lines.textContent = this.text;
  }
  // Scrolls to the line of a node and marks it.
  reveal(line) {
    this.show();
    const at = line ? this.text.indexOf(line) : -1;
    if (at < 0) return;
    const mark = document.createElement('mark');
    mark.textContent = line;
    this.lines.replaceChildren(this.text.slice(0, at), mark, this.text.slice(at + line.length));
    mark.scrollIntoView({block: 'center'});
  }
}
