"use strict";
// Shows a rollout as a conversation: what each agent saw and said, branch by branch.
//
// Branches share most of their messages. Each branch is shown from where it leaves an earlier branch,
// with the changes made there. All text comes from the model or a tool, so it is only set as textContent.

const SHOWN_LINES = 10, SHOWN_CHARACTERS = 1200; // shown of a long text before it is expanded
const ALIGNED = 1e6; // most pairs of messages that are compared to find edits

// ---- the messages that a branch adds, and the branch that it adds them to ----

// Returns the branches in the order of their first own turn, with: number, turns (per message a turn
// or null), own (index of the branch's first own reply), base (the branch that it leaves), changes.
function branchesOf(conversation) {
  const seen = new Set();
  const branches = conversation.branches.map((branch, place) => {
    const turns = branch.turns ?? countedTurns(branch, conversation.messages);
    const isOwn = i => turns[i] !== null && !seen.has(turns[i]);
    const replies = [...turns.keys()].filter(isOwn);
    for (const i of replies) seen.add(turns[i]);
    return {...branch, place, turns, replies, own: replies[0] ?? branch.messages.length};
  });
  const first = branch => branch.turns[branch.own] ?? Infinity;
  branches.sort((a, b) => first(a) - first(b) || a.place - b.place);
  branches.forEach((branch, i) => {
    branch.number = i + 1;
    branch.base = baseOf(branch, branches.slice(0, i));
    const request = branch.messages.slice(0, branch.own);
    let known = branch.base?.messages ?? [];
    if (branch.origin === "fork") known = known.slice(0, sharedLength(known, request));
    branch.changes = changesOf(known, request);
  });
  return branches;
}
function countedTurns(branch, messages) {
  let count = 0;
  return branch.messages.map(place => messages[place].role === "assistant" ? ++count : null);
}
// Returns the earlier branch with the longest shared beginning; in a tie, the same agent's, then the last.
function baseOf(branch, earlier) {
  let [best, most] = [null, 0];
  for (const one of earlier) {
    const shared = sharedLength(one.messages, branch.messages);
    const rank = shared && 4 * shared + 2 * (one.agent === branch.agent);
    if (rank && rank >= most) [best, most] = [one, rank];
  }
  return best;
}
function sharedLength(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n++;
  return n;
}
// Returns the edits from earlier messages to a request's: [{kind: "kept" | "removed" | "added", message}].
function changesOf(before, after) {
  const shared = sharedLength(before, after);
  const [a, b] = [before.slice(shared), after.slice(shared)];
  const changes = after.slice(0, shared).map(message => ({kind: "kept", message}));
  const kept = a.length * b.length <= ALIGNED ? longestCommon(a, b) : [];
  let [i, j] = [0, 0];
  for (const [x, y] of [...kept, [a.length, b.length]]) {
    while (i < x) changes.push({kind: "removed", message: a[i++]});
    while (j < y) changes.push({kind: "added", message: b[j++]});
    if (x < a.length && y < b.length) changes.push({kind: "kept", message: b[y]});
    [i, j] = [x + 1, y + 1];
  }
  return changes;
}
// Returns the index pairs of a longest common subsequence.
function longestCommon(a, b) {
  const width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1
        : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}
// Returns the place of each turn's tokens, {sequence, start, end}, by turn. A branch is left out if its
// number of replies is not that of its runs of trained tokens.
function tokensByTurn(branches, sequences) {
  const found = new Map();
  for (const sequence of sequences) {
    const branch = branches.find(one => one.sample === sequence.sample);
    const runs = runsOf(sequence.loss_mask);
    if (branch?.replies.length !== runs.length) continue;
    branch.replies.forEach((message, i) => found.set(branch.turns[message], {sequence, ...runs[i]}));
  }
  return found;
}
function runsOf(mask) {
  const runs = [];
  for (let t = 0; t < mask.length; t++) {
    if (!mask[t]) continue;
    if (t && mask[t - 1]) runs.at(-1).end = t + 1;
    else runs.push({start: t, end: t + 1});
  }
  return runs;
}

// ---- the view ----

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const range = (first, last) => first === last ? `turn ${first}` : `turns ${first}–${last}`;

// `drawTokens(span)` shows the tokens of {sequence, start, end}, or is null.
function conversationView(conversation, sequences, drawTokens) {
  const branches = branchesOf(conversation);
  const spans = tokensByTurn(branches, sequences);
  const view = element("div", {className: "conversation"});
  const story = {messages: conversation.messages, branches, spans, drawTokens, view};
  if (branches.length > 1) view.append(lanes(story));
  for (const branch of branches) view.append(branchSection(story, branch));
  if (conversation.left_out) {
    view.append(element("p", {className: "note", textContent: `${plural(conversation.left_out, "further branch")} of this rollout not in the record.`}));
  }
  return view;
}
function goTo(story, branch) {
  const section = story.view.querySelector(`[data-branch="${branch.number}"]`);
  settled(() => section.scrollIntoView({block: "start"}));
  section.focus({preventScroll: true});
}
// Scrolls again in the next frames: heights of messages are estimates until they are drawn.
function settled(scroll, frames = 5) {
  scroll();
  if (frames) requestAnimationFrame(() => settled(scroll, frames - 1));
}
// A lane for each agent, with a bar for each branch from its first to its last turn.
function lanes({branches, messages, ...story}) {
  const agents = [...new Set(branches.map(branch => branch.agent))];
  const last = Math.max(1, ...branches.flatMap(branch => branch.turns.map(turn => turn ?? 0)));
  story.view.style.setProperty("--lanes", `${1.5 * agents.length + 2}rem`); // keeps scroll targets below the lanes
  const map = element("nav", {className: "lanes", ariaLabel: "branches"});
  for (const agent of agents) {
    const lane = element("div", {className: "lane"});
    for (const branch of branches.filter(one => one.agent === agent)) {
      const turns = branch.replies.map(i => branch.turns[i]);
      if (!turns.length) continue;
      const share = (turns.at(-1) - turns[0] + 1) / last;
      const bar = element("button", {textContent: share > .02 ? branch.number : "", title: `branch ${branch.number}, ${agent}: ${range(turns[0], turns.at(-1))}`});
      bar.style.left = `${100 * (turns[0] - 1) / last}%`;
      bar.style.width = `${100 * share}%`;
      bar.style.setProperty("--agent", `var(${COLORS[agents.indexOf(agent) % COLORS.length]})`);
      bar.addEventListener("click", () => goTo(story, branch));
      lane.append(bar);
      for (const [i, place] of branch.messages.entries()) {
        if (i < branch.own || !failed(messages[place])) continue;
        const fault = element("i");
        fault.style.left = `${100 * (branch.turns.slice(0, i).findLast(turn => turn !== null) - .5) / last}%`;
        lane.append(fault);
      }
    }
    map.append(element("span", {textContent: agent}), lane);
  }
  map.append(element("span"), element("div", {className: "axis"}, element("span", {textContent: "turn 1"}), element("span", {textContent: `turn ${last}`})));
  return map;
}
function branchSection(story, branch) {
  const turns = branch.replies.map(i => branch.turns[i]);
  const section = element("section", {tabIndex: -1});
  section.dataset.branch = branch.number;
  if (story.branches.length > 1) {
    const title = `Branch ${branch.number} · ${branch.agent}` + (turns.length ? ` · ${range(turns[0], turns.at(-1))}` : "");
    section.append(element("h3", {textContent: title}));
    const why = beginning(story, branch);
    if (why) section.append(why);
  }
  for (const {message} of newMessages(branch)) section.append(messageView(story, story.messages[message], null));
  for (let i = branch.own; i < branch.messages.length; i++) {
    section.append(messageView(story, story.messages[branch.messages[i]], branch.turns[i]));
    const turn = branch.turns[i];
    if (turn === null) continue;
    const next = branch.turns.slice(i + 1).find(one => one !== null) ?? turn + 1;
    for (const other of story.branches) {
      const begins = other.turns[other.own];
      if (other === branch || other.agent === branch.agent || begins <= turn || begins >= next) continue;
      section.append(linkTo(story, other, `↳ asked ${other.agent}: branch ${other.number}`));
    }
  }
  return section;
}
function linkTo(story, branch, text) {
  const link = element("button", {className: "link", textContent: text});
  link.addEventListener("click", () => goTo(story, branch));
  return link;
}
// Returns the messages that a branch appends to its base before its first own reply.
function newMessages({base, changes}) {
  if (base === null) return changes;
  const end = changes.findLastIndex(change => change.kind !== "added") + 1;
  const added = changes.slice(end);
  const replaced = changes[end - 1]?.kind === "removed";
  return replaced && added.length > 3 ? [] : added;
}
// Returns a note on the branch that this one continues, and on edits; null for the first branch.
function beginning(story, branch) {
  const {base, changes} = branch;
  if (base === null) return branch.number === 1 ? null : element("p", {className: "note", textContent: "A conversation of its own."});
  const count = kind => changes.filter(change => change.kind === kind).length;
  const [kept, removed] = [count("kept"), count("removed")];
  const end = changes.findLastIndex(change => change.kind !== "added") + 1;
  const replaced = changes[end - 1]?.kind === "removed"; // then the messages after it replace it and are not new
  const added = replaced ? count("added") : changes.slice(0, end).filter(change => change.kind === "added").length;
  let text = `Goes on from branch ${base.number}, of which it has ${kept === base.messages.length ? "all" : "the first"} ${plural(kept, "message")}.`;
  if (branch.origin === "unbridged") text = `The history of branch ${base.number}, rendered anew.`;
  if (added && !removed) text = `History edited: ${plural(added, "message")} inserted.`;
  if (removed && !added) text = `History edited: ${plural(removed, "message")} left out.`;
  if (removed && added) text = `History edited: ${plural(removed, "message")} replaced by ${added === removed ? "as many" : added}.`;
  const details = element("details", {className: "edit"}, element("summary", {textContent: text}));
  details.classList.toggle("changed", Boolean(removed || added));
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(...changedHistory(story, branch));
  });
  return details;
}
function changedHistory(story, branch) {
  const shown = [element("p", {className: "note"}, "Compared with ", linkTo(story, branch.base, `branch ${branch.base.number}`), ":")];
  const after = new Set(newMessages(branch));
  const changes = branch.changes.filter(change => !after.has(change));
  for (let i = 0; i < changes.length;) {
    const {kind, message} = changes[i];
    let end = i + 1;
    while (kind === "kept" && changes[end]?.kind === "kept") end++;
    if (kind !== "kept") {
      const box = element("div", {className: kind}, messageView(story, story.messages[message], null));
      shown.push(box);
    } else {
      const same = changes.slice(i, end);
      const details = element("details", {}, element("summary", {textContent: `${plural(same.length, "message")} unchanged`}));
      details.addEventListener("toggle", () => {
        if (details.children.length === 1) details.append(...same.map(one => messageView(story, story.messages[one.message], null)));
      });
      shown.push(details);
    }
    i = end;
  }
  return shown;
}

// ---- one message ----

const failed = message => ["tool", "user"].includes(message.role) && message.content.startsWith("error: ");
function messageView(story, message, turn) {
  const known = ["system", "developer", "user", "assistant", "tool"].includes(message.role);
  const box = element("div", {className: `message ${known ? message.role : "user"}`});
  box.classList.toggle("failed", failed(message));
  const span = turn === null ? undefined : story.spans.get(turn);
  const facts = [turn === null ? "" : `turn ${turn}`];
  if (span) {
    const versions = span.sequence.versions.slice(span.start, span.end);
    const [low, high] = [Math.min(...versions), Math.max(...versions)];
    facts.push(plural(span.end - span.start, "token"), `version ${low === high ? low : `${low}–${high}`}`);
  }
  const name = message.role === "tool" ? `${message.name ?? "tool"} ${failed(message) ? "failed" : "returned"}` : message.role;
  box.append(element("div", {className: "who"}, element("b", {textContent: name}), element("span", {textContent: facts.filter(Boolean).join(" · ")})));
  if (span && story.drawTokens) {
    box.append(story.drawTokens(span));
    return box;
  }
  const {reasoning, said} = split(message);
  if (reasoning) box.append(longText(reasoning, "reasoning"));
  if (said) box.append(longText(said, message.role === "tool" ? "said code" : "said"));
  for (const call of message.tool_calls ?? []) box.append(callView(call.function));
  if (!reasoning && !said && !message.tool_calls) box.append(element("p", {className: "note", textContent: "empty"}));
  return box;
}
// Reasoning is in reasoning_content, or in tags before the reply.
function split(message) {
  const content = message.content.trim();
  if (message.reasoning_content) return {reasoning: message.reasoning_content.trim(), said: content};
  const end = content.indexOf("</think>");
  if (message.role !== "assistant" || end < 0) return {reasoning: "", said: content};
  return {reasoning: content.slice(0, end).replace("<think>", "").trim(), said: content.slice(end + 8).trim()};
}
function callView({name, arguments: text}) {
  const head = element("div", {className: "call"}, element("b", {textContent: name}));
  let values = null;
  try { values = JSON.parse(text); } catch { /* not JSON: shown as it is */ }
  if (values === null || typeof values !== "object" || Array.isArray(values)) {
    if (text) head.append(longText(text, "code"));
    return head;
  }
  for (const [key, value] of Object.entries(values)) {
    const shown = typeof value === "string" ? value : JSON.stringify(value);
    head.append(element("div", {className: "argument"}, element("span", {textContent: key}), longText(shown, "code")));
  }
  return head;
}
function longText(text, className) {
  const box = element("div", {className});
  const lines = text.split("\n");
  const shown = lines.slice(0, SHOWN_LINES).join("\n").slice(0, SHOWN_CHARACTERS);
  if (text.length - shown.length < SHOWN_CHARACTERS / 4) {
    box.textContent = text;
    return box;
  }
  const more = element("button", {className: "link", textContent: `show all: ${plural(lines.length, "line")}, ${plural(text.length, "character")}`});
  more.addEventListener("click", () => { box.textContent = text; });
  box.append(shown.trimEnd() + " …\n", more);
  return box;
}
