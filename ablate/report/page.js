
"use strict";

// --- Tables that sort: a click on a heading sorts up, then down, then as it was --------------------------------------

const words = new Intl.Collator("en", { numeric: true });
const NUMBER = /^(?:[×≥≤<>~] ?|over )?([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)/i;

/** The number that a cell begins with, or null. */
function numberOf(text) {
  const found = NUMBER.exec(text);
  return found && Number(found[1].replaceAll(",", ""));
}

const wordOf = (text) => (["", "n/a", "—"].includes(text) ? null : text);

/** What has no value stays below in either direction. */
function compared(one, other, numeric, sign) {
  const [a, b] = [one, other].map(numeric ? numberOf : wordOf);
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (numeric ? a - b : words.compare(a, b));
}

function sort(table, column, direction) {
  const numeric = table.rows[0].cells[column].style.textAlign === "right";
  const sign = direction === "descending" ? -1 : 1;
  const text = (row) => row.cells[column].innerText.trim();
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => a.dataset.place - b.dataset.place);
  if (direction !== "none") rows.sort((a, b) => compared(text(a), text(b), numeric, sign));
  table.tBodies[0].append(...rows);
}

function makeSortable(table) {
  if (!table.tBodies.length) return;
  [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
  const heads = [...table.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")] ?? "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      if (next !== "none") head.setAttribute("aria-sort", next);
      sort(table, column, next);
    });
  });
}

document.querySelectorAll("table").forEach(makeSortable);

// --- Plots with hover: what the spot nearest to the pointer says ------------------------------------------------------

const told = document.getElementById("told");
const REACH = 24;

function nearest(spots, event) {
  let best = null, least = REACH;
  for (const spot of spots) {
    const box = spot.getBoundingClientRect();
    const far = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
    if (far < least) [best, least] = [spot, far];
  }
  return best;
}

function makeHover(plot) {
  const spots = [...plot.querySelectorAll(".spots circle")];
  const texts = new Map(spots.map((spot) => {
    const title = spot.querySelector("title");
    const text = title.textContent;
    title.remove(); // or the browser tells it once more
    spot.setAttribute("aria-label", text);
    return [spot, text];
  }));
  let shown = null;
  const show = (spot, event) => {
    shown?.classList.remove("near");
    shown = spot;
    told.hidden = !spot;
    if (!spot) return;
    spot.classList.add("near");
    told.textContent = texts.get(spot);
    const left = Math.min(event.clientX + 14, innerWidth - told.offsetWidth - 8);
    const below = event.clientY + 14;
    told.style.left = `${Math.max(8, left)}px`;
    told.style.top = `${below + told.offsetHeight < innerHeight ? below : event.clientY - told.offsetHeight - 10}px`;
  };
  plot.addEventListener("pointermove", (event) => show(nearest(spots, event), event));
  plot.addEventListener("pointerleave", (event) => show(null, event));
}

document.querySelectorAll("svg.plot").forEach(makeHover);
