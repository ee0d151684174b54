/* Order of search results: pages whose own title has the words first, guides before others, pages for developers last.
   Without it, pages with a word in any heading are in the order of their titles. */
var Scorer = {
  score: ([docname, title, anchor, , score]) => {
    const words = new URLSearchParams(location.search).get("q").toLowerCase().split(/[\s_]+/); // memory_budget
    const named = !anchor && words.every((word) => title.toLowerCase().includes(word));
    const developers = docname.startsWith("development/") || docname === "changelog";
    return score + 20 * named + docname.startsWith("guide/") - 20 * developers;
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
