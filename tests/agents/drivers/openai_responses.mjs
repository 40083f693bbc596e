// OpenAI's JavaScript client with Responses, in the loop of its documentation.
import OpenAI from "openai";
import { MODEL, STREAMED, TASK, TOOLS, runTool } from "./world.mjs";

const client = new OpenAI();
const tools = TOOLS.map(({ name, description, parameters }) => ({
  type: "function",
  name,
  description,
  parameters,
}));
const input = [{ role: "user", content: TASK }];

async function reply() {
  const fields = { model: MODEL, input, tools };
  if (!STREAMED) {
    return await client.responses.create(fields);
  }
  return await client.responses.stream(fields).finalResponse();
}

while (true) {
  const said = await reply();
  input.push(...said.output);
  const calls = said.output.filter((item) => item.type === "function_call");
  if (!calls.length) {
    console.log(said.output_text);
    break;
  }
  for (const call of calls) {
    const output = runTool(call.name, JSON.parse(call.arguments));
    input.push({ type: "function_call_output", call_id: call.call_id, output });
  }
}
