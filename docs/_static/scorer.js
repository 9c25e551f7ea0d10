// The order of the pages that a search finds: guides come before lists of options, words in a page's title before others.
var Scorer = {
  score: ([page, title, , , score]) => {
    const asked = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/\w{3,}/g) || [];
    const named = asked.filter((word) => title.toLowerCase().includes(word)).length;
    const guide = /^(guides\/|quickstart|models|own-kernel|install)/.test(page);
    const list = /^(reference\/|changelog|lab-notes|contributing|sweep)/.test(page);
    return score + 20 * (named / Math.max(1, asked.length)) + 6 * guide - 6 * list;
  },
  // What Sphinx gives each kind of match.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
