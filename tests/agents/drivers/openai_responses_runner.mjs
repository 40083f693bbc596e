// OpenAI's JavaScript client with its tool runner for Responses.
import OpenAI from "openai";
import { ResponsesToolRunner } from "openai/helpers/responses-tool-runner";
import { MODEL, STREAMED, TASK, TOOLS } from "./world.mjs";

const functions = TOOLS.map(({ name, description, parameters, run }) => ({
  tool: { type: "function", name, description, parameters, strict: false },
  execute: run,
}));
const runner = new ResponsesToolRunner({ functions });
const said = await runner.run(
  new OpenAI(),
  { model: MODEL, input: TASK },
  { stream: STREAMED },
);
console.log(said.output_text);
