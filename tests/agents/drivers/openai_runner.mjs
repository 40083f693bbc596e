// OpenAI's JavaScript client with Chat Completions and its tool runner.
import OpenAI from "openai";
import { MODEL, STREAMED, TASK, TOOLS } from "./world.mjs";

const client = new OpenAI();
const tools = TOOLS.map(({ name, description, parameters, run }) => ({
  type: "function",
  function: { name, description, parameters, parse: JSON.parse, function: run },
}));
const runner = client.chat.completions.runTools({
  model: MODEL,
  messages: [{ role: "user", content: TASK }],
  tools,
  stream: STREAMED,
});
console.log(await runner.finalContent());
