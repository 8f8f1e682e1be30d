#!/usr/bin/env bash
# Lets the model roll a die with a tool, by curl and jq: JSON on stdin, the answer as JSON on stdout.
set -euo pipefail

request=$(jq --slurpfile tools "$(dirname "$0")/../tools.json" \
  '{model: env.OPENAI_MODEL, messages: [{role: "user", content: .question}], tools: $tools[0]}')

# The key is not among curl's arguments, where other processes could see it.
reply=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" --data-binary @- <<<"$request" \
  -H "Content-Type: application/json" -H "agentrig-span: player" \
  -H @<(printf 'Authorization: Bearer %s\n' "$OPENAI_API_KEY")) || { echo "$reply" >&2; exit 22; }

sides=$(jq -r '[.choices[0].message.tool_calls[]? | select(.function.name == "roll")
  | .function.arguments | fromjson? | .sides? | numbers | floor][0] // 0' <<<"$reply")
if ((sides > 0)); then
  echo "rolled $((RANDOM % sides + 1))" >&2
fi
echo "{\"sides\": $sides}"
