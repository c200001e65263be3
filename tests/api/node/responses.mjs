// Asks for responses at argv[2] with openai's package for Node; prints what came of it as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "sesame", maxRetries: 0 });
const tools = [
  { type: "function", name: "add", parameters: { type: "object", properties: {} }, strict: false },
  { type: "custom", name: "apply_patch", description: "Edits files." },
];
const results = {};

const whole = await client.responses.create({ model: "fake", input: "hi" });
results.whole = [whole.output_text, whole.status, whole.usage.output_tokens];

const numbers = [];
let text = "";
for await (const event of await client.responses.create({ model: "fake", input: "hi", stream: true })) {
  numbers.push(event.sequence_number);
  if (event.type === "response.output_text.delta") text += event.delta;
}
results.stream = [text, numbers.every((number, i) => number === i)];

const runner = client.responses.stream({ model: "fake", input: "please call", tools });
const final = await runner.finalResponse();
results.items = final.output.map((item) => item.type);
const call = final.output.at(-1);
results.call = [call.name, JSON.parse(call.arguments)];

const output = { type: "function_call_output", call_id: call.call_id, output: "5" };
const second = await client.responses.create({
  model: "fake", input: [output], previous_response_id: final.id, tools,
});
results.second = second.output_text;

const patched = await client.responses.create({ model: "fake", input: "patch it", tools });
results.patch = [patched.output[0].type, patched.output[0].input];

results.stored = (await client.responses.retrieve(second.id)).output_text;
await client.responses.delete(second.id);
results.errors = [];
for (const body of [
  { model: "fake", input: "hi", previous_response_id: second.id },
  { model: "fake", input: "hi", temperature: 5, stream: true },
]) {
  try {
    await client.responses.create(body);
  } catch (error) {
    results.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
console.log(JSON.stringify(results));
