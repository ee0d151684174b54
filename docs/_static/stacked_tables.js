/* Tables of the class "stacked" are shown row by row on a phone (custom.css): each cell says its column's title. */

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.stacked")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (titles[column]) cell.dataset.label = titles[column];
      });
    }
  }
});
