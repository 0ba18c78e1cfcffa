"use strict";
document.documentElement.dataset.started = String(Math.round(performance.now()));
/* Draws charts and long tables, and lets tables be sorted and searched. Text of the run only ever becomes text. */
(() => {
  const PAGE = 200;
  const BUTTONS = 20;
  /* Below this width, labels leave nothing to a plot: its box scrolls then. */
  const NARROWEST = 320;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const make = (name, text = "", properties = {}) =>
    Object.assign(document.createElement(name), { textContent: text }, properties);

  let printing = false;

  /* Charts */
  const charts = read("chart-data");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const template = () => (dark.matches ? charts.dark : charts.light);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const modebar = () => ({ bgcolor: "rgba(0,0,0,0)", color: color("--muted"), activecolor: color("--accent") });
  const config = {
    displaylogo: false,
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "png", scale: 2 },
  };
  const places = [...document.querySelectorAll("[data-chart]")];

  const widthOf = (place) => Math.max(NARROWEST, place.clientWidth);
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (!printing && target.clientWidth && widthOf(target) !== target._fullLayout?.width)
        Plotly.relayout(target, { width: widthOf(target) });
    }
  });

  /* The buttons have a line of their own above the plot. */
  const roomy = (layout) => ({
    ...layout,
    autosize: false,
    height: layout.height + BUTTONS,
    margin: { ...layout.margin, t: (layout.margin?.t ?? 0) + BUTTONS },
  });

  function draw(place) {
    const { data, layout } = charts.figures[place.dataset.chart];
    const dragmode = matchMedia("(pointer: coarse)").matches ? false : (layout.dragmode ?? "zoom");
    const shown = { ...roomy(layout), width: widthOf(place), dragmode, modebar: modebar(), template: template() };
    Plotly.newPlot(place, data, shown, config);
    /* The picture is the SVG: the buttons beside it are controls, and no part of an image. */
    for (const [index, svg] of place.querySelectorAll(".main-svg").entries()) {
      if (index) svg.setAttribute("aria-hidden", "true");
      else {
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", place.getAttribute("aria-label"));
      }
    }
    place.setAttribute("role", "group");
    resized.observe(place);
  }

  /* Those that are folded away have no width yet, and are drawn when they are opened. */
  const drawn = () => places.filter((place) => "drawn" in place.dataset);
  const waiting = () => places.filter((one) => !("drawn" in one.dataset) && !one.closest("details:not([open])"));
  const drawNext = () => {
    const [place, ...others] = waiting();
    if (!place) return false;
    place.dataset.drawn = "";
    try {
      draw(place);
    } catch (error) {
      console.error(error);
      place.append(make("p", `This chart could not be drawn (${error}); its data stands in the table below.`));
    }
    document.documentElement.dataset.drawn = String(drawn().filter((one) => one.querySelector("svg")).length);
    return others.length > 0;
  };
  const drawAll = () => {
    while (drawNext());
  };
  /* The first one with the page, the others one by one, so that the page can be read meanwhile. */
  const drawInTurn = () => {
    if (drawNext()) setTimeout(drawInTurn);
  };
  drawInTurn();
  const restyle = (shown, width) => {
    for (const place of drawn())
      Plotly.relayout(place, { template: shown, modebar: modebar(), width: width ?? widthOf(place) });
  };
  dark.addEventListener("change", () => restyle(template(), null));

  /* Tables */
  const stored = read("table-data");
  const number = (text) => {
    const found = /^[~<>≥≤★ ]*([+−-]?\d[\d.,]*(?:e[+-]?\d+)?)/.exec(text);
    return found ? Number(found[1].replace("−", "-").replaceAll(",", "")) : null;
  };

  function key(row, column) {
    const cell = row.cells ? row.cells[column] : null;
    if (cell && cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = row.texts ? row.texts[column] : (cell?.textContent ?? "");
    return text === "–" || text === "" ? null : (number(text) ?? text.toLowerCase());
  }

  function before(one, other, direction) {
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return direction * (one - other);
    return direction * String(one).localeCompare(String(other), "en", { numeric: true });
  }

  /* Lines break between a number and its interval, and not within them. */
  function split(text) {
    const found = /^(.{1,24}) (\[[^\]]*\d[^\]]*\])$/.exec(text);
    if (!found) return [text];
    const [number, interval] = found.slice(1).map((part) => make("span", part, { className: "whole" }));
    return [number, " ", interval];
  }

  class Rows {
    constructor(box) {
      this.box = box;
      this.table = box.querySelector("table");
      this.heads = [...this.table.tHead.rows[0].cells];
      this.body = this.table.tBodies[0];
      this.grouped = "grouped" in box.dataset;
      this.shown = PAGE;
      this.words = "";
      this.column = null;
      this.direction = 1;
      const texts = stored.rows[box.dataset.name]?.map((row) => row.map((place) => stored.texts[place]));
      const elements = this.grouped ? [...this.table.tBodies] : [...this.body.rows];
      this.all = texts
        ? texts.map((cells) => ({ texts: cells, element: null }))
        : elements.map((element) => ({ element, cells: this.grouped ? element.rows[0].cells : element.cells }));
      this.numeric = this.heads.map((head) => head.classList.contains("number"));
      this.addTools();
      if (texts) this.draw();
    }

    addTools() {
      if (this.all.length > 2 && "sortable" in this.box.dataset) for (const [index, head] of this.heads.entries()) this.addSorting(head, index);
      const tools = make("div", "", { className: "tools" });
      if ("searched" in this.box.dataset && this.all.length > 5) {
        const label = make("label", "Rows with ");
        const input = make("input", "", { type: "search" });
        input.addEventListener("input", () => {
          this.words = input.value.toLowerCase();
          this.shown = PAGE;
          this.draw();
        });
        label.append(input);
        tools.append(label);
      }
      if ("foldable" in this.box.dataset && this.table.rows.length > this.all.length + 4) tools.append(this.folding());
      this.status = make("span", "", { className: "muted" });
      this.status.setAttribute("role", "status");
      this.more = make("button", "", { type: "button", className: "plain", hidden: true });
      this.more.addEventListener("click", () => {
        this.shown += 5 * PAGE;
        this.draw();
      });
      tools.append(this.status);
      if (tools.children.length > 1) this.box.prepend(tools);
      else if ("long" in this.box.dataset) this.box.prepend(tools);
      if ("long" in this.box.dataset) this.box.append(this.more);
    }

    folding() {
      const button = make("button", "All batch sizes", { type: "button", className: "plain" });
      const fold = (folded) => {
        this.table.classList.toggle("folded", folded);
        button.setAttribute("aria-pressed", String(!folded));
      };
      button.addEventListener("click", () => fold(!this.table.classList.contains("folded")));
      fold(true);
      return button;
    }

    addSorting(head, index) {
      const button = make("button", "", { type: "button" });
      button.append(...head.childNodes);
      button.addEventListener("click", () => {
        const again = this.column === index;
        if (again && this.direction === -1) this.column = null;
        else [this.column, this.direction] = [index, again ? -1 : 1];
        for (const other of this.heads) other.removeAttribute("aria-sort");
        if (this.column !== null) head.setAttribute("aria-sort", this.direction === 1 ? "ascending" : "descending");
        this.draw();
      });
      head.replaceChildren(button);
    }

    row(entry) {
      if (!entry.element) {
        entry.element = make("tr");
        entry.texts.forEach((text, index) => {
          const cell = make(index ? "td" : "th", "", { className: this.numeric[index] ? "number" : "breaks" });
          cell.append(...split(text));
          if (!index) cell.scope = "row";
          entry.element.append(cell);
        });
      }
      return entry.element;
    }

    draw() {
      const has = (entry) => (entry.texts?.join(" ") ?? entry.element.textContent).toLowerCase().includes(this.words);
      let found = this.words ? this.all.filter(has) : [...this.all];
      if (this.column !== null) {
        const keyed = found.map((entry) => [key(entry, this.column), entry]);
        found = keyed.sort(([one], [other]) => before(one, other, this.direction)).map(([, entry]) => entry);
      }
      const rows = found.slice(0, this.shown).map((entry) => this.row(entry));
      if (this.grouped) this.table.append(...rows);
      else this.body.replaceChildren(...rows);
      this.status.textContent = `${rows.length} of ${this.all.length} rows`;
      this.more.hidden = rows.length === found.length;
      this.more.textContent = `Show more of ${found.length} rows`;
      this.box.querySelector(".count")?.remove();
    }
  }

  const enhance = (root) => {
    for (const box of root.querySelectorAll(".table:not([data-ready])")) {
      if (printing || box.parentElement.closest("details:not([open])")) continue;
      box.dataset.ready = "";
      new Rows(box);
    }
  };
  enhance(document);
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => {
      if (!details.open) return;
      enhance(details);
      drawInTurn();
    });
  }

  /* Code to copy */
  for (const code of document.querySelectorAll(".code")) {
    const text = code.querySelector("pre");
    const label = code.querySelector(".label");
    const button = make("button", "Copy", { type: "button", className: "plain" });
    button.setAttribute("aria-label", `Copy: ${label.textContent}`);
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(text);
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
    });
    label.append(button);
  }

  /* Print: everything open, charts in light colors and as wide as the paper */
  const PAPER = 660;
  let closed = [];
  addEventListener("beforeprint", () => {
    printing = true;
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
    drawAll();
    restyle(charts.light, PAPER);
  });
  addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
    printing = false;
    restyle(template(), null);
  });

  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
