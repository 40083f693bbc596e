"""The search of the documentation site: mkdocs-material's own worker, in a Chromium browser."""

import json

from report_pages import in_browser

PAGE = """<!doctype html><body><script>
const worker = new Worker(URL.createObjectURL(new Blob([SOURCE])));
const ask = message => new Promise(resolve => {
  worker.onmessage = event => resolve(event.data.data);
  worker.postMessage(message);
});
const firstPage = async query => {
  const {items} = await ask({type: 2, data: query});
  return items.length ? items[0][0].location.split("#")[0] : null;
};
ask({type: 0, data: INDEX}).then(() => { document.body.dataset.ready = "true"; });
</script></body>"""


def first_pages(site, queries, folder):
    """Return the page of the built site that its search puts first, by query."""
    (source,) = site.glob("assets/javascripts/workers/search.*.min.js")
    index = json.loads((site / "search/search_index.json").read_text()) | {"options": {}}
    page = folder / "search.html"
    script = PAGE.replace("INDEX", _literal(index)).replace("SOURCE", _literal(source.read_text()))
    page.write_text(script)
    found = {}

    async def steps(shown):
        for query in queries:
            found[query] = await shown.run(f"firstPage({json.dumps(query)})")

    in_browser(page, folder, steps)
    return found


def _literal(value):
    """Return a value as JavaScript that may stand in a page's script."""
    return json.dumps(value).replace("<", "\\u003c")
