// Keeps the page fresh from its event stream. Text goes in as text: nothing here makes markup of strings.
"use strict";
(() => {
  const status = document.getElementById("live");

  function say(words) {
    if (status && status.textContent !== words) status.textContent = words;
  }

  function put(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  // Rows are reused, so that focus and selection stay where they are.
  function fill(table, rows, paint) {
    const body = table.tBodies[0];
    const labels = Array.from(table.tHead.rows[0].cells, (cell) => cell.textContent);
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((cells, at) => {
      const row = body.rows[at] || body.insertRow();
      while (row.cells.length < cells.length) {
        const cell = row.insertCell();
        cell.dataset.label = labels[row.cells.length - 1];
      }
      cells.forEach((text, column) => paint(row.cells[column], text, column, at));
    });
    const none = document.getElementById(`${table.id}-none`);
    if (none) none.hidden = rows.length > 0;
  }

  function linked(cell, href, text) {
    let anchor = cell.querySelector("a");
    if (!anchor) {
      anchor = document.createElement("a");
      cell.replaceChildren(anchor);
    }
    if (anchor.getAttribute("href") !== href) anchor.setAttribute("href", href);
    put(anchor, text);
  }

  function badge(cell, text, level) {
    let span = cell.querySelector("span");
    if (!span) {
      span = document.createElement("span");
      cell.replaceChildren(span);
    }
    span.className = `badge ${level}`;
    put(span, text);
  }

  function used(cell, text, share) {
    if (!cell.querySelector("meter")) {
      const meter = document.createElement("meter");
      Object.assign(meter, { min: 0, max: 1, low: 0.5, high: 0.8, optimum: 0 });
      const outer = document.createElement("span");
      outer.append(meter, document.createElement("span"));
      cell.replaceChildren(outer);
    }
    cell.firstElementChild.className = text === "-" ? "used none" : "used";
    cell.querySelector("meter").value = share;
    put(cell.querySelector("meter + span"), text);
  }

  function engineRow(engines) {
    return (cell, text, column, at) => {
      if (column === 0) linked(cell, `/engines/${encodeURIComponent(text)}`, text);
      else if (column === 1) badge(cell, text, engines[at].level);
      else put(cell, text);
    };
  }

  function show(now) {
    const table = document.getElementById("engines");
    if (table) fill(table, now.engines.map((each) => each.cells), engineRow(now.engines));
    for (const engine of now.engines) {
      const lanes = document.getElementById(`lanes-${engine.name}`);
      if (!lanes) continue;
      fill(lanes, engine.lanes, (cell, text, column, at) => {
        if (column === 5) used(cell, text, engine.used[at]);
        else put(cell, text);
      });
    }
    const processes = document.getElementById("processes");
    if (processes) fill(processes, now.engines[0].processes, (cell, text) => put(cell, text));
    const facts = document.getElementById("facts");
    if (facts) {
      const [, state, ready, lasts, restarts, why] = now.engines[0].cells;
      const fresh = { For: lasts, Ready: ready, Why: why, Restarts: restarts };
      for (const each of facts.children) {
        const key = each.firstElementChild.textContent;
        if (key === "State") badge(each.lastElementChild, state, now.engines[0].level);
        else if (key in fresh) put(each.lastElementChild, fresh[key]);
      }
    }
    const stalls = document.getElementById("stalls");
    if (stalls && now.stalls) {
      fill(stalls, now.stalls, (cell, text, column) => {
        if (column === 0) linked(cell, `/stalls/${encodeURIComponent(text)}`, text);
        else put(cell, text);
      });
    }
  }

  const path = document.body.dataset.live;
  if (path) {
    const source = new EventSource(path);
    source.addEventListener("now", (event) => {
      show(JSON.parse(event.data));
      say("live");
    });
    source.addEventListener("error", () => say("connection lost: what is shown is old"));
  }

  const button = document.getElementById("copy");
  const text = document.getElementById("text");
  if (button && text) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const said = document.getElementById("copied");
      try {
        await navigator.clipboard.writeText(text.textContent);
        said.textContent = "copied";
      } catch {
        // no right to the clipboard: leave it selected for Ctrl-C
        text.closest("details").open = true;
        getSelection().selectAllChildren(text);
        text.focus();
        said.textContent = "selected: press Ctrl-C";
      }
    });
  }
})();
