# A program that does what its input says: one fault, or nothing wrong (the answer is what the model said).
set -u
do=$(sed 's/.*"do": "\([a-z-]*\)".*/\1/')
base=$OPENAI_BASE_URL
key=$OPENAI_API_KEY

ask() { # seconds, and more arguments of curl → the reply
  curl -sS --fail-with-body --max-time "$1" "$base/chat/completions" -H "Authorization: Bearer $key" "${@:2}"
}
body() { # text, and more of the request
  printf '{"model": "%s", "messages": [{"role": "user", "content": "%s"}]%s}' "$OPENAI_MODEL" "$1" "${2:-}"
}

case $do in
  good) ask 60 -d "$(body good)" >/dev/null && echo '"good"' ;;
  never-answers) sleep 600 ;;
  answers-twice)
    for n in 1 2; do
      curl -sS "$AGENTRIG_ANSWER_URL" -H "Authorization: Bearer $AGENTRIG_ANSWER_KEY" -d "{\"answer\": $n}"
    done ;;
  writes-for-ever) yes ;;
  streams-for-ever) ask 600 -N -d "$(body '[long]' ', "stream": true')" >/dev/null; exit 22 ;;
  sends-much) { printf '{"model": "m", "messages": [{"role": "user", "content": "'
    head -c 50000000 /dev/zero | tr '\0' x; printf '"}]}'; } | ask 60 --data-binary @- >&2 || exit 22 ;;
  breaks-off) ask 0.5 -N -d "$(body '[long]' ', "stream": true')" >/dev/null || exit 22 ;;
  forks) for n in $(seq 40); do (setsid env -i sleep 987654 &); done; sleep 600 ;;
  fills-disk) for n in $(seq 100000); do head -c 1000000 /dev/zero > "f$n"; done ;;
  fills-memory) exec python3 -c 'x = bytearray(500 << 20); import time; time.sleep(600)' ;;
  steals) base=$(cat "$PLACE/base") key=$OPENAI_API_KEY; ask 60 -d "$(body stolen)" >&2 || exit 22 ;;
  leaves-key) echo "$base" > "$PLACE/base.new"; mv "$PLACE/base.new" "$PLACE/base"; echo "$key" > "$PLACE/key"
    until [ -e "$PLACE/stolen" ]; do sleep 0.05; done
    ask 60 -d "$(body good)" >/dev/null && echo '"good"' ;;
  calls-late) base=$(cat "$PLACE/base") key=$(cat "$PLACE/key"); ask 60 -d "$(body late)" >&2 || exit 22 ;;
esac
