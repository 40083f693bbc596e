// The task of all drivers: two tools, and what the environment says about the run.
import { readFileSync, writeFileSync } from "node:fs";

export const STREAMED = process.env.AGENT_STREAMED === "yes";
export const API = process.env.AGENT_API;
export const TASK = process.env.AGENT_TASK;
export const MODEL = "policy";

const string = { type: "string" };

export const TOOLS = [
  {
    name: "look",
    description: "Read a file.",
    parameters: { type: "object", properties: { path: string }, required: ["path"] },
    run: ({ path }) => readFileSync(path, "utf8"),
  },
  {
    name: "write",
    description: "Write a file, in capitals.",
    parameters: {
      type: "object",
      properties: { path: string, text: string },
      required: ["path", "text"],
    },
    run: ({ path, text }) => {
      writeFileSync(path, text.toUpperCase());
      return `It now says ${text.toUpperCase()}.`;
    },
  },
];

export function runTool(name, argumentsOfCall) {
  return TOOLS.find((tool) => tool.name === name).run(argumentsOfCall);
}
