// Lets the model roll a die with a tool, by the official openai package: JSON on stdin, the answer on stdout.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const tools = JSON.parse(readFileSync(new URL("../tools.json", import.meta.url), "utf8"));

async function play(question) {
  const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY
  const reply = await client.chat.completions.create(
    { model: process.env.OPENAI_MODEL, messages: [{ role: "user", content: question }], tools },
    { headers: { "agentrig-span": "player" } },
  );
  const call = reply.choices[0].message.tool_calls?.find((call) => call.function.name === "roll");
  const sides = call ? JSON.parse(call.function.arguments).sides : 0;
  if (!Number.isInteger(sides) || sides < 1) return 0;
  console.error(`rolled ${1 + Math.floor(Math.random() * sides)}`);
  return sides;
}

const { question } = JSON.parse(readFileSync(0, "utf8"));
try {
  console.log(JSON.stringify({ sides: await play(question) }));
} catch (error) {
  console.error(String(error));
  process.exit(error instanceof OpenAI.APIError ? 22 : 1);
}
