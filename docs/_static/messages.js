// Shows, above the results of a search, the errors and warnings that the query looks like. The search
// itself finds only pages that have every word of a query: no pasted message with a value in it.

// Words of a text. "…" and numbers stand for values, which differ from message to message.
const wordsOf = (text) => [...new Set(text.toLowerCase().match(/[a-z_]{2,}/g))];

const messages = MESSAGES.map((message) => ({ ...message, words: wordsOf(message.text) }));
const counts = new Map();
messages.flatMap((message) => message.words).forEach((word) => counts.set(word, (counts.get(word) ?? 0) + 1));

// How much words tell: the fewer messages have a word, the more.
const weight = (words) => words.reduce((sum, word) => sum + Math.log(messages.length / counts.get(word)), 0);

// What is in no message is a value of the user's, a name say.
const asked = wordsOf(new URLSearchParams(location.search).get("q") ?? "").filter((word) => counts.has(word));

// A hit has four words of the query at least, and most of the query's or the message's weight. The best
// one has the most of the query; words that the query lacks count against it.
const hits = messages
  .map(({ link, text, words }) => {
    const common = words.filter((word) => asked.includes(word));
    return { link, text, count: common.length, common: weight(common), all: weight(words) };
  })
  .filter(({ count, common, all }) => count >= 4 && common >= Math.max(5, 0.6 * Math.min(weight(asked), all)))
  .sort((a, b) => 1.25 * (b.common - a.common) - 0.25 * (b.all - a.all))
  .slice(0, 5);

if (hits.length) {
  const list = document.createElement("ul");
  list.id = "messages";
  for (const hit of hits) {
    const link = document.createElement("a");
    link.href = hit.link;
    link.textContent = hit.text;
    list.appendChild(document.createElement("li")).appendChild(link);
  }
  const title = document.createElement("h2");
  title.textContent = "Messages";
  document.getElementById("search-results").before(title, list);
}
