// Shows, above the results of a search, the errors and warnings that the query looks like. The search
// itself finds only pages that have every word of a query: no pasted message with a value in it.

// Words of a text. "…" and numbers stand for values, which differ from message to message.
const wordsOf = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g) ?? []);

const asked = wordsOf(new URLSearchParams(location.search).get("q") ?? "");

// A message is a hit where it shares three words with the query, and most words of the shorter one.
const hits = MESSAGES.map((message) => {
  const words = wordsOf(message.text);
  const common = [...words].filter((word) => asked.has(word)).length;
  return { ...message, common, share: common / Math.min(words.size, asked.size) };
})
  .filter((message) => message.common >= 3 && message.share >= 0.6)
  .sort((a, b) => b.common - a.common || b.share - a.share)
  .slice(0, 5);

if (hits.length) {
  const list = document.createElement("ul");
  list.id = "messages";
  for (const hit of hits) {
    const link = document.createElement("a");
    link.href = `messages.html#${hit.id}`;
    link.textContent = hit.text;
    list.appendChild(document.createElement("li")).appendChild(link);
  }
  const title = document.createElement("h2");
  title.textContent = "Messages";
  document.getElementById("search-results").before(title, list);
}
