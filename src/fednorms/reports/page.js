"use strict";
// Sorting: a click on a heading sorts its table; the first click on numbers shows the largest first.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : !numbers;
      const key = (row) => {
        const cell = row.cells[column], value = cell.dataset.value;
        return numbers ? (value === undefined || value === "" ? NaN : Number(value)) : cell.textContent;
      };
      const rows = [...body.rows];
      rows.sort((a, b) => {
        const x = key(a), y = key(b);
        if (!numbers) return (up ? 1 : -1) * x.localeCompare(y, "en", { numeric: true });
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return up ? x - y : y - x;
      });
      body.append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}
// Hovering: the titles of marks become a tip that follows the pointer; a line that is pointed at stands out.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const chart of document.querySelectorAll("svg.chart")) {
  for (const title of chart.querySelectorAll("title")) {
    if (title.parentNode !== chart) title.parentNode.setAttribute("data-tip", title.textContent);
    title.remove();
  }
  chart.addEventListener("pointermove", (event) => {
    const mark = event.target.closest("[data-tip]"), series = event.target.closest(".series");
    const several = chart.querySelectorAll(".series").length > 1 && chart.querySelector(".line");
    chart.classList.toggle("dimmed", Boolean(several && series));
    for (const other of chart.querySelectorAll(".series")) other.classList.toggle("on", other === series);
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("data-tip");
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = left + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
  });
  chart.addEventListener("pointerleave", () => {
    tip.hidden = true;
    chart.classList.remove("dimmed");
  });
}
