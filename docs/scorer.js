// How the search ranks what it finds: as Sphinx does, but the page of all messages, which has nearly every
// word, comes after the pages that explain them, and the two for who changes the code after their equals.
var Scorer = {
  score: ([page, , , , score]) =>
    page === "messages" ? 0 : score - ["architecture", "benchmarks"].includes(page),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
