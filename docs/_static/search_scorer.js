/* Order of search results: pages whose own title has the words first, then sections of that title, then pages whose
   headings have all words; guides before others, pages for developers last.  In Sphinx one word in any heading counts as
   much as all of them. */
var Scorer = {
  score: ([docname, title, anchor, , score]) => {
    const query = new URLSearchParams(location.search).get("q").toLowerCase().trim(), words = query.split(/[\s_]+/);
    const terms = Search._index.titleterms, file = Search._index.docnames.indexOf(docname), stemmer = new Stemmer();
    const inHeading = (word) => {
      const stem = stemmer.stemWord(word);
      return stopwords.has(word) || (Object.hasOwn(terms, stem) && [terms[stem]].flat().includes(file));
    };
    const name = title.toLowerCase(), share = words.filter((word) => name.includes(word)).length / words.length;
    const named = anchor ? (name.endsWith(`> ${query}`) ? 12 : 0) : 5 * share + (share === 1 ? 20 : 0);
    const headed = !anchor && words.every(inHeading) ? 10 : 0;
    const developers = docname.startsWith("development/") || docname === "changelog";
    return score + Math.max(named, headed) + docname.startsWith("guide/") - 20 * developers;
  },
  // The defaults of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Snippets begin with the text of a page, not with the navigation above it.
document.addEventListener("DOMContentLoaded", () => {
  const htmlToText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    for (const bar of page.querySelectorAll(".bd-header-article, .sphx-glr-download-link-note, .recording, h1")) bar.remove();
    return htmlToText(page.documentElement.outerHTML, anchor).replace(/\s+/g, " ");
  };
});
