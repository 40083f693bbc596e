// Anthropic's JavaScript client with Messages, in the loop of its documentation.
import Anthropic from "@anthropic-ai/sdk";
import { MODEL, STREAMED, TASK, TOOLS, runTool } from "./world.mjs";

const client = new Anthropic();
const tools = TOOLS.map(({ name, description, parameters }) => ({
  name,
  description,
  input_schema: parameters,
}));
const messages = [{ role: "user", content: TASK }];

async function reply() {
  const fields = { model: MODEL, max_tokens: 1024, messages, tools };
  if (!STREAMED) {
    return await client.messages.create(fields);
  }
  return await client.messages.stream(fields).finalMessage();
}

let said = await reply();
while (said.stop_reason === "tool_use") {
  const calls = said.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({
    type: "tool_result",
    tool_use_id: call.id,
    content: runTool(call.name, call.input),
  }));
  messages.push({ role: "assistant", content: said.content });
  messages.push({ role: "user", content: results });
  said = await reply();
}
console.log(said.content.filter((block) => block.type === "text").map((b) => b.text).join(""));
