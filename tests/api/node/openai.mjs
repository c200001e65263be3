// Talks to the server at argv[2] with openai's package for Node; prints what came of it as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "sesame", maxRetries: 0 });
const chat = { model: "fake", messages: [{ role: "user", content: "hi" }] };
const results = {};

const whole = await client.chat.completions.create(chat);
results.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens];

results.stream = [];
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  results.stream.push([chunk.choices[0].delta.content ?? null, chunk.choices[0].finish_reason]);
}

const runner = client.chat.completions.stream({ ...chat, n: 2, stream_options: { include_usage: true } });
const final = await runner.finalChatCompletion();
results.final = [...final.choices.map((choice) => choice.message.content), final.usage.completion_tokens];

const logged = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2, max_tokens: 3 });
results.logprobs = logged.choices[0].logprobs.content.map((entry) => [entry.token, entry.top_logprobs.length]);

const embedded = await client.embeddings.create({ model: "fake", input: ["a", "b"] });
results.embeddings = embedded.data.map((item) => item.embedding.length);

results.models = [];
for await (const model of client.models.list()) results.models.push(model.id);

const completion = await client.completions.create({ model: "fake", prompt: "a", max_tokens: 3 });
results.completion = completion.choices[0].text;

results.errors = [];
for (const body of [
  { ...chat, messages: [{ role: "user", content: "x".repeat(9000) }] },
  { ...chat, temperature: 5, stream: true },
]) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    results.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}

const abandoned = await client.chat.completions.create({ ...chat, stream: true, max_tokens: 20 });
for await (const _ of abandoned) break;
abandoned.controller.abort();

console.log(JSON.stringify(results));
