// OpenAI's JavaScript client with Chat Completions, in the loop of its documentation.
import OpenAI from "openai";
import { MODEL, STREAMED, TASK, TOOLS, runTool } from "./world.mjs";

const client = new OpenAI();
const tools = TOOLS.map(({ name, description, parameters }) => ({
  type: "function",
  function: { name, description, parameters },
}));
const messages = [{ role: "user", content: TASK }];

async function reply() {
  const fields = { model: MODEL, messages, tools };
  if (!STREAMED) {
    return (await client.chat.completions.create(fields)).choices[0].message;
  }
  return (await client.chat.completions.stream(fields).finalChatCompletion()).choices[0].message;
}

let said = await reply();
while (said.tool_calls?.length) {
  messages.push(said);
  for (const call of said.tool_calls) {
    const content = runTool(call.function.name, JSON.parse(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
  said = await reply();
}
console.log(said.content);
