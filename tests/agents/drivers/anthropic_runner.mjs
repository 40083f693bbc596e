// Anthropic's JavaScript client with its tool runner.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { MODEL, STREAMED, TASK, TOOLS } from "./world.mjs";

const tools = TOOLS.map(({ name, description, parameters, run }) =>
  betaTool({ name, description, inputSchema: parameters, run }),
);
const runner = new Anthropic().beta.messages.toolRunner({
  model: MODEL,
  max_tokens: 1024,
  messages: [{ role: "user", content: TASK }],
  tools,
  stream: STREAMED,
});
const said = await runner;
console.log(said.content.filter((block) => block.type === "text").map((b) => b.text).join(""));
