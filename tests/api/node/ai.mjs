// Talks to the server at argv[2] with Vercel's AI SDK, in both dialects; prints what came of it as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const apiKey = "sesame";
const openai = createOpenAICompatible({
  name: "tandem", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const models = { chat: openai("fake"), messages: createAnthropic({ baseURL, apiKey })("fake") };
const tools = {
  add: tool({
    description: "Adds.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => a + b,
  }),
  time: tool({ description: "Tells the time.", inputSchema: z.object({ zone: z.string() }), execute: async () => "noon" }),
};
const calls = (step) => step.toolCalls.map((call) => [call.toolName, call.input]);
const results = {};

for (const [name, model] of Object.entries(models)) {
  const options = { model, maxRetries: 0, onError: () => {} };
  const of = (results[name] = {});

  const whole = await generateText({ ...options, prompt: "hi" });
  of.whole = [whole.text, whole.finishReason, whole.usage.outputTokens];

  const stream = streamText({ ...options, prompt: "hi" });
  const parts = [];
  for await (const part of stream.textStream) parts.push(part);
  of.stream = [parts.length > 1, parts.join(""), await stream.finishReason, (await stream.usage).outputTokens];

  const thought = streamText({ ...options, prompt: "think", providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } } });
  of.thought = [await thought.reasoningText, await thought.text];

  const agent = await generateText({ ...options, prompt: "call", tools, stopWhen: stepCountIs(3) });
  of.agent = [agent.steps.map(calls), agent.text];

  const streamed = streamText({ ...options, prompt: "call", tools, stopWhen: stepCountIs(3) });
  const kinds = new Set();
  for await (const part of streamed.fullStream) kinds.add(part.type);
  of.streamed = [(await streamed.steps).map(calls), await streamed.text, kinds.has("tool-input-delta")];

  const form = Output.object({ schema: z.object({ x: z.number(), label: z.string() }) });
  of.object = (await generateText({ ...options, prompt: "form", output: form })).output;
  of.streamedObject = await streamText({ ...options, prompt: "form", output: form }).output;

  try {
    await generateText({ ...options, prompt: "x".repeat(9000) });
  } catch (error) {
    of.error = [error.statusCode, error.isRetryable, error.message.includes("maximum")];
  }
}

console.log(JSON.stringify(results));
