"""The search of the documentation site: mkdocs-material's own worker, run by Node."""

import json
import shutil
import subprocess

import pytest

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs Node")

SEARCH = """
const vm = require("node:vm");
const {source, index, queries} = JSON.parse(require("node:fs").readFileSync(0));
let receive, answered;
const worker = {
  addEventListener: (_, listener) => { receive = listener; },
  postMessage: message => answered(message.data),
};
vm.runInNewContext(source, Object.assign(worker, {self: worker, URL, console}));
const ask = message => new Promise(resolve => {
  answered = resolve;
  receive({data: message});
});
const search = async () => {
  await ask({type: 0, data: index});
  const found = {};
  for (const query of queries) {
    const {items} = await ask({type: 2, data: query});
    found[query] = items.length ? items[0][0].location.split("#")[0] : null;
  }
  console.log(JSON.stringify(found));
};
search();
"""


def first_pages(site, queries):
    """Return the page of the built site that its search puts first, by query."""
    (source,) = site.glob("assets/javascripts/workers/search.*.min.js")
    index = json.loads((site / "search/search_index.json").read_text()) | {"options": {}}
    asked = {"source": source.read_text(), "index": index, "queries": list(queries)}
    done = subprocess.run(
        [NODE, "-e", SEARCH],
        input=json.dumps(asked),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)
