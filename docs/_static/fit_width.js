/* Mark up what custom.css fits to the width of the window: tables, printed output and figures. */

document.addEventListener("DOMContentLoaded", () => {
  // Tables of the class "stacked" are shown row by row on a phone: each cell says its column's title.
  for (const table of document.querySelectorAll("table.stacked")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (titles[column] && cell.textContent.trim()) cell.dataset.label = titles[column];
      });
    }
  }

  // A right-aligned column without numbers is text, and wraps.
  for (const table of document.querySelectorAll("table.table")) {
    [...table.rows[0].cells].forEach((_, column) => {
      const cells = [...table.rows].map((row) => row.cells[column]).filter((cell) => cell);
      const words = cells.slice(1).every((cell) => !/^\W*\d/.test(cell.textContent.trim()));
      if (words) for (const cell of cells) cell.classList.remove("text-right");
    });
  }

  // Printed lines wrap, but not those of a table, nor the aligned ones of a block without one.
  const printed = ".sphx-glr-script-out pre, .highlight-text pre, .highlight-pycon pre, .doctest pre";
  for (const pre of document.querySelectorAll(`.bd-article :is(${printed})`)) {
    const lines = pre.textContent.split("\n").filter((line) => !/^(>>>|\.\.\.) /.test(line));
    const rules = lines.filter((line) => /^-[- ]*$/.test(line));
    const fixed = rules.length ? rules : lines.filter((line) => /\S {2,}\S| {3}/.test(line));
    const text = document.createElement("span");
    text.className = "wrapped";
    const widest = Math.max(0, ...fixed.map((line) => line.length));
    text.style.minWidth = `${widest && widest + 1}ch`; // one more: widths are rounded, and the last word would wrap
    text.append(...pre.childNodes);
    pre.append(text);
  }

  // Images that are wide have no box of their own to scroll in.
  for (const image of document.querySelectorAll("img.sphx-glr-single-img, img.wide")) {
    const box = document.createElement("div");
    box.className = ["figure-box", "only-light", "only-dark"].filter((of, k) => !k || image.classList.contains(of)).join(" ");
    image.replaceWith(box);
    box.append(image);
    // A figure covers the shadow of its box: it fades out where there is more.
    const fade = () => box.classList.toggle("more", box.scrollWidth > box.clientWidth + box.scrollLeft + 1);
    box.addEventListener("scroll", fade);
    new ResizeObserver(fade).observe(box);
    const least = () => {
      if (!image.classList.contains("wide")) image.style.minWidth = `min(${0.6 * image.naturalWidth}px, 44rem)`;
      fade();
    };
    image.addEventListener("load", least);
    if (image.naturalWidth) least();
  }
});
