"use strict";
// A click on the head of a column sorts by it: numbers from the largest, words from "a"; again, the other way.
const body = document.querySelector("tbody");
const heads = [...document.querySelectorAll("thead th")];
const value = (row, column) => row.cells[column].dataset.value;
heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
  const words = head.dataset.kind === "words";
  const first = words ? "ascending" : "descending", second = words ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? second : first;
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const compare = (a, b) => words
    ? sign * value(a, column).localeCompare(value(b, column), "en", { numeric: true })
    : (value(a, column) === "") - (value(b, column) === "") || sign * (value(a, column) - value(b, column));
  body.append(...[...body.rows].sort(compare));
}));
