// Vercel's AI SDK with its agent, and one of three providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ToolLoopAgent, jsonSchema, tool } from "ai";
import { API, MODEL, STREAMED, TASK, TOOLS } from "./world.mjs";

const models = {
  openai: () => (API === "chat" ? createOpenAI().chat(MODEL) : createOpenAI().responses(MODEL)),
  anthropic: () => createAnthropic()(MODEL),
  "openai-compatible": () =>
    createOpenAICompatible({
      name: "gateway",
      baseURL: process.env.OPENAI_BASE_URL,
      apiKey: process.env.OPENAI_API_KEY,
    })(MODEL),
};
const agent = new ToolLoopAgent({
  model: models[process.env.AGENT_PROVIDER](),
  tools: Object.fromEntries(
    TOOLS.map(({ name, description, parameters, run }) => [
      name,
      tool({ description, inputSchema: jsonSchema(parameters), execute: async (said) => run(said) }),
    ]),
  ),
});
if (STREAMED) {
  const result = await agent.stream({ prompt: TASK });
  for await (const piece of result.textStream) {
    process.stdout.write(piece);
  }
} else {
  console.log((await agent.generate({ prompt: TASK })).text);
}
